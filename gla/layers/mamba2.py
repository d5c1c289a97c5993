"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) on the op: a gate a head and token from a step size.

    d_t = softplus(W_d x_t + b)                       step size of a head
    log_decay = -exp(A) d_t                           one learned rate A a head
    S_t = exp(log_decay) S_{t-1} + B_t (d_t u_t)^T    B and C shared by all heads
    y_t = S_t^T C_t + D u_t

u, B and C pass through a short convolution; the output is normalized after it is gated with
silu(z). Keys are B, queries C, values d u.

A decoded token costs O(K V) operations a head; the state holds K V numbers a head and 3 inputs of
the convolution.

Sizes: B batch, T tokens, D model width, E inner width, H heads, K = state_dim, V = E / H,
N sequences.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from gla.layers.gates import DecayRecorder
from gla.layers.linear import Linear, WideLinear, WideModule
from gla.layers.linear_attention import (
    Count,
    LinearAttentionState,
    RecurrenceConfig,
    check_recurrence,
    head_dim,
)
from gla.layers.mixer import Mixer
from gla.layers.norms import RMSNorm
from gla.layers.short_convolution import ShortConvolution
from gla.ops.gated_linear_attention import gated_linear_attention
from gla.state import LinearState

_STEPS = (1e-3, 1e-1)  # the step sizes of the start lie between, evenly by their logarithm
_RATES = (1.0, 16.0)  # and the rates exp(A) between these


class Mamba2Config(RecurrenceConfig):
    """Options of ``Mamba2``, besides those of ``RecurrenceConfig``; the defaults are the paper's.

    Attributes:
        kind: "mamba2". num_heads is max(1, expand * d_model // 64) if None.
        expand: E over d_model.
        state_dim: K, of the keys and queries that all heads share.
        conv_width: tokens that the convolution spans.
    """

    kind: Literal["mamba2"] = "mamba2"
    expand: Count = 2
    state_dim: Count = 128
    conv_width: Annotated[int, Field(ge=1)] = 4


class StepGate(WideModule):
    """Step sizes and decays, in fp32.

    Attributes:
        proj: W_d and b.
        log_rate: [H] A.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.proj = WideLinear(d_model, num_heads, bias=True)
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the steps and rates of the start."""
        low, high = (math.log(step) for step in _STEPS)
        step = torch.empty_like(self.log_rate).uniform_(low, high).exp()
        self.proj.bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus(bias) = step
        self.log_rate.uniform_(*_RATES).log_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> step [B, T, H] and log_decay [B, T, H], fp32 or wider."""
        step = F.softplus(self.proj(x))
        return step, -self.log_rate.exp() * step


class Mamba2(DecayRecorder, Mixer[LinearAttentionState]):
    """The layer."""

    def __init__(self, d_model: int, config: Mamba2Config) -> None:
        super().__init__()
        self.config = config
        inner = config.expand * d_model
        self.num_heads = config.num_heads or max(1, inner // 64)
        self.value_dim = head_dim("expand * d_model", inner, self.num_heads)
        check_recurrence(config, config.state_dim, self.value_dim)
        self.sizes = (inner, config.state_dim, config.state_dim)
        self.in_proj = Linear(d_model, sum(self.sizes))  # u, B, C
        self.conv = ShortConvolution(sum(self.sizes), config.conv_width)
        self.gate = StepGate(d_model, self.num_heads)
        self.skip = nn.Parameter(torch.empty(self.num_heads))
        self.gate_proj = Linear(d_model, inner)
        self.norm = RMSNorm(inner, config.norm_eps)
        self.out_proj = Linear(inner, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the skip D to 1."""
        nn.init.ones_(self.skip)

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearAttentionState:
        """Zero state; fp32, or fp64 for fp64 activations."""
        weight = self.out_proj.weight
        device = device or weight.device
        wide = torch.promote_types(dtype or weight.dtype, torch.float32)
        shape = (batch_size, self.num_heads, self.config.state_dim, self.value_dim)
        S = torch.zeros(shape, device=device, dtype=wide)
        return LinearAttentionState(self.conv.init_state(batch_size, device, wide), LinearState(S))

    def forward(
        self,
        x: Tensor,
        state: LinearAttentionState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, LinearAttentionState | None]:
        """See ``Mixer.forward``."""
        before = None if state is None else state.conv
        mixed, conv = self.conv(self.in_proj(x), before, cu_seqlens, self.config.fused)
        u, k, q = mixed.split(self.sizes, dim=-1)
        u = rearrange(u, "b t (h v) -> b t h v", h=self.num_heads)
        step, log_decay = self.gate(x)
        self.note_decay(log_decay)
        o, recurrent = gated_linear_attention(
            q.unsqueeze(2).expand(-1, -1, self.num_heads, -1),
            k.unsqueeze(2),
            u * step.unsqueeze(-1).to(u.dtype),
            log_decay,
            scale=1.0,
            initial_state=None if state is None else state.recurrent,
            cu_seqlens=cu_seqlens,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        o = rearrange(o + self.skip.to(u.dtype).unsqueeze(-1) * u, "b t h v -> b t (h v)")
        y = self.out_proj(self.norm(o * F.silu(self.gate_proj(x))))
        return y, LinearAttentionState(conv, recurrent) if need_state else None
