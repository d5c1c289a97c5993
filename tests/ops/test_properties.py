"""Any case at all, drawn by hypothesis, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gla
from gla.testing import GATE_LEVELS, GATE_PATTERNS, GATE_SHAPES, Inputs, make_inputs
from tests.ops.agreement import IMPLS, LOSSES, assert_correct, named

EVERYDAY = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
THOROUGH = settings(EVERYDAY, max_examples=1500, derandomize=False, print_blob=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Inputs, dict[str, Any]]:
    """Arguments of the op: any sizes, gates, states, packs and options that it promises to take."""
    normalize, causal = draw(st.booleans()), draw(st.integers(0, 7)) > 0
    gate = draw(st.sampled_from(GATE_SHAPES)) if causal else "none"
    groups = draw(st.integers(1, 3))
    lengths = draw(st.one_of(st.none(), st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    tokens = draw(st.integers(0, 80)) if lengths is None else sum(lengths)
    batch = draw(st.integers(1, 3)) if lengths is None else 1
    inputs = make_inputs(
        batch,
        tokens,
        groups * draw(st.integers(1, 3)),
        draw(st.integers(1, 20)),
        draw(st.integers(1, 20)),
        kv_heads=groups,
        gate=gate,
        level=draw(st.sampled_from((None, *GATE_LEVELS))),
        pattern=draw(st.sampled_from(GATE_PATTERNS)),
        positive=normalize,
        state=draw(st.booleans()),
        normalizer=normalize,
        sequences=None if lengths is None else len(lengths),
        seed=draw(st.integers(0, 2**20)),
        # Of one token, o = v and the gradients of q and k are differences of equal terms: what is
        # left of them in fp32 is the last bit of o itself, over the floor of the measure already.
        dtype=torch.float64 if normalize else draw(st.sampled_from([torch.float64, torch.float32])),
    )
    options: dict[str, Any] = {"normalize": normalize, "causal": causal}
    options["loss"] = draw(st.sampled_from(LOSSES))
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    if not normalize:
        options["scale"] = draw(st.sampled_from([None, 1.0, -0.3]))
    return inputs, options


@pytest.mark.parametrize("impl", IMPLS)
@EVERYDAY
@given(case=cases())
def test_any_case(impl: str, case: tuple[Inputs, dict[str, Any]]) -> None:
    inputs, options = case
    assert_correct(inputs, impl if options["causal"] else "auto", **options)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@THOROUGH
@given(case=cases())
def test_many_cases(impl: str, case: tuple[Inputs, dict[str, Any]]) -> None:
    inputs, options = case
    assert_correct(inputs, impl if options["causal"] else "auto", **options)


@pytest.mark.parametrize("impl", IMPLS)
@EVERYDAY
@given(
    seed=st.integers(0, 2**20),
    gate=st.sampled_from(GATE_SHAPES),
    level=st.sampled_from(GATE_LEVELS),
)
def test_linear_in_values_and_queries(impl: str, seed: int, gate: str, level: float) -> None:
    """o is linear in q, and in (v, S) together."""
    options = {"gate": gate, "level": level, "pattern": "half", "dtype": torch.float64}
    one, two = (named(make_inputs(1, 30, 2, 4, 5, seed=s, **options)) for s in (seed, seed + 7))

    def run(q: torch.Tensor, v: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
        return gla.gated_linear_attention(
            q, one["k"], v, one.get("log_decay"), initial_state=gla.LinearState(S), impl=impl
        ).o

    whole = run(one["q"], one["v"] + 2 * two["v"], one["S"] + 2 * two["S"])
    parts = run(one["q"], one["v"], one["S"]) + 2 * run(one["q"], two["v"], two["S"])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-11)
    whole = run(one["q"] - 3 * two["q"], one["v"], one["S"])
    parts = run(one["q"], one["v"], one["S"]) - 3 * run(two["q"], one["v"], one["S"])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-11)
