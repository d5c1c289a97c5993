"""Every gate value from 0 to -inf, as values and as every gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gla
from gla.testing import GATE_LEVELS, GATE_PATTERNS, Inputs, error, limit, make_inputs
from tests.ops.agreement import IMPLS, LOSSES, assert_correct, evaluate, expect, oracle_values

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pattern", GATE_PATTERNS)
@pytest.mark.parametrize("level", GATE_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_level_per_channel(impl: str, pattern: str, level: float, dtype: torch.dtype) -> None:
    assert_correct(make_inputs(level=level, pattern=pattern, dtype=dtype, tokens=70, heads=2), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", GATE_LEVELS)
@pytest.mark.parametrize("gate", ["fixed", "head"])
def test_every_level_per_head(impl: str, level: float, gate: str) -> None:
    pattern = "constant" if gate == "fixed" else "half"
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(gate=gate, level=level, pattern=pattern, dtype=dtype, tokens=37)
        assert_correct(inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spike", [-23.6, -15.9, -7.9, -3.9])
@pytest.mark.parametrize("base", [-1e-4, -5e-3])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_equal_gates_after_a_spike(impl: str, spike: float, base: float, gate: str) -> None:
    """Sums of gates whose roundings all have one sign."""
    inputs = make_inputs(1, 256, 2, 32, 48, gate=gate, level=base)
    assert inputs.log_decay is not None
    for every in (32, 64):
        inputs.log_decay[:, every // 2 :: every] = spike
        assert_correct(inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", [-1e-4, -6.0, -20.0, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate_dtype", [None, torch.float32], ids=str)
def test_half_precision(
    impl: str, level: float, dtype: torch.dtype, gate_dtype: torch.dtype | None
) -> None:
    inputs = make_inputs(level=level, pattern="half", dtype=dtype, gate_dtype=gate_dtype, tokens=70)
    assert_correct(inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("level", [-0.1, -0.3, -0.49, -1.0, -3.0])
def test_gate_gradients_in_half_precision(impl: str, gate: str, tokens: int, level: float) -> None:
    """A gate's gradient is wide even beside half-precision inputs.

    Where the loss reads the final state, early gates have small gradients, and a form that gets
    them as differences of sums over the chunk must not have rounded the sums.
    """
    for dtype in (torch.bfloat16, torch.float16):
        inputs = make_inputs(
            2, tokens, 2, 32, 32, gate=gate, level=level, dtype=dtype, gate_dtype=torch.float32
        )
        for loss in LOSSES:
            assert_correct(inputs, impl, loss=loss)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("tokens", "chunk_size", "level"), [(64, 64, -0.49), (128, 128, -0.245)])
def test_gate_gradients_in_bf16_are_as_exact_as_its_outputs(
    impl: str, tokens: int, chunk_size: int, level: float
) -> None:
    """Where sums over a chunk are longest beside what is left of them."""
    for seed in range(4):
        inputs = make_inputs(
            1,
            tokens,
            1,
            16,
            16,
            level=level,
            state=False,
            dtype=torch.bfloat16,
            seed=seed,
            gate_dtype=torch.float32,
        )
        options: dict[str, Any] = {"chunk_size": chunk_size} if impl == "torch" else {}
        got = evaluate(inputs, impl, loss="o", **options).gradients["log_decay"]
        want = expect(inputs, loss="o").gradients["log_decay"]
        assert error(got, want) <= limit(torch.bfloat16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["fixed", "head"])
@pytest.mark.parametrize("seed", range(8))
def test_gate_gradients_that_are_small_beside_their_terms(impl: str, gate: str, seed: int) -> None:
    """One number for all channels, or for all tokens too, and some draws where it is near 0."""
    wide = {"dtype": torch.bfloat16, "gate_dtype": torch.float32, "seed": seed}
    inputs = make_inputs(1, 16, 1, 16, 16, gate=gate, level=-0.3, **wide)
    assert_correct(inputs, impl, loss="state")
    assert_correct(inputs, impl, loss="o")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("size", [64, 128])
def test_gate_gradients_of_two_tokens(impl: str, gate: str, size: int) -> None:
    """A small gradient before a large one: not what is left of a sum that holds both."""
    inputs = make_inputs(1, 2, 2, size, size, gate=gate, level=-8.0)
    assert_correct(inputs, impl, loss="state")
    assert_correct(inputs, impl, loss="both")


@pytest.mark.parametrize("impl", IMPLS)
def test_gate_gradients_before_a_large_key(impl: str) -> None:
    """Measured against their own size, not against the largest one."""
    at, inputs = 23, make_inputs(1, 64, 2, 16, 16, gate="channel", level=-0.1)
    inputs.k[:, at] *= 1e3
    got = evaluate(inputs, impl, loss="o").gradients["log_decay"]
    want = expect(inputs, loss="o").gradients["log_decay"]
    early = slice(0, at + 1)  # the key is decayed by later gates only
    assert error(got[:, early], want[:, early]) <= limit(torch.float32, gradient=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", [-0.1, -3.0])
def test_what_overflows_behind_the_mask_stays_there(impl: str, level: float) -> None:
    """A value that no token reads, in products with upstream gradients of earlier tokens."""
    inputs = make_inputs(1, 64, 1, 16, 16, gate="channel", level=level, state=False)
    assert inputs.log_decay is not None
    leaves = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay)]
    leaves[1][:, 40], leaves[2][:, 40] = 0.0, 1e30
    leaves = [x.requires_grad_() for x in leaves]
    out = gla.gated_linear_attention(*leaves, impl=impl)
    upstream = torch.zeros_like(out.o)
    upstream[:, :10] = 1e10
    for x in (out.o, *torch.autograd.grad(out.o, leaves, upstream)):
        assert bool(x.isfinite().all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pattern", ["constant", "half"])
def test_strong_gates_that_need_no_gradient_in_half_precision(impl: str, pattern: str) -> None:
    inputs = make_inputs(1, 130, 2, 32, 32, level=-20.0, pattern=pattern, dtype=torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    assert inputs.log_decay is not None
    got = gla.gated_linear_attention(*leaves, log_decay=inputs.log_decay, impl=impl).o
    wide = [x.detach().double().requires_grad_() for x in leaves]
    tensors = dict(zip("qkv", wide, strict=True)) | {"log_decay": inputs.log_decay.double()}
    want = oracle_values(tensors)["o"]
    for a, b in zip(
        torch.autograd.grad(got.float().square().sum(), leaves),
        torch.autograd.grad(want.square().sum(), wide),
        strict=True,
    ):
        assert error(a, b) <= limit(torch.bfloat16, gradient=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordinary_gates(impl: str, gate: str, dtype: torch.dtype) -> None:
    assert_correct(make_inputs(gate=gate, dtype=dtype, tokens=150), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("heavy", [1.0, 4.0])
def test_gates_at_all_levels_at_once(impl: str, dtype: torch.dtype, heavy: float) -> None:
    """Each entry at a level of its own, or spread over all magnitudes: exp(N(0, heavy))."""
    draws = torch.Generator().manual_seed(3)
    inputs = make_inputs(tokens=131, heads=2, dtype=dtype)
    assert inputs.log_decay is not None
    shape = inputs.log_decay.shape
    choice = torch.randint(len(GATE_LEVELS), shape, generator=draws)
    levels = torch.tensor(GATE_LEVELS, dtype=dtype)[choice]
    assert_correct(inputs._replace(log_decay=levels), impl)
    spread = -(torch.randn(shape, generator=draws, dtype=torch.float64) * heavy).exp().to(dtype)
    assert_correct(inputs._replace(log_decay=spread), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_channels_of_very_different_strength(impl: str) -> None:
    """Some channels never forget, others at once: no common offset fits a tile."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(tokens=131, heads=2, dtype=dtype)
        assert inputs.log_decay is not None
        gates = inputs.log_decay.clone()
        for channel, level in enumerate(GATE_LEVELS):
            gates[..., channel] = level
        assert_correct(inputs._replace(log_decay=gates), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["fixed", "head", "channel"])
