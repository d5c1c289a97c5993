"""Forget gates: how a layer computes ``log_decay``, the natural log of the gate, at most 0.

| gate             | log_decay                      | shape        | source                        |
|------------------|--------------------------------|--------------|-------------------------------|
| "none"           | None                           | -            | linear attention, 2006.16236  |
| "fixed"          | log(1 - 2^(-5 - h)) for head h | [G]          | RetNet, 2307.08621            |
| "fixed_by_layer" | -(8 h / G) (1 - l / L)         | [G]          | TransNormerLLM, 2307.14995    |
| "head"           | logsigmoid(W x + b) / 16       | [B, T, G]    | one number a head and token   |
| "channel"        | logsigmoid(W2 W1 x + b) / 16   | [B, T, G, K] | GLA, 2312.06635, rank 16      |

h is a head and l a layer, both from 0, L the number of layers. Sources are arXiv numbers. Mixers
with gates of their own (``hgrn2``, ``mamba2``) define them in their files.

Sizes: B batch, T tokens, D model width, G heads of keys and values, K key dimension.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla.layers.linear import WideLinear

GateName = Literal["none", "fixed", "fixed_by_layer", "head", "channel"]
RANK = 16
DIVISOR = 16  # pulls the gate towards 1: a sigmoid of 0.5 becomes a decay of 0.958 a token
_RECORDED_TOKENS = 256


class FixedGate(nn.Module):
    """One constant decay a head, the longest memory in the last head; no parameters."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> log_decay [G], fp32 or wider; x only gives device and dtype."""
        return torch.log1p(-torch.exp2(-5 - _heads(self.num_heads, x)))


class FixedByLayerGate(nn.Module):
    """One constant decay a head: none in head 0, less in later layers; no parameters."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.rest = 1.0  # 1 - l / L

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> log_decay [G], fp32 or wider; x only gives device and dtype."""
        return _heads(self.num_heads, x) * (-8 / self.num_heads * self.rest)


class HeadGate(nn.Module):
    """One gate a head and token."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.proj = WideLinear(d_model, num_heads, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> log_decay [B, T, G], fp32 or wider."""
        return F.logsigmoid(self.proj(x)) / DIVISOR


class ChannelGate(nn.Module):
    """One gate a key channel and token, through a bottleneck of rank 16."""

    def __init__(self, d_model: int, num_heads: int, key_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.down = WideLinear(d_model, RANK)
        self.up = WideLinear(RANK, num_heads * key_dim, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> log_decay [B, T, G, K], fp32 or wider."""
        gate_logits = self.up(self.down(x)).unflatten(-1, (self.num_heads, -1))
        return F.logsigmoid(gate_logits) / DIVISOR


class DecayRecorder:
    """Part of a mixer with a gate: with ``record = True`` it keeps a sample of the log-decay.

    Attributes:
        record: whether ``forward`` stores ``last_log_decay``.
        last_log_decay: [n, ...] detached log-decay of up to 256 tokens of the last forward; [G] of
            a fixed gate.
    """

    record: bool = False
    last_log_decay: Tensor | None = None

    def note_decay(self, log_decay: Tensor) -> None:
        """Keep a sample of log_decay [G] or [B, T, ...] if asked to."""
        if not self.record:
            return
        sample = log_decay.detach()
        if sample.dim() > 1:
            sample = sample.flatten(0, 1)
            sample = sample[:: -(-len(sample) // _RECORDED_TOKENS) or 1].clone()
        self.last_log_decay = sample


def build_gate(gate: GateName, d_model: int, num_heads: int, key_dim: int) -> nn.Module | None:
    """Return the module that maps x [B, T, D] to log_decay, or None for "none".

    Args:
        gate: a name of the table above.
        d_model: D.
        num_heads: G.
        key_dim: K, of one head.
    """
    match gate:
        case "fixed":
            return FixedGate(num_heads)
        case "fixed_by_layer":
            return FixedByLayerGate(num_heads)
        case "head":
            return HeadGate(d_model, num_heads)
        case "channel":
            return ChannelGate(d_model, num_heads, key_dim)
    return None


def _heads(num_heads: int, x: Tensor) -> Tensor:
    """0, 1, ... [G] on the device of x, in its dtype but fp32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.arange(num_heads, device=x.device, dtype=dtype)
