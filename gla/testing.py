"""For tests of the op and of code built on it: inputs, gate regimes, the tolerance table.

A result is compared with a float64 reference computed from the very same (already rounded) inputs:

    error = RMS(actual - reference) / max(RMS(reference), 0.01)

and has to stay under the limit of its dtype in `TOLERANCES`. Inputs and upstream gradients are of
unit scale. Everything is drawn on the CPU from a seed, so that every device sees the same numbers.

Sizes: B batch, T tokens, H heads, G heads of k, v and log_decay (H a multiple of G), K key
dimension, V value dimension, N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla.state import LinearState

GATE_SHAPES = ("none", "fixed", "head", "channel")
# Natural logs of the forget gate: none, what training meets, what overflows a factored exponential
# in fp32 (16 tokens at -5.9 still fit, at -6 no longer), what underflows at once, and the reset.
GATE_LEVELS = (0.0, -1e-4, -0.1, -1.0, -5.9, -6.0, -20.0, -88.0, -1e4, -math.inf)
GATE_PATTERNS = ("constant", "half", "spikes")
RMS_FLOOR = 0.01


class Tolerance(NamedTuple):
    """Largest allowed error of outputs and final states, and of gradients."""

    value: float
    gradient: float


TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-11),
    torch.float32: Tolerance(5e-6, 2e-5),
    torch.bfloat16: Tolerance(5e-3, 1e-2),
    torch.float16: Tolerance(5e-3, 1e-2),
}


class Inputs(NamedTuple):
    """Arguments of the op: q [B,T,H,K], k [B,T,G,K], v [B,T,G,V], log_decay, N states."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    initial_state: LinearState | None


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a state has beside inputs of ``dtype``: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def ordinary_log_decay(
    shape: Sequence[int], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Gates as they are at initialization (arXiv 2312.06635): logsigmoid(N(0, 1)) / 16."""
    logits = torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)
    return (F.logsigmoid(logits) / 16).to(dtype)


def log_decay_at(
    shape: Sequence[int],
    level: float,
    pattern: str = "constant",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gates that sit at one level in some places and are ordinary elsewhere.

    Args:
        shape: [G], [B, T, G] or [B, T, G, K].
        level: natural log of the forget gate, at most 0; see `GATE_LEVELS`.
        pattern: "constant" everywhere; on a random "half" of the entries; lone "spikes", about one
            entry in twenty and at least one.
        seed: of the places and of the ordinary gates.
        dtype: of the result.

    Raises:
        ValueError: an unknown pattern.
    """
    if pattern not in GATE_PATTERNS:
        raise ValueError(f"pattern: got {pattern!r}, expected one of {', '.join(GATE_PATTERNS)}")
    if pattern == "constant":
        return torch.full(tuple(shape), level, dtype=dtype)
    gates = ordinary_log_decay(shape, seed=seed, dtype=dtype)
    draw = torch.rand(*shape, generator=_generator(seed + 1))
    if gates.numel() == 0:
        return gates
    hit = draw < (0.5 if pattern == "half" else 0.05)
    return gates.masked_fill(hit | (draw == draw.min()), level)


def gate_shape(gate: str, batch: int, tokens: int, heads: int, key_dim: int) -> tuple[int, ...]:
    """The shape of ``log_decay`` for a gate of `GATE_SHAPES` other than "none"."""
    shapes = {
        "fixed": (heads,),
        "head": (batch, tokens, heads),
        "channel": (batch, tokens, heads, key_dim),
    }
    if gate not in shapes:
        raise ValueError(f"gate: got {gate!r}, expected one of {', '.join(shapes)}")
    return shapes[gate]


def make_inputs(
    batch: int = 2,
    tokens: int = 37,
    heads: int = 3,
    key_dim: int = 16,
    value_dim: int = 24,
    *,
    kv_heads: int | None = None,
    gate: str = "channel",
    level: float | None = None,
    pattern: str = "constant",
    positive: bool = False,
    state: bool = True,
    normalizer: bool = False,
    sequences: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Inputs:
    """Draw arguments of the op at unit scale.

    Args:
        batch, tokens, heads, key_dim, value_dim: B, T, H, K, V.
        kv_heads: G; H if None.
        gate: one of `GATE_SHAPES`.
        level, pattern: of the gates, see `log_decay_at`; ordinary gates if level is None.
        positive: q and k through elu + 1, as the normalizer wants them.
        state: whether to draw an initial state.
        normalizer: whether that state has z (positive).
        sequences: N of the initial state; B if None.
        seed: of all draws.
        dtype: of q, k and v.
        gate_dtype: of log_decay; ``dtype`` if None.
        device: where the tensors end up.
    """
    groups = heads if kv_heads is None else kv_heads
    draws = _generator(seed)

    def draw(*shape: int, to: torch.dtype = dtype, map_positive: bool = False) -> Tensor:
        x = torch.randn(*shape, generator=draws, dtype=torch.float64)
        return (F.elu(x) + 1 if map_positive else x).to(device, to)

    q = draw(batch, tokens, heads, key_dim, map_positive=positive)
    k = draw(batch, tokens, groups, key_dim, map_positive=positive)
    v = draw(batch, tokens, groups, value_dim)
    log_decay = None
    if gate != "none":
        shape = gate_shape(gate, batch, tokens, groups, key_dim)
        wanted = dtype if gate_dtype is None else gate_dtype
        log_decay = (
            ordinary_log_decay(shape, seed=seed + 1, dtype=wanted)
            if level is None
            else log_decay_at(shape, level, pattern, seed=seed + 1, dtype=wanted)
        ).to(device)
    initial = None
    if state:
        rows, wide = batch if sequences is None else sequences, state_dtype(dtype)
        S = draw(rows, heads, key_dim, value_dim, to=wide)
        z = draw(rows, heads, key_dim, to=wide, map_positive=True) if normalizer else None
        initial = LinearState(S, z)
    return Inputs(q, k, v, log_decay, initial)


def error(actual: Tensor, reference: Tensor) -> float:
    """RMS of the difference over max(RMS of the reference, 0.01); infinite where not finite.

    Args:
        actual: any shape and dtype.
        reference: the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"actual: got shape {[*actual.shape]}, expected {[*reference.shape]}")
    if actual.numel() == 0:
        return 0.0
    reference = reference.detach().double().cpu()
    difference = actual.detach().double().cpu() - reference
    if not bool(torch.isfinite(difference).all()):
        return math.inf
    return float(_rms(difference) / max(_rms(reference), RMS_FLOOR))


def limit(*dtypes: torch.dtype, gradient: bool = False) -> float:
    """The tolerance of a result that passed through these dtypes: that of the coarsest."""
    return max(TOLERANCES[d].gradient if gradient else TOLERANCES[d].value for d in dtypes)


def _rms(x: Tensor) -> float:
    # Scaled by the largest entry: squares of 1e200 would overflow even float64.
    largest = float(x.abs().max())
    return largest * math.sqrt(float((x / largest).square().mean())) if largest > 0 else 0.0


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