def test_zero_gate_equals_no_gate(impl: str, gate: str) -> None:
    for dtype in (torch.float64, torch.float32):
        gated = make_inputs(gate=gate, level=0.0, dtype=dtype, tokens=100)
        plain = gated._replace(log_decay=None)
        got, want = evaluate(gated, impl), evaluate(plain, impl)
        for name, x in want.values.items():
            assert error(got.values[name], x) <= limit(dtype)
        for name, x in want.gradients.items():
            assert error(got.gradients[name], x) <= limit(dtype, gradient=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("at", [1, 15, 16, 40, 64, 69])
def test_reset_forgets_everything_before(impl: str, at: int) -> None:
    """After -inf at t, the rest is what a run of the rest alone gives, whatever came before."""
    inputs = make_inputs(tokens=70, heads=2)
    assert inputs.log_decay is not None
    inputs.v[:, :at] = 1e30
    gates = inputs.log_decay.clone()
    gates[:, at] = -math.inf
    out = gla.gated_linear_attention(
        inputs.q, inputs.k, inputs.v, gates, initial_state=inputs.initial_state, impl=impl
    )
    alone = gla.gated_linear_attention(
        inputs.q[:, at:], inputs.k[:, at:], inputs.v[:, at:], gates[:, at:], impl=impl
    )
    assert error(out.o[:, at:], alone.o) <= limit(torch.float32)
    assert error(out.final_state.S, alone.final_state.S) <= limit(torch.float32)


def _strong_channel(dtype: torch.dtype, huge: float, tokens: int) -> Inputs:
    inputs = make_inputs(1, tokens, 1, 8, 8, dtype=dtype, state=False)
    assert inputs.log_decay is not None
    inputs.log_decay[..., 2] = -10.0
    inputs.k[:, 0] = 0
    inputs.k[:, 0, :, 2] = 1  # the first token writes into the strongly gated channel only
    inputs.v[:, 0] = huge
    return inputs


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [16, 17, 80])
def test_a_strong_gate_hides_a_huge_value(impl: str, dtype: torch.dtype, tokens: int) -> None:
    """One channel at -10, a huge v[0]: exp(-150) is left of it at t = 15, so o[15] is unaffected.

    Each position is held to the tolerance by itself: over the whole output, o[0] would hide all.
    """
    inputs = _strong_channel(dtype, 1e30, tokens)
    got, want = evaluate(inputs, impl, loss="o"), expect(inputs, loss="o")
    for t in range(tokens):
        assert error(got.values["o"][:, t], want.values["o"][:, t]) <= limit(dtype), t
        for name in ("q", "k", "v"):
            distance = error(got.gradients[name][:, t], want.gradients[name][:, t])
            assert distance <= limit(dtype, gradient=True), (name, t)
    quiet = _strong_channel(dtype, 0.0, tokens)
    without = evaluate(quiet, impl, loss="o")
    assert error(got.values["o"][:, 15], without.values["o"][:, 15]) <= limit(dtype)
