"""HGRN2 (Qin et al. 2024, arXiv 2404.07904): the forget gate makes the keys.

    f_t = b_l + (1 - b_l) sigmoid(W_f x_t)       log_decay = log f_t,  k_t = 1 - f_t

so what a channel forgets and what it takes in add up to one. b_l is the lower bound of layer l, a
learned number a channel: later layers remember for longer. In the paper the bounds of all layers
are one table, with running sums of a softmax over layers. Here b_l = (l + sigmoid(w)) / L: it
starts near the paper's l / L, keeps the order of the layers, and needs nothing from other layers.

A decoded token costs O(K V) operations a head; the state holds K V numbers a head.

Sizes: B batch, T tokens, D model width, H heads, K = V = D / H, N sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from gla.layers.gates import DecayRecorder
from gla.layers.linear import Linear, WideLinear, WideModule
from gla.layers.linear_attention import RecurrenceConfig, check_recurrence, head_dim
from gla.layers.mixer import Mixer
from gla.layers.norms import RMSNorm
from gla.ops.gated_linear_attention import gated_linear_attention
from gla.state import LinearState

_BOUND_LOGIT = -2.0  # at the start: sigmoid(-2) = 0.12


class HGRN2Config(RecurrenceConfig):
    """Options of ``HGRN2``; see ``RecurrenceConfig``. num_heads is max(1, d_model // 64) if None.

    Attributes:
        kind: "hgrn2".
    """

    kind: Literal["hgrn2"] = "hgrn2"


class ForgetGate(WideModule):
    """The gate f, bounded from below, in fp32.

    Attributes:
        bound_logits: [D] what b_l is made of.
        layer, layers: l and L.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.layer, self.layers = 0, 1
        self.proj = WideLinear(d_model, d_model)
        self.bound_logits = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bounds to their start."""
        nn.init.constant_(self.bound_logits, _BOUND_LOGIT)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> log f and 1 - f, each [B, T, D], fp32 or wider."""
        bound = (self.layer + self.bound_logits.sigmoid()) / self.layers
        logits = self.proj(x)
        take = (1 - bound) * torch.sigmoid(-logits)
        keep = bound + (1 - bound) * torch.sigmoid(logits)  # f without cancellation near 0
        near_one = take < 0.5
        log_f = torch.where(
            near_one,
            torch.log1p(-take.clamp_max(0.5)),  # without cancellation near 1
            keep.clamp_min(torch.finfo(keep.dtype).tiny).log(),
        )
        return log_f, take


class HGRN2(DecayRecorder, Mixer[LinearState]):
    """The layer; its state is that of the recurrence."""

    def __init__(self, d_model: int, config: HGRN2Config) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads or max(1, d_model // 64)
        self.dim = head_dim("d_model", d_model, self.num_heads)
        check_recurrence(config, self.dim, self.dim)
        self.q_proj = Linear(d_model, d_model)
        self.gate = ForgetGate(d_model)
        self.v_proj = Linear(d_model, d_model)
        self.norm = RMSNorm(self.dim, config.norm_eps)
        self.out_proj = Linear(d_model, d_model)

    def set_depth(self, layer: int, layers: int) -> None:
        """See ``Mixer.set_depth``."""
        self.gate.layer, self.gate.layers = layer, layers

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearState:
        """Zero state; fp32, or fp64 for fp64 activations."""
        weight = self.out_proj.weight
        wide = torch.promote_types(dtype or weight.dtype, torch.float32)
        shape = (batch_size, self.num_heads, self.dim, self.dim)
        return LinearState(torch.zeros(shape, device=device or weight.device, dtype=wide))

    def forward(
        self,
        x: Tensor,
        state: LinearState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, LinearState | None]:
        """See ``Mixer.forward``."""
        v = self.v_proj(x)
        log_decay, take = self.gate(x)
        self.note_decay(log_decay)
        q, k, v, log_decay = (
            rearrange(u, "b t (h k) -> b t h k", h=self.num_heads)
            for u in (F.silu(self.q_proj(x)), take.to(v.dtype), v, log_decay)
        )
        o, after = gated_linear_attention(
            q,
            k,
            v,
            log_decay,
            initial_state=state,
            cu_seqlens=cu_seqlens,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        o = rearrange(self.norm(o), "b t h v -> b t (h v)")
        return self.out_proj(o), after if need_state else None
