"""What mixers share that read a whole document at once, in both directions.

They have no state and no decoding, and stand in encoders only. A packed row is sorted into a few
batches of documents of similar length, so padding exists inside the mixer only, behind each
document, where ``attend`` is told of it by ``length``.

Sizes: B batch, T tokens, D model width, H heads, K dimension of a head, n documents of a batch, L
their padded length.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from gla.errors import ConfigError
from gla.layers.linear import Linear
from gla.layers.linear_attention import head_dim
from gla.layers.mixer import Mixer
from gla.layers.packing import batch_documents, outside_graph


class WholeDocumentMixer(Mixer[Any]):
    """Projections q, k, v, what a subclass makes of them document by document, and ``out_proj``.

    Args:
        d_model: D.
        num_heads: H; None is max(1, D // 64).
    """

    causal = False

    def __init__(self, d_model: int, num_heads: int | None) -> None:
        super().__init__()
        self.num_heads = num_heads or max(1, d_model // 64)
        self.dim = head_dim("d_model", d_model, self.num_heads)
        self.q_proj, self.k_proj, self.v_proj = (Linear(d_model, d_model) for _ in range(3))
        self.out_proj = Linear(d_model, d_model)

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, length: Tensor | None, *extra: Tensor
    ) -> Tensor:
        """Mix the rows of a batch.

        Args:
            q, k, v: [n, L, H, K].
            length: [n] int64, real tokens of each row, at least 1; None is L for all. What stands
                behind them is arbitrary and must not be read.
            extra: [n, L, ...], what ``per_token`` made.

        Returns:
            [n, L, H, K].
        """

    def per_token(self, x: Tensor) -> tuple[Tensor, ...]:
        """Make further tensors [B, T, ...] of x [B, T, D] that ``attend`` is given."""
        return ()

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, None]:
        """See ``Mixer.forward``; the state is always None."""
        if state is not None:
            self.require_causal("a state")
        q, k, v = (
            rearrange(p(x), "b t (h k) -> b t h k", h=self.num_heads)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        parts = (q, k, v, *self.per_token(x))
        if x.shape[1] == 0:
            o = v
        elif cu_seqlens is None:
            o = self.attend(q, k, v, None, *parts[3:])
        else:
            o = outside_graph(self._packed)(parts, cu_seqlens)
        return self.out_proj(rearrange(o, "b t h k -> b t (h k)")), None

    def _packed(self, parts: tuple[Tensor, ...], cu_seqlens: Tensor) -> Tensor:
        """Documents of a packed row as rows of a few batches: [1, T, ...] each -> [1, T, H, K]."""
        batches = batch_documents(cu_seqlens)
        length = cu_seqlens.diff().long()
        rows = zip(*(batches.split(p[0]) for p in parts), strict=True)
        outputs = [
            self.attend(q, k, v, length[documents], *extra)
            for documents, (q, k, v, *extra) in zip(batches.documents, rows, strict=True)
        ]
        return batches.join(outputs).unsqueeze(0)


def real_tokens(length: Tensor | None, tokens: int) -> Tensor | None:
    """[n] lengths -> [n, L] bool, True at real tokens; None for rows without pads."""
    if length is None:
        return None
    return torch.arange(tokens, device=length.device) < length.unsqueeze(1)


def refuse_causal(causal: bool, reason: str, instead: str) -> None:
    """Refuse ``causal = true`` with the reason.

    Raises:
        ConfigError: ``causal`` is true.
    """
    if causal:
        raise ConfigError(f"causal: got true, expected false: {reason}; fix with {instead}")
