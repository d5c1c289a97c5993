"""Any length, any width, any number of heads, any strides."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gla
from gla.testing import Inputs, error, limit, make_inputs
from tests.ops.agreement import (
    IMPLS,
    Evaluation,
    assert_agree,
    assert_correct,
    contiguous,
    evaluate,
    expanded,
    expect,
    named,
    transposed,
)

LENGTHS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 1000)
LONG = (4095, 4096, 65535, 65536, 65537)
KEY_VALUE = (
    *[(1, 1), (1, 5), (3, 1), (2, 3), (16, 48), (24, 12), (32, 64), (48, 100), (64, 128), (80, 96)],
    *[(96, 48), (100, 7), (128, 256), (160, 320), (192, 208), (300, 48), (48, 300)],
    *[(512, 256), (256, 512), (512, 1), (1, 512)],
)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_lengths(impl: str, tokens: int) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_correct(
            make_inputs(2, tokens, 2, 8, 12, level=-20.0, pattern="spikes", dtype=dtype), impl
        )
    if tokens < 1000:
        assert_correct(make_inputs(2, tokens, 2, 8, 12, gate="none", dtype=torch.float64), impl)
        assert_correct(make_inputs(2, tokens, 2, 8, 12, gate="fixed", dtype=torch.float64), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "sizes", [(1, 64, 32), (2, 64, 32), (15, 64, 64), (40, 15, 64), (40, 64, 1)]
)
def test_small_in_bf16(impl: str, sizes: tuple[int, int, int]) -> None:
    """Few numbers to sum: the rounding of each factor to bf16 would show."""
    for seed in range(30):
        for gate in ("head", "channel"):
            options = {"gate": gate, "level": -5.9, "pattern": "half", "seed": seed}
            assert_correct(
                make_inputs(1, sizes[0], 1, *sizes[1:], dtype=torch.bfloat16, **options), impl
            )
    case = {"gate": "head", "level": -5.9, "state": False, "seed": 363521}
    assert_correct(make_inputs(1, 2, 1, 64, 32, dtype=torch.bfloat16, **case), impl)


@functools.lru_cache(maxsize=2)
def _long_case(tokens: int, gate: str, dtype: torch.dtype) -> tuple[Inputs, Evaluation]:
    inputs = make_inputs(1, tokens, 1, 2, 3, gate=gate, dtype=dtype)
    return inputs, expect(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", LONG)
@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_long_sequences(tokens: int, gate: str, dtype: torch.dtype, impl: str) -> None:
    inputs, want = _long_case(tokens, gate, dtype)
    assert_agree(evaluate(inputs, impl), want, inputs)


@pytest.mark.slow
def test_more_elements_than_32_bits_count() -> None:
    """B T H K over 2^31; q and k are one number expanded, so that no memory is needed for them."""
    H, K = 8, 512
    T = 2**31 // (H * K) + 65
    q, k = (torch.full((), x).expand(1, T, H, K) for x in (0.5, 0.25))
    v = torch.randn(1, T, H, 1, generator=torch.Generator().manual_seed(0))
    o = gla.gated_linear_attention(q, k, v, impl="torch", scale=1 / K).o
    assert error(o, v.double().cumsum(1) * 0.125) <= limit(torch.float32)


@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_large_enough_to_be_cut_up(gate: str, dtype: torch.dtype) -> None:
    """Wide values and many rows: what fits into no cache at once is worked on piece by piece.

    Buffers are used again from piece to piece, and then hold the last piece's numbers, not NaN.
    Strong and mild gates alternate along the sequence, so the pieces take different paths.
    """
    inputs = make_inputs(3, 330, 4, 4, 512, gate=gate, dtype=dtype)
    if gate in ("head", "channel"):
        assert inputs.log_decay is not None
        for start in range(0, 330, 100):
            inputs.log_decay[:, start : start + 40 : 3] = -20.0
        inputs.log_decay[1, 150] = -math.inf
    assert_correct(inputs, "torch", chunk_size=16)
    assert_correct(inputs._replace(initial_state=None), "torch")


@pytest.mark.parametrize("gate", ["none", "channel"])
def test_packs_large_enough_to_be_cut_up(gate: str) -> None:
    lengths = [1, 0, 100, 3, 64, 200, 17, 2]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make_inputs(
        1, sum(lengths), 4, 4, 512, gate=gate, sequences=len(lengths), dtype=torch.float64
    )
    assert_correct(inputs, "torch", cu_seqlens=offsets, chunk_size=16)
    assert_correct(inputs, "torch", cu_seqlens=offsets)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("key_dim", "value_dim"), KEY_VALUE)
def test_widths(impl: str, key_dim: int, value_dim: int) -> None:
    for dtype in (torch.float64, torch.float32):
        level = -6.0 if key_dim < 64 else None
        inputs = make_inputs(1, 19, 1, key_dim, value_dim, level=level, pattern="half", dtype=dtype)
        assert_correct(inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [1, 3, 5, 7])
@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
def test_heads(impl: str, heads: int, gate: str) -> None:
    assert_correct(make_inputs(3, 21, heads, 8, 4, gate=gate, dtype=torch.float64), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("gate", ["fixed", "head", "channel"])
def test_as_many_heads_as_tokens(impl: str, size: int, gate: str) -> None:
    """Equal sizes hide a swapped layout from the shape checks, not from the values."""
    assert_correct(make_inputs(size, size, size, size, size, gate=gate, dtype=torch.float64), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_grouped_heads(impl: str, gate: str, kv_heads: int) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_correct(make_inputs(2, 20, 6, 8, 4, kv_heads=kv_heads, gate=gate, dtype=dtype), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["fixed", "head", "channel"])
def test_only_the_gate_is_grouped(impl: str, gate: str) -> None:
    shared = make_inputs(2, 20, 6, 8, 4, kv_heads=2, gate=gate, dtype=torch.float64)
    full = make_inputs(2, 20, 6, 8, 4, gate=gate, dtype=torch.float64)
    assert_correct(full._replace(log_decay=shared.log_decay), impl)
    assert_correct(shared._replace(log_decay=full.log_decay), impl)


# --- strides ----------------------------------------------------------------------------------


def _head_first(x: Tensor) -> Tensor:
    """[B, T, H, D] as a view of memory laid out [B, H, T, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x


def _slice_of_wider(x: Tensor) -> Tensor:
    """A part of a larger buffer, as a slice of a fused projection; NaN all around it."""
    buffer = x.new_full([size + 3 for size in x.shape], math.nan)
    view = buffer[tuple(slice(2, 2 + size) for size in x.shape)]
    view.copy_(x)
    return view


def _every_second(x: Tensor) -> Tensor:
    buffer = x.new_full([*x.shape[:-1], 2 * x.shape[-1]], math.nan)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def _last_dimension_slow(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _same_for_every_row(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def _same_for_every_channel(x: Tensor) -> Tensor:
    return x[..., :1].expand_as(x)


def _same_for_every_token(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x) if x.dim() > 1 else x


STRIDES = (
    *[_head_first, _slice_of_wider, _every_second, _last_dimension_slow],
    *[_same_for_every_row, _same_for_every_channel, _same_for_every_token],
)


def _restride(inputs: Inputs, layout: Callable[[Tensor], Tensor]) -> Inputs:
    assert inputs.log_decay is not None and inputs.initial_state is not None
    S, z = inputs.initial_state
    return Inputs(
        layout(inputs.q),
        layout(inputs.k),
        layout(inputs.v),
        layout(inputs.log_decay),
        gla.LinearState(layout(S), None if z is None else layout(z)),
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("gate", ["fixed", "channel"])
def test_strides_of_inputs(impl: str, layout: Callable[[Tensor], Tensor], gate: str) -> None:
    for dtype in (torch.float64, torch.float32):
        inputs = _restride(make_inputs(2, 35, 3, 8, 6, gate=gate, dtype=dtype), layout)
        assert_correct(inputs, impl)
    options = {"normalizer": True, "positive": True, "dtype": torch.float64}
    assert_correct(_restride(make_inputs(2, 20, 3, 8, 6, **options), layout), impl, normalize=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", [contiguous, transposed, expanded])
def test_strides_of_upstream_gradients(impl: str, layout: Callable[[Tensor], Tensor]) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_correct(make_inputs(2, 35, 3, 8, 6, dtype=dtype), impl, layout=layout)


@pytest.mark.parametrize("impl", IMPLS)
def test_backward_of_a_sum(impl: str) -> None:
    """Upstream gradients as autograd itself makes them: expanded from one number."""
    inputs = make_inputs(2, 20, 2, 8, 6, dtype=torch.float64)
    q = inputs.q.clone().requires_grad_()
    out = gla.gated_linear_attention(q, *inputs[1:4], impl=impl)
    (out.o.sum() + out.final_state.S.sum()).backward()
    by_hand = q.grad
    q = inputs.q.clone().requires_grad_()
    out = gla.gated_linear_attention(q, *inputs[1:4], impl=impl)
    ones = (torch.ones_like(out.o), torch.ones_like(out.final_state.S))
    (grad,) = torch.autograd.grad((out.o, out.final_state.S), q, ones)
    assert by_hand is not None
    torch.testing.assert_close(by_hand, grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_are_never_written(impl: str, normalize: bool, dtype: torch.dtype) -> None:
    inputs = make_inputs(2, 35, 3, 8, 6, normalizer=normalize, positive=normalize, dtype=dtype)
    tensors = {n: x.requires_grad_() for n, x in named(inputs).items()}
    before = {n: x.detach().clone() for n, x in tensors.items()}
    out = gla.gated_linear_attention(
        *inputs[:4], initial_state=inputs.initial_state, normalize=normalize, impl=impl
    )
    values = [x for x in (out.o, *out.final_state) if x is not None]
    kept = [x.detach().clone() for x in values]
    upstream = [torch.randn_like(x) for x in values]
    upstream_before = [x.clone() for x in upstream]
    torch.autograd.grad(values, list(tensors.values()), upstream)
    for name, x in tensors.items():
        assert torch.equal(x, before[name]) and x._version == 0, name
    assert all(map(torch.equal, upstream, upstream_before))
    assert all(map(torch.equal, values, kept)), "backward changed an output"


# --- nothing to do ----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
def test_no_tokens(impl: str, normalize: bool, gate: str) -> None:
    inputs = make_inputs(2, 0, 3, 4, 5, gate=gate, normalizer=normalize, dtype=torch.float64)
    assert_correct(inputs, impl, normalize=normalize)
    out = gla.gated_linear_attention(
        *inputs[:4], initial_state=inputs.initial_state, normalize=normalize, impl=impl
    )
    assert inputs.initial_state is not None
    assert out.o.shape == (2, 0, 3, 5)
    assert torch.equal(out.final_state.S, inputs.initial_state.S)
    if normalize:
        assert out.final_state.z is not None and inputs.initial_state.z is not None
        assert torch.equal(out.final_state.z, inputs.initial_state.z)
    cold = gla.gated_linear_attention(*inputs[:4], normalize=normalize, impl=impl)
    assert torch.equal(cold.final_state.S, torch.zeros(2, 3, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
def test_no_rows(impl: str, gate: str) -> None:
    assert_correct(make_inputs(0, 20, 3, 4, 5, gate=gate), impl)
    out = gla.gated_linear_attention(*make_inputs(0, 20, 3, 4, 5, gate=gate)[:4], impl=impl)
    assert out.o.shape == (0, 20, 3, 5) and out.final_state.S.shape == (0, 3, 4, 5)


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128, 256])
def test_any_chunk_size(chunk_size: int) -> None:
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(1, 300, 2, 8, 6, level=-20.0, pattern="spikes", dtype=dtype)
        assert_correct(inputs, "torch", chunk_size=chunk_size)
