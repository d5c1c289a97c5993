"""The normalizer, and the form in which every position reads the whole sequence."""

from __future__ import annotations

import math

import pytest
import torch

import gla
from gla.testing import GATE_LEVELS, GATE_SHAPES, make_inputs
from tests.ops.agreement import IMPLS, LOSSES, assert_correct

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATE_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalized(impl: str, gate: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(2, 70, 2, 8, 6, gate=gate, positive=True, normalizer=True, dtype=dtype)
    assert_correct(inputs, impl, normalize=True)
    assert_correct(inputs._replace(initial_state=None), impl, normalize=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", GATE_LEVELS)
def test_normalized_at_every_level(impl: str, level: float) -> None:
    for dtype in (torch.float64, torch.float32):
        options = {"level": level, "pattern": "half", "dtype": dtype}
        inputs = make_inputs(2, 37, 2, 8, 6, positive=True, normalizer=True, **options)
        assert_correct(inputs, impl, normalize=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss", LOSSES)
def test_normalized_gradients(impl: str, loss: str) -> None:
    inputs = make_inputs(
        2, 37, 6, 8, 4, kv_heads=2, positive=True, normalizer=True, dtype=torch.float64
    )
    assert_correct(inputs, impl, normalize=True, loss=loss)


@pytest.mark.parametrize("impl", IMPLS)
def test_normalized_pack(impl: str) -> None:
    inputs = make_inputs(
        1, 40, 2, 8, 6, sequences=4, positive=True, normalizer=True, dtype=torch.float64
    )
    assert_correct(inputs, impl, normalize=True, cu_seqlens=torch.tensor([0, 3, 3, 20, 40]))


@pytest.mark.parametrize("impl", IMPLS)
def test_scale_is_ignored_when_normalizing(impl: str) -> None:
    inputs = make_inputs(1, 20, 2, 8, 6, positive=True, state=False)
    plain = gla.gated_linear_attention(*inputs[:4], normalize=True, impl=impl)
    scaled = gla.gated_linear_attention(*inputs[:4], normalize=True, scale=3.0, impl=impl)
    assert torch.equal(plain.o, scaled.o)


@pytest.mark.parametrize("impl", IMPLS)
def test_weights_sum_to_one(impl: str) -> None:
    """Normalizing makes the output a weighted mean: constant values come back unchanged."""
    inputs = make_inputs(2, 70, 2, 8, 6, positive=True, state=False, dtype=torch.float64)
    out = gla.gated_linear_attention(
        inputs.q, inputs.k, torch.full_like(inputs.v, 3.25), inputs.log_decay, normalize=True,
        impl=impl,
    )  # fmt: skip
    assert float((out.o - 3.25).abs().max()) <= 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_floor(impl: str) -> None:
    """Below 1e-6 the divisor is 1e-6, and no gradient goes through it; negative sums as well."""
    inputs = make_inputs(1, 20, 2, 4, 3, state=False, dtype=torch.float64)
    tiny = inputs._replace(q=inputs.q.abs() * 1e-4, k=inputs.k.abs() * 1e-5)
    assert_correct(tiny, impl, normalize=True)
    assert_correct(tiny._replace(k=-tiny.k), impl, normalize=True)
    assert_correct(tiny._replace(k=torch.zeros_like(tiny.k)), impl, normalize=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_normalizer_after_a_reset(impl: str) -> None:
    """Right after -inf the mean has one term: its value is what comes back."""
    inputs = make_inputs(1, 40, 2, 8, 6, positive=True, normalizer=True, dtype=torch.float64)
    assert inputs.log_decay is not None
    inputs.log_decay[:, 20] = -math.inf
    out = gla.gated_linear_attention(
        *inputs[:4], initial_state=inputs.initial_state, normalize=True, impl=impl
    )
    torch.testing.assert_close(out.o[:, 20], inputs.v[:, 20], rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_sums_of_positive_features(impl: str, dtype: torch.dtype) -> None:
    """The running sum passes 65,504, the largest fp16, and 256, where bf16 stops counting by 1."""
    inputs = make_inputs(1, 1000, 1, 8, 8, gate="none", positive=True, state=False, dtype=dtype)
    large = inputs._replace(k=inputs.k * 100)
    assert_correct(large, impl, normalize=True, loss="o")


# --- causal=False -----------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("state", [False, True], ids=["cold", "warm"])
def test_whole_sequence(normalize: bool, state: bool) -> None:
    for dtype in DTYPES:
        inputs = make_inputs(
            2, 37, 6, 8, 4, kv_heads=3, gate="none", positive=normalize,
            normalizer=normalize, state=state, dtype=dtype,
        )  # fmt: skip
        assert_correct(inputs, "auto", causal=False, normalize=normalize)


@pytest.mark.parametrize("loss", LOSSES)
def test_whole_sequence_gradients(loss: str) -> None:
    inputs = make_inputs(2, 37, 3, 8, 4, gate="none", dtype=torch.float64)
    assert_correct(inputs, "auto", causal=False, loss=loss, scale=0.3)


@pytest.mark.parametrize("tokens", [0, 1, 2, 65])
def test_whole_sequence_lengths(tokens: int) -> None:
    assert_correct(
        make_inputs(2, tokens, 3, 8, 4, gate="none", dtype=torch.float64), "auto", causal=False
    )


def test_whole_documents_of_a_pack() -> None:
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(1, 40, 2, 8, 6, gate="none", sequences=5, dtype=dtype)
        assert_correct(inputs, "auto", causal=False, cu_seqlens=torch.tensor([0, 0, 3, 4, 20, 40]))


def test_permuting_tokens_permutes_the_output() -> None:
    inputs = make_inputs(1, 30, 2, 8, 6, gate="none", dtype=torch.float64)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gla.gated_linear_attention(q, k, v, causal=False).o

    permuted = run(*(x[:, order] for x in inputs[:3]))
    torch.testing.assert_close(permuted, run(*inputs[:3])[:, order], rtol=0, atol=1e-12)
