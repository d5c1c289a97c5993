"""Linear attention layer: projections, gate, the recurrence, output norm and output gate.

With the default options this is the layer of GLA (Yang et al. 2023, arXiv 2312.06635, section 4):
K = D/2 and V = D in total over the heads, a low-rank gate a key channel, RMSNorm of each head's
output, a swish output gate.

Sizes: B batch, T tokens, D model width, H heads, G heads of keys and values, K and V dimensions of
one head's keys and values, N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor

from gla.errors import ConfigError
from gla.layers.feature_maps import FEATURE_MAPS
from gla.layers.gates import build_gate
from gla.layers.linear import Linear
from gla.layers.mixer import Mixer, MixerConfig
from gla.layers.norms import RMSNorm
from gla.layers.short_convolution import ShortConvolution
from gla.ops.gated_linear_attention import gated_linear_attention
from gla.ops.validation import MAX_HEAD_DIM
from gla.state import LinearState

Count = Annotated[int, Field(ge=1)]

_RECORDED_TOKENS = 256


class LinearAttentionConfig(MixerConfig):
    """Options of ``LinearAttention``.

    Attributes:
        kind: "linear_attention".
        gate: "none", "fixed", "head" or "channel"; see ``gla.layers.gates``.
        num_heads: H; None is max(1, d_model // 64).
        num_kv_heads: G, heads of keys, values and gates, each shared by H / G heads; None is H.
        key_dim: K of all H heads together; None is d_model // 2.
        value_dim: V of all H heads together; None is d_model.
        feature_map: "identity", "elu", "relu" or "silu", on queries and keys.
        normalize: divide by the normalizer, which needs a positive feature map, in place of the
            RMSNorm of each head.
        output_gate: multiply the output with silu(W x).
        conv_width: tokens that a short convolution of q, k and v spans; 0 leaves it out.
        norm_eps: of the RMSNorm.
        impl: form of the op; "auto" chooses by device.
        chunk_size: of the op; None is the form's choice.
        causal: False lets every token read its whole document: for encoders; no gate and no
            convolution, which have a direction.
    """

    kind: Literal["linear_attention"] = "linear_attention"
    gate: Literal["none", "fixed", "head", "channel"] = "channel"
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    key_dim: Count | None = None
    value_dim: Count | None = None
    feature_map: Literal["identity", "elu", "relu", "silu"] = "identity"
    normalize: bool = False
    output_gate: bool = True
    conv_width: Annotated[int, Field(ge=0)] = 0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    impl: Literal["auto", "recurrent", "torch", "triton"] = "auto"
    chunk_size: Literal[16, 32, 64, 128, 256] | None = None
    causal: bool = True


class LinearAttentionState(NamedTuple):
    """State of the layer.

    Attributes:
        conv: [N, W-1, H K + G K + G V] last inputs of the convolution, fp32 or wider, or None.
        recurrent: state of the recurrence.
    """

    conv: Tensor | None
    recurrent: LinearState


class LinearAttention(Mixer[LinearAttentionState]):
    """The layer. Set ``record = True`` to keep a sample of the gate's log-decay for monitoring.

    Attributes:
        record: whether ``forward`` stores ``last_log_decay``.
        last_log_decay: [n, ...] detached log-decay of up to 256 tokens of the last forward.
    """

    def __init__(self, d_model: int, config: LinearAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = H = config.num_heads or max(1, d_model // 64)
        self.num_kv_heads = G = config.num_kv_heads or H
        self.key_dim = head_dim("key_dim", config.key_dim or d_model // 2, H)
        self.value_dim = head_dim("value_dim", config.value_dim or d_model, H)
        check_groups(H, G)
        for field, size in (("key_dim", self.key_dim), ("value_dim", self.value_dim)):
            if size > MAX_HEAD_DIM:
                raise ConfigError(
                    f"{field}: got {size} a head, expected at most {MAX_HEAD_DIM}; fix num_heads"
                )
        if config.normalize and not FEATURE_MAPS[config.feature_map].positive:
            good = ", ".join(name for name, m in FEATURE_MAPS.items() if m.positive)
            raise ConfigError(
                f"feature_map: got {config.feature_map!r} with normalize = true, expected one of "
                f"{good}; fix feature_map or normalize"
            )
        self.causal = config.causal
        for field, neutral in (("gate", "none"), ("conv_width", 0)):
            if not config.causal and getattr(config, field) != neutral:
                raise ConfigError(
                    f"{field}: got {getattr(config, field)!r} with causal = false, expected "
                    f"{neutral!r}; fix {field} or causal"
                )
        self.sizes = (H * self.key_dim, G * self.key_dim, G * self.value_dim)
        self.q_proj, self.k_proj, self.v_proj = (Linear(d_model, size) for size in self.sizes)
        self.conv = None
        if config.conv_width:
            self.conv = ShortConvolution(sum(self.sizes), config.conv_width)
        self.gate = build_gate(config.gate, d_model, G, self.key_dim)
        self.norm = None if config.normalize else RMSNorm(self.value_dim, config.norm_eps)
        self.gate_proj = None
        if config.output_gate:
            self.gate_proj = Linear(d_model, H * self.value_dim)
        self.out_proj = Linear(H * self.value_dim, d_model)
        self.record = False
        self.last_log_decay: Tensor | None = None

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearAttentionState:
        """Zero state; fp32, or fp64 for fp64 activations."""
        self.require_causal("a call for a state")
        weight = self.out_proj.weight
        device = device or weight.device
        wide = torch.promote_types(dtype or weight.dtype, torch.float32)
        shape = (batch_size, self.num_heads, self.key_dim, self.value_dim)
        S = torch.zeros(shape, device=device, dtype=wide)
        z = S.new_zeros(shape[:3]) if self.config.normalize else None
        conv = self.conv and self.conv.init_state(batch_size, device, wide)
        return LinearAttentionState(conv, LinearState(S, z))

    def forward(
        self,
        x: Tensor,
        state: LinearAttentionState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, LinearAttentionState | None]:
        """See ``Mixer.forward``."""
        if state is not None:
            self.require_causal("a state")
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv = None
        if self.conv is not None:
            before = None if state is None else state.conv
            qkv, conv = self.conv(torch.cat([q, k, v], dim=-1), before, cu_seqlens)
            q, k, v = qkv.split(self.sizes, dim=-1)
        feature_map = FEATURE_MAPS[self.config.feature_map].function
        q = feature_map(rearrange(q, "b t (h k) -> b t h k", h=self.num_heads))
        k = feature_map(rearrange(k, "b t (g k) -> b t g k", g=self.num_kv_heads))
        v = rearrange(v, "b t (g v) -> b t g v", g=self.num_kv_heads)
        o, recurrent = gated_linear_attention(
            q,
            k,
            v,
            self._log_decay(x),
            normalize=self.config.normalize,
            initial_state=None if state is None else state.recurrent,
            cu_seqlens=cu_seqlens,
            causal=self.causal,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        if self.norm is not None:
            o = self.norm(o)
        o = rearrange(o, "b t h v -> b t (h v)")
        if self.gate_proj is not None:
            o = o * F.silu(self.gate_proj(x))
        if not (need_state and self.causal):
            return self.out_proj(o), None
        return self.out_proj(o), LinearAttentionState(conv, recurrent)

    def _log_decay(self, x: Tensor) -> Tensor | None:
        log_decay = None if self.gate is None else self.gate(x)
        if self.record and log_decay is not None:
            sample = log_decay.detach()
            if sample.dim() > 1:
                sample = sample.flatten(0, 1)
                sample = sample[:: -(-len(sample) // _RECORDED_TOKENS) or 1].clone()
            self.last_log_decay = sample
        return log_decay


def head_dim(field: str, total: int, num_heads: int) -> int:
    """Return total / num_heads.

    Raises:
        ConfigError: it does not divide; the message shows the arithmetic.
    """
    if total % num_heads:
        raise ConfigError(
            f"num_heads: got {num_heads} heads for {field} = {total}, and {total} % {num_heads} = "
            f"{total % num_heads}, expected 0; fix num_heads or {field}"
        )
    return total // num_heads


def check_groups(num_heads: int, num_kv_heads: int) -> None:
    """Check that query heads split evenly over the heads of keys and values.

    Raises:
        ConfigError: they do not; the message shows the arithmetic.
    """
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_kv_heads: got {num_kv_heads} for {num_heads} heads, and {num_heads} % "
            f"{num_kv_heads} = {num_heads % num_kv_heads}, expected 0; fix num_kv_heads"
        )
