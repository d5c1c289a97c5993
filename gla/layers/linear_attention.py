"""Linear attention layer: projections, gate, the recurrence, output norm and output gate.

With the default options this is the layer of GLA (Yang et al. 2023, arXiv 2312.06635, section 4):
K = D/2 and V = D in total over the heads, a low-rank gate a key channel, RMSNorm of each head's
output, a swish output gate. With other gates and feature maps it is linear attention, Performer,
Based, RetNet and Lightning Attention; ``gla.presets()`` has their tables.

A decoded token costs O(F V) operations a head, and the state holds F V numbers a head (F more with
the normalizer) after any number of tokens; F = K without a feature map that makes more of them.

Sizes: B batch, T tokens, D model width, H heads, G heads of keys and values, K and V dimensions of
one head's keys and values, F features of one head's keys, N sequences (N = B, or the number of
packed documents).
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gla.errors import ConfigError
from gla.layers.cache import place_tokens
from gla.layers.feature_maps import POSITIVE, FeatureMapName, build_feature_map
from gla.layers.gates import DecayRecorder, FixedByLayerGate, GateName, build_gate
from gla.layers.linear import Linear
from gla.layers.mixer import Mixer, MixerConfig
from gla.layers.norms import RMSNorm
from gla.layers.rotary import rotate
from gla.layers.short_convolution import ShortConvolution
from gla.ops import forms
from gla.ops.gated_linear_attention import gated_linear_attention
from gla.ops.validation import MAX_HEAD_DIM
from gla.state import LinearState

Count = Annotated[int, Field(ge=1)]

_ROTARY_BASE = 10_000.0
_BEFORE_THE_MAP = ("favor", "favor_pair")  # their products depend on angles: rotated inputs do


class RecurrenceConfig(MixerConfig):
    """Options of every mixer on the op.

    Attributes:
        num_heads: H; None is one for 64 channels of the values.
        norm_eps: of the RMSNorm of the output.
        impl: form of the op; "auto" chooses by device. One that no device here runs is refused when
            the layer is built.
        chunk_size: of the op; None is the form's choice.
    """

    num_heads: Count | None = None
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    impl: Literal["auto", "recurrent", "torch", "triton"] = "auto"
    chunk_size: Literal[16, 32, 64, 128, 256] | None = None

    @property
    def fused(self) -> bool:
        """Whether Triton kernels also do what lies beside the op: where they are named for it."""
        return self.impl == "triton"


class LinearAttentionConfig(RecurrenceConfig):
    """Options of ``LinearAttention``, besides those of ``RecurrenceConfig``.

    Attributes:
        kind: "linear_attention".
        gate: "none", "fixed", "fixed_by_layer", "head" or "channel"; see ``gla.layers.gates``.
        num_kv_heads: G, heads of keys, values and gates, each shared by H / G heads; None is H.
        key_dim: K of all H heads together; None is expand_k * d_model.
        expand_k: used where key_dim is None.
        value_dim: V of all H heads together; None is d_model.
        feature_map: on queries and keys; see ``gla.layers.feature_maps``.
        num_features: F of a head for the maps that leave a choice; None is their default.
        redraw_every: training steps after which the random features are drawn anew; 0 is never.
        normalize: divide by the normalizer, which needs a feature map with positive products, in
            place of the RMSNorm of each head.
        rotary: embed positions in queries and keys (base 10,000). With the normalizer only before
            "favor": behind the other maps a rotated product may be negative.
        output_gate: multiply the output with silu(W x).
        conv_width: tokens that a short convolution of q, k and v spans; 0 leaves it out.
        causal: False lets every token read its whole document: for encoders; no gate and no
            convolution, which have a direction, and no choice of form.
    """

    kind: Literal["linear_attention"] = "linear_attention"
    gate: GateName = "channel"
    num_kv_heads: Count | None = None
    key_dim: Count | None = None
    expand_k: Annotated[float, Field(gt=0)] = 0.5
    value_dim: Count | None = None
    feature_map: FeatureMapName = "identity"
    num_features: Count | None = None
    redraw_every: Annotated[int, Field(ge=0)] = 0
    normalize: bool = False
    rotary: bool = False
    output_gate: bool = True
    conv_width: Annotated[int, Field(ge=0)] = 0
    causal: bool = True


class LinearAttentionState(NamedTuple):
    """State of the layer.

    Attributes:
        conv: [N, W-1, H K + G K + G V] last inputs of the convolution, fp32 or wider, or None.
        recurrent: state of the recurrence.
        position: [N] int64, tokens read so far; None without rotary positions.
    """

    conv: Tensor | None
    recurrent: LinearState
    position: Tensor | None = None


class LinearAttention(DecayRecorder, Mixer[LinearAttentionState]):
    """The layer."""

    def __init__(self, d_model: int, config: LinearAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = H = config.num_heads or max(1, d_model // 64)
        self.num_kv_heads = G = config.num_kv_heads or H
        total = config.key_dim or max(1, int(d_model * config.expand_k))
        self.key_dim = head_dim("key_dim", total, H)
        self.value_dim = head_dim("value_dim", config.value_dim or d_model, H)
        check_groups(H, G)
        self.feature_map = build_feature_map(
            config.feature_map, H, G, self.key_dim, config.num_features, config.redraw_every
        )
        self.num_features = self.feature_map.num_features
        self.causal = config.causal
        _check_options(config, self.key_dim, self.num_features)
        check_recurrence(config, self.num_features, self.value_dim)
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

    def set_depth(self, layer: int, layers: int) -> None:
        """See ``Mixer.set_depth``."""
        if isinstance(self.gate, FixedByLayerGate):
            self.gate.rest = 1 - layer / layers

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
        shape = (batch_size, self.num_heads, self.num_features, self.value_dim)
        S = torch.zeros(shape, device=device, dtype=wide)
        z = S.new_zeros(shape[:3]) if self.config.normalize else None
        conv = self.conv and self.conv.init_state(batch_size, device, wide)
        position = None
        if self.config.rotary:
            position = torch.zeros(batch_size, device=device, dtype=torch.int64)
        return LinearAttentionState(conv, LinearState(S, z), position)

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
            qkv = torch.cat([q, k, v], dim=-1)
            qkv, conv = self.conv(qkv, before, cu_seqlens, self.config.fused)
            q, k, v = qkv.split(self.sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, -1))
        k, v = (x.unflatten(-1, (self.num_kv_heads, -1)) for x in (k, v))
        q, k, position = self._map(q, k, None if state is None else state.position, cu_seqlens)
        log_decay = None if self.gate is None else self.gate(x)
        if log_decay is not None:
            self.note_decay(log_decay)
        o, recurrent = gated_linear_attention(
            q,
            k,
            v.to(q.dtype),  # wider for a feature map that must not be rounded
            log_decay,
            normalize=self.config.normalize,
            initial_state=None if state is None else state.recurrent,
            cu_seqlens=cu_seqlens,
            causal=self.causal,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        o = o.to(v.dtype)
        z = None
        if self.gate_proj is not None:
            z = self.gate_proj(x).unflatten(-1, (self.num_heads, -1))
        if self.norm is not None and z is not None:
            o = self.norm.gated(o, z, self.config.fused)
        elif self.norm is not None:
            o = self.norm(o)
        elif z is not None:
            o = o * F.silu(z)
        o = o.flatten(-2)
        if not (need_state and self.causal):
            return self.out_proj(o), None
        return self.out_proj(o), LinearAttentionState(conv, recurrent, position)

    def _map(
        self, q: Tensor, k: Tensor, before: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """phi(q), phi(k), rotated if asked for, and the position [N] after the new tokens."""
        if not self.config.rotary:
            return *self.feature_map(q, k), None
        B, T = q.shape[:2]
        if before is None:
            N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
            before = torch.zeros(N, device=q.device, dtype=torch.int64)
        place = place_tokens(before, B, T, cu_seqlens)
        if self.config.feature_map in _BEFORE_THE_MAP:
            q, k = rotate(q, k, place.position, _ROTARY_BASE)
            q, k = self.feature_map(q, k)
        else:
            q, k = self.feature_map(q, k)
            q, k = rotate(q, k, place.position, _ROTARY_BASE)
        return q, k, before + place.length


def _check_options(config: LinearAttentionConfig, key_dim: int, num_features: int) -> None:
    """Refuse options that do not go together; ``key_dim`` is K and ``num_features`` F."""
    if config.normalize and config.feature_map not in POSITIVE:
        raise ConfigError(
            f"feature_map: got {config.feature_map!r} with normalize = true, expected one of "
            f"{', '.join(POSITIVE)}; fix feature_map or normalize"
        )
    if config.rotary and config.normalize and config.feature_map not in _BEFORE_THE_MAP:
        raise ConfigError(
            f"rotary: got true with normalize = true and feature_map {config.feature_map!r}, "
            f"expected one of {', '.join(_BEFORE_THE_MAP)}; fix rotary or feature_map"
        )
    rotated = key_dim if config.feature_map in _BEFORE_THE_MAP else num_features
    if config.rotary and rotated % 2:
        raise ConfigError(
            f"rotary: got true with {rotated} channels of a key, expected an even number; "
            "fix key_dim or rotary"
        )
    neutral_values = {"gate": "none", "conv_width": 0, "impl": "auto", "chunk_size": None}
    for field, neutral in neutral_values.items():
        if not config.causal and getattr(config, field) != neutral:
            raise ConfigError(
                f"{field}: got {getattr(config, field)!r} with causal = false, expected "
                f"{neutral!r}; fix {field} or causal"
            )


def check_recurrence(config: RecurrenceConfig, num_features: int, value_dim: int) -> None:
    """Check that some form of the op takes heads of these sizes, on some device of this machine.

    Args:
        config: its ``impl`` is checked.
        num_features: F, the key dimension of the op.
        value_dim: V of one head.

    Raises:
        ConfigError: none does.
    """
    for field, got, size in (
        ("key_dim", f"{num_features} features", num_features),
        ("value_dim", str(value_dim), value_dim),
    ):
        if size > MAX_HEAD_DIM:
            raise ConfigError(
                f"{field}: got {got} a head, expected at most {MAX_HEAD_DIM}; fix num_heads"
            )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        forms.resolve(config.impl, 2, device, dims=(num_features, value_dim))
    except ValueError as reason:
        options = "--impl torch; in training --model.mixers.NAME.impl torch"
        raise ConfigError(f"{reason} ({options})") from None


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
