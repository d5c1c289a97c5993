"""Nyströmformer attention (Xiong et al. 2021, arXiv 2102.03902), bidirectional.

    o = softmax(Q Kl^T) · softmax(Ql Kl^T)^+ · softmax(Ql K^T) V + conv(V)      scale 1 / sqrt(K)

Ql and Kl are m landmarks: means of the queries and keys of m segments of the document, equal in
length to within one token. The pseudo-inverse of A = softmax(Ql Kl^T) is approached by

    Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4,      Z = A^T / (|A|_1 |A|_inf) at first

where the norms are those of each matrix by itself. (One maximum over all heads and rows, as in the
authors' first code, would let the rows of a batch act on each other.) The tokens of a document of
at most m are themselves the landmarks, and the attention is exact but for the iteration. Every
output reads every token through the landmarks, so there is no causal form and no decoding. Cost
O(n m + m^3) a head.

Sizes: H heads, K dimension of a head, m landmarks, n documents of a batch, L their padded length.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from gla.errors import ConfigError
from gla.layers.mixer import MixerConfig
from gla.layers.whole_document import WholeDocumentMixer, real_tokens, refuse_causal

Count = Annotated[int, Field(ge=1)]

_BLOCK = 64  # tokens whose convolution is one product


class NystromConfig(MixerConfig):
    """Options of ``Nystrom``.

    Attributes:
        kind: "nystrom".
        num_heads: H; None is max(1, d_model // 64).
        landmarks: m.
        iterations: steps towards the pseudo-inverse.
        conv_width: tokens that the convolution of the values spans, odd; 0 leaves it out.
        causal: only false.
    """

    kind: Literal["nystrom"] = "nystrom"
    num_heads: Count | None = None
    landmarks: Count = 64
    iterations: Count = 6
    conv_width: Annotated[int, Field(ge=0)] = 33
    causal: bool = False

    @field_validator("conv_width")
    @classmethod
    def _odd(cls, width: int) -> int:
        if width and width % 2 == 0:
            raise ConfigError(
                f"conv_width: got {width}, expected 0 or an odd number, the token in the middle; "
                "fix conv_width"
            )
        return width


class Nystrom(WholeDocumentMixer):
    """The layer.

    Attributes:
        conv_weight: [H, conv_width], one kernel for all channels of a head, or None.
    """

    def __init__(self, d_model: int, config: NystromConfig) -> None:
        refuse_causal(
            config.causal,
            "landmarks are means over the whole document, so every output sees later tokens",
            'kind = "linformer_causal" or another causal mixer',
        )
        super().__init__(d_model, config.num_heads)
        self.config = config
        self.conv_weight: nn.Parameter | None = None
        if config.conv_width:
            self.conv_weight = nn.Parameter(torch.empty(self.num_heads, config.conv_width))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the kernels from U(-1/sqrt(W), 1/sqrt(W)), W their width, as ``nn.Conv1d`` does."""
        if self.conv_weight is not None:
            bound = self.config.conv_width**-0.5
            nn.init.uniform_(self.conv_weight, -bound, bound)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, length: Tensor | None, *extra: Tensor
    ) -> Tensor:
        """See ``WholeDocumentMixer.attend``. Softmaxes and inverse run in fp32 or wider."""
        dtype, L = v.dtype, q.shape[1]
        wide = torch.promote_types(dtype, torch.float32)
        real = real_tokens(length, L)
        if real is not None:
            v = v.masked_fill(~real[..., None, None], 0)
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))  # [n, H, L, K]
            means, used = self._segments(length, L, q)
            q = q * self.dim**-0.5
            q_l, k_l = means @ q, means @ k
            # Documents of fewer than m tokens leave landmarks without any: all about those is 0.
            near = _softmax(q @ k_l.transpose(-1, -2), used)
            middle = _softmax(q_l @ k_l.transpose(-1, -2), used) * used.transpose(-1, -2)
            far = _softmax(q_l @ k.transpose(-1, -2), None if real is None else real[:, None, None])
            o = near @ (pseudo_inverse(middle, self.config.iterations) @ (far @ v))
            if self.conv_weight is not None:
                o = o + convolve(v, self.conv_weight.to(wide))
        return o.transpose(1, 2).to(dtype)

    def _segments(self, length: Tensor | None, L: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Which token counts how much in which landmark.

        Returns:
            Weights [n or 1, 1, m, L] that make means, and which landmarks have tokens
            [n or 1, 1, 1, m] bool.
        """
        m = self.config.landmarks
        n = torch.full((1,), L, device=like.device) if length is None else length
        m_used = n.clamp_max(m).unsqueeze(1)
        t = torch.arange(L, device=like.device)
        segment = (t * m_used).div(n.unsqueeze(1), rounding_mode="floor")
        segment = segment.where(t < n.unsqueeze(1), -1)
        member = segment.unsqueeze(1) == torch.arange(m, device=like.device).unsqueeze(1)
        count = member.sum(-1, keepdim=True)
        means = member.to(like.dtype) / count.clamp_min(1)
        return means.unsqueeze(1), (count > 0).transpose(1, 2).unsqueeze(1)


def convolve(v: Tensor, weight: Tensor) -> Tensor:
    """Weigh each token with those around it, 0 beyond the ends.

    As products with one band matrix for blocks of tokens: on a CPU twelve times as fast as torch's
    convolution with one kernel for all channels of a head, and linear in the tokens as that is.

    Args:
        v: [n, H, L, K].
        weight: [H, W], W odd.

    Returns:
        [n, H, L, K].
    """
    L, W = v.shape[2], weight.shape[1]
    offset = torch.arange(_BLOCK + W - 1, device=v.device) - torch.arange(
        _BLOCK, device=v.device
    ).unsqueeze(1)
    inside = (offset >= 0) & (offset < W)
    band = weight[:, offset.clamp(0, W - 1)].where(inside, 0)  # [H, block, block + W - 1]
    padded = F.pad(v, (0, 0, W // 2, W // 2 + -L % _BLOCK))
    blocks = padded.unfold(2, _BLOCK + W - 1, _BLOCK)  # [n, H, L / block, K, block + W - 1]
    return torch.einsum("hcw,nhbkw->nhbck", band, blocks).flatten(2, 3)[:, :, :L]


def pseudo_inverse(A: Tensor, iterations: int) -> Tensor:
    """Approach the Moore-Penrose inverse of each matrix [..., m, m]; see the head of the file."""
    norm_1 = A.abs().sum(-2).amax(-1)
    norm_inf = A.abs().sum(-1).amax(-1)
    Z = A.transpose(-1, -2) / (norm_1 * norm_inf)[..., None, None]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = Z @ (13 * eye - AZ @ (15 * eye - AZ @ (7 * eye - AZ))) / 4
    return Z


def _softmax(scores: Tensor, read: Tensor | None) -> Tensor:
    if read is not None:
        scores = scores.masked_fill(~read, -math.inf)
    return scores.softmax(-1)
