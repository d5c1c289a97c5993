"""A sequence in pieces, in a pack, in a batch: the same as alone (invariants I1, I2, I3, I5)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import gla
from gla.testing import GATE_SHAPES, Inputs, error, limit, make_inputs
from tests.ops.agreement import IMPLS, assert_correct, named

T = 131
SPLITS = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 100, T - 1)


def _run(tensors: dict[str, Tensor], impl: str, start: int, end: int, state=None, **options):
    """The op on tokens start to end."""
    gate = tensors.get("log_decay")
    if gate is not None and gate.dim() > 1:
        gate = gate[:, start:end]
    q, k, v = (tensors[name][:, start:end] for name in ("q", "k", "v"))
    return gla.gated_linear_attention(q, k, v, gate, initial_state=state, impl=impl, **options)


def _state(tensors: dict[str, Tensor]) -> gla.LinearState | None:
    return gla.LinearState(tensors["S"], tensors.get("z")) if "S" in tensors else None


def _loss(o: Tensor, state: gla.LinearState) -> Tensor:
    """Weighs every element differently, so that no two places may be swapped."""
    total = torch.zeros((), dtype=torch.float64)
    for x in (o, state.S, state.z):
        if x is not None:
            weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape)
            total = total + (x.double() * weights).sum()
    return total


def _assert_close(
    got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype, gradient=False
):
    for name, x in want.items():
        assert error(got[name], x) <= limit(dtype, gradient=gradient), name


def _leaves(inputs: Inputs) -> dict[str, Tensor]:
    return {n: x.detach().clone().requires_grad_() for n, x in named(inputs).items()}


def _gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))


# --- I1: in pieces ----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["none", "fixed", "channel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_split_anywhere(impl: str, gate: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(2, T, 2, 8, 6, gate=gate, dtype=dtype)
    leaves = _leaves(inputs)
    whole = _run(leaves, impl, 0, T, _state(leaves))
    want = _gradients(_loss(*whole), leaves)
    for at in SPLITS:
        first = _run(leaves, impl, 0, at, _state(leaves))
        second = _run(leaves, impl, at, T, first.final_state)
        o = torch.cat([first.o, second.o], dim=1)
        _assert_close(
            {"o": o, "S": second.final_state.S}, {"o": whole.o, "S": whole.final_state.S}, dtype
        )
        _assert_close(_gradients(_loss(o, second.final_state), leaves), want, dtype, gradient=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", [-0.1, -20.0, -math.inf])
def test_many_pieces_of_many_sizes_normalized(impl: str, level: float) -> None:
    """Several tokens into a warm state, time and again, then token by token."""
    options = {"level": level, "pattern": "half", "positive": True, "normalizer": True}
    inputs = make_inputs(2, T, 2, 8, 6, dtype=torch.float64, **options)
    leaves = _leaves(inputs)
    whole = _run(leaves, impl, 0, T, _state(leaves), normalize=True)
    sizes = [1, 2, 3, 7, 16, 17, 64, 5, *[1] * 16]
    assert sum(sizes) == T
    state, outputs, start = _state(leaves), [], 0
    for size in sizes:
        part = _run(leaves, impl, start, start + size, state, normalize=True)
        state, start = part.final_state, start + size
        outputs.append(part.o)
    o = torch.cat(outputs, dim=1)
    assert state is not None and state.z is not None and whole.final_state.z is not None
    want = {"o": whole.o, "S": whole.final_state.S, "z": whole.final_state.z}
    _assert_close({"o": o, "S": state.S, "z": state.z}, want, torch.float64)
    got = _gradients(_loss(o, state), leaves)
    _assert_close(got, _gradients(_loss(*whole), leaves), torch.float64, gradient=True)


def test_the_forms_continue_each_other() -> None:
    """Prefill with one form, decode with another."""
    inputs = make_inputs(2, 40, 2, 8, 6, dtype=torch.float64)
    tensors = named(inputs)
    whole = _run(tensors, IMPLS[0], 0, 40, _state(tensors))
    for first in IMPLS:
        for second in IMPLS:
            state = _run(tensors, first, 0, 25, _state(tensors)).final_state
            rest = _run(tensors, second, 25, 40, state)
            assert error(rest.o, whole.o[:, 25:]) <= limit(torch.float64)


# --- I2: a later token never changes an earlier output ---------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATE_SHAPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_prefix(impl: str, gate: str, normalize: bool) -> None:
    options = {"gate": gate, "positive": normalize, "normalizer": normalize}
    inputs = make_inputs(2, T, 2, 8, 6, dtype=torch.float64, **options)
    tensors = named(inputs)
    before = _run(tensors, impl, 0, T, _state(tensors), normalize=normalize).o
    draws = torch.Generator().manual_seed(5)
    for at in (1, 15, 16, 40, 64, 65, T - 1):
        changed = {n: x.clone() for n, x in tensors.items()}
        for name in ("q", "k", "v"):
            tail = changed[name][:, at:]
            tail.copy_(torch.randn(tail.shape, generator=draws).abs() * 1e6)
        if gate in ("head", "channel"):
            tail = changed["log_decay"][:, at:]
            tail.copy_(-torch.randn(tail.shape, generator=draws).mul(6).exp())
            tail[:, ::3] = -math.inf
        after = _run(changed, impl, 0, T, _state(changed), normalize=normalize).o
        assert float((after - before)[:, :at].abs().max()) <= 1e-12, at


@pytest.mark.parametrize("impl", IMPLS)
def test_prefix_of_gradients(impl: str) -> None:
    """A loss on early outputs sends nothing to later tokens."""
    leaves = _leaves(make_inputs(2, T, 2, 8, 6, dtype=torch.float64))
    out = _run(leaves, impl, 0, T, _state(leaves))
    for at in (1, 16, 40, 65):
        loss = (out.o[:, :at] ** 2).sum()
        grads = torch.autograd.grad(loss, [*leaves.values()], retain_graph=True)
        for name, x in zip(leaves, grads, strict=True):
            if name != "S":
                assert float(x[:, at:].abs().max()) <= 1e-12, (name, at)


# --- I3: packed documents ---------------------------------------------------------------------

PACKS = (
    [0, 1, 2, 3, 0, 17, 64, 65, 1, 0],
    [1, 1, 1, 2, 3, 2, 1],
    [129],
    [0],
    [0, 0],
    [16, 16, 32, 64, 128],
    [15, 1, 16, 63, 1, 64],
)


def _packed(lengths: list[int], gate: str, dtype: torch.dtype, **options) -> tuple[Inputs, Tensor]:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make_inputs(
        1, sum(lengths), 2, 8, 6, gate=gate, sequences=len(lengths), dtype=dtype, **options
    )
    return inputs, offsets


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("gate", ["none", "fixed", "channel"])
def test_packed_equals_the_oracle(impl: str, lengths: list[int], gate: str) -> None:
    inputs, offsets = _packed(lengths, gate, torch.float64)
    assert_correct(inputs, impl, cu_seqlens=offsets)
    assert_correct(inputs._replace(initial_state=None), impl, cu_seqlens=offsets.int())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATE_SHAPES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_packed_equals_separate_calls(
    impl: str, gate: str, normalize: bool, dtype: torch.dtype
) -> None:
    options = {"positive": normalize, "normalizer": normalize}
    inputs, offsets = _packed(PACKS[0], gate, dtype, **options)
    leaves = _leaves(inputs)
    together = _run(
        leaves, impl, 0, sum(PACKS[0]), _state(leaves), normalize=normalize, cu_seqlens=offsets
    )
    parts = []
    for n, (start, end) in enumerate(pairwise(offsets.tolist())):
        z = leaves["z"][n : n + 1] if normalize else None
        state = gla.LinearState(leaves["S"][n : n + 1], z)
        parts.append(_run(leaves, impl, start, end, state, normalize=normalize))
    o = torch.cat([part.o for part in parts], dim=1)
    states = gla.LinearState(
        torch.cat([part.final_state.S for part in parts]),
        torch.cat([part.final_state.z for part in parts]) if normalize else None,
    )
    _assert_close({"o": together.o, "S": together.final_state.S}, {"o": o, "S": states.S}, dtype)
    if normalize:
        assert together.final_state.z is not None and states.z is not None
        assert error(together.final_state.z, states.z) <= limit(dtype)
    got, want = (_gradients(_loss(*x), leaves) for x in (together, (o, states)))
    _assert_close(got, want, dtype, gradient=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", [-20.0, -math.inf])
def test_packed_with_strong_gates(impl: str, level: float) -> None:
    inputs, offsets = _packed(PACKS[-1], "channel", torch.float64, level=level, pattern="half")
    assert_correct(inputs, impl, cu_seqlens=offsets)


@pytest.mark.parametrize("impl", IMPLS)
def test_packed_grouped_heads(impl: str) -> None:
    inputs = make_inputs(1, 40, 6, 8, 6, kv_heads=2, sequences=4, dtype=torch.float64)
    assert_correct(inputs, impl, cu_seqlens=torch.tensor([0, 3, 3, 20, 40]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_in_half_precision(impl: str, dtype: torch.dtype) -> None:
    inputs, offsets = _packed(PACKS[-1], "channel", dtype)
    assert_correct(inputs, impl, cu_seqlens=offsets)


# --- I5: rows of a batch ----------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_each_row_is_as_alone(impl: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(4, 70, 2, 8, 6, level=-20.0, pattern="spikes", dtype=dtype)
    tensors = named(inputs)
    together = _run(tensors, impl, 0, 70, _state(tensors))
    for row in range(4):
        one = {n: x[row : row + 1] for n, x in tensors.items()}
        alone = _run(one, impl, 0, 70, _state(one))
        assert error(together.o[row : row + 1], alone.o) <= limit(dtype)
        assert error(together.final_state.S[row : row + 1], alone.final_state.S) <= limit(dtype)
