"""Every gradient, with and without initial and final state, gradcheck, double backward."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import gla
from gla.testing import GATE_SHAPES, error, limit, make_inputs
from tests.ops.agreement import IMPLS, LOSSES, assert_correct, named, op_values, oracle_values


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATE_SHAPES)
@pytest.mark.parametrize("state", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("loss", LOSSES)
def test_states_in_and_out(impl: str, gate: str, state: bool, loss: str) -> None:
    for dtype, scale in ((torch.float64, None), (torch.float32, 0.37)):
        inputs = make_inputs(2, 37, 2, 8, 6, gate=gate, state=state, dtype=dtype)
        assert_correct(inputs, impl, loss=loss, scale=scale)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [0.0, 1.0, -2.5, 17.0])
def test_scale(impl: str, scale: float) -> None:
    assert_correct(make_inputs(2, 37, 2, 8, 6, dtype=torch.float64), impl, scale=scale)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["fixed", "head", "channel"])
@pytest.mark.parametrize(
    ("dtype", "gate_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_gates_of_another_dtype(
    impl: str, gate: str, dtype: torch.dtype, gate_dtype: torch.dtype
) -> None:
    """The gate's gradient comes back in the gate's dtype (`check` compares the dtypes)."""
    assert_correct(make_inputs(2, 37, 2, 8, 6, gate=gate, dtype=dtype, gate_dtype=gate_dtype), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["fixed", "head"])
def test_shared_gates_accumulate_in_wide_precision(impl: str, gate: str) -> None:
    """The gradient of a shared bf16 gate is a sum over many tokens, rounded once at its end."""
    inputs = make_inputs(2, 600, 1, 32, 16, gate=gate, gate_dtype=torch.bfloat16)
    assert_correct(inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("only", ["q", "k", "v", "log_decay", "S", "z"])
def test_each_gradient_alone(impl: str, only: str) -> None:
    """Gradients asked of one input are those asked of all."""
    options = {"positive": True, "normalizer": True, "dtype": torch.float64}
    inputs = make_inputs(2, 20, 2, 8, 6, **options)

    def gradient(names: list[str]) -> Tensor:
        leaves = {n: x.detach().requires_grad_(n in names) for n, x in named(inputs).items()}
        values = op_values(leaves, impl, normalize=True)
        total = sum(((x * x).sum() for x in values.values()), torch.zeros(()))
        return torch.autograd.grad(total, [leaves[only], *(leaves[n] for n in names)])[0]

    torch.testing.assert_close(gradient([only]), gradient([*named(inputs)]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_graph_where_none_is_asked_for(impl: str) -> None:
    inputs = make_inputs(1, 20, 2, 8, 6)
    assert not gla.gated_linear_attention(*inputs[:4], impl=impl).o.requires_grad
    inputs.q.requires_grad_()
    with torch.no_grad():
        assert not gla.gated_linear_attention(*inputs[:4], impl=impl).o.requires_grad
    with torch.inference_mode():
        out = gla.gated_linear_attention(*inputs[:4], initial_state=inputs.initial_state, impl=impl)
    assert error(out.o, oracle_values(named(inputs))["o"]) <= limit(torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
def test_detached_state_carried_over_steps(impl: str) -> None:
    """Truncated backpropagation: a detached state carries values, not gradients."""
    q, k, v, g, _ = make_inputs(1, 40, 2, 8, 6, state=False, dtype=torch.float64)
    assert g is not None
    k.requires_grad_()
    first = gla.gated_linear_attention(*(x[:, :20] for x in (q, k, v, g)), impl=impl)
    carried = gla.LinearState(first.final_state.S.detach())
    second = gla.gated_linear_attention(
        *(x[:, 20:] for x in (q, k, v, g)),
        initial_state=carried,
        impl=impl,
    )
    (grad,) = torch.autograd.grad(second.o.sum(), k)
    assert bool((grad[:, :20] == 0).all()) and bool((grad[:, 20:] != 0).all())


# --- gradcheck --------------------------------------------------------------------------------


def _gradcheck(impl: str, tokens: int, **options) -> None:
    call = {
        key: options.pop(key)
        for key in ("normalize", "scale", "cu_seqlens", "causal", "chunk_size")
        if key in options
    }
    inputs = make_inputs(1, tokens, 2, 3, 2, dtype=torch.float64, **options)
    tensors = named(inputs)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(op_values(dict(zip(tensors, leaves, strict=True)), impl, **call).values())

    leaves = tuple(x.requires_grad_() for x in tensors.values())
    assert torch.autograd.gradcheck(run, leaves, eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATE_SHAPES)
def test_gradcheck(impl: str, gate: str) -> None:
    _gradcheck(impl, 4, gate=gate, kv_heads=1, scale=1.7)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck_strong_gates(impl: str) -> None:
    _gradcheck(impl, 5, level=-20.0, pattern="half")


@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck_normalizer(impl: str) -> None:
    _gradcheck(impl, 4, positive=True, normalizer=True, normalize=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck_packed(impl: str) -> None:
    _gradcheck(impl, 5, sequences=3, cu_seqlens=torch.tensor([0, 1, 1, 5]))


def test_gradcheck_whole_sequence() -> None:
    _gradcheck("auto", 4, gate="none", causal=False)


def test_gradcheck_across_chunks() -> None:
    _gradcheck("torch", 18, chunk_size=16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalize", [False, True])
def test_double_backward_is_right_or_refused(impl: str, normalize: bool) -> None:
    options = {"positive": True, "normalizer": normalize, "dtype": torch.float64}
    inputs = make_inputs(1, 6, 2, 3, 2, **options)

    def second_order(run) -> list[Tensor]:
        leaves = {n: x.detach().requires_grad_() for n, x in named(inputs).items()}
        values = run(leaves)
        total = sum(((x * x).sum() for x in values.values()), torch.zeros(()))
        first = torch.autograd.grad(total, [*leaves.values()], create_graph=True)
        penalty = sum(((x * x).sum() for x in first), torch.zeros(()))
        return list(torch.autograd.grad(penalty, [*leaves.values()]))

    try:
        got = second_order(lambda leaves: op_values(leaves, impl, normalize=normalize))
    except RuntimeError as refused:
        assert re.search("twice|double backward|second derivative", str(refused)), refused
        return
    for x, y in zip(
        got, second_order(lambda leaves: oracle_values(leaves, normalize=normalize)), strict=True
    ):
        assert error(x, y) <= limit(torch.float64, gradient=True)
