"""Sampling against plain Python, and every value it must refuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla.errors import ConfigError, NumericsError
from gla.generate.sampling import Sampling, probabilities, sample, seeded_generator

NAN, INF = math.nan, math.inf


def plain(logits, temperature, top_k, top_p):
    """The same distribution in Python lists, filters in the documented order."""
    exps = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-exps[i], i))[:top_k]
    total = sum(exps[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += exps[i] / total
        if reached >= top_p:
            break
    total = sum(exps[i] for i in kept)
    return [exps[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(max_examples=200, deadline=None)
@given(
    # Steps of 1/1024: logits that rounding would tie may come in either order.
    steps=st.lists(st.integers(-8192, 8192), min_size=1, max_size=12, unique=True),
    temperature=st.floats(0.2, 5),
    top_k=st.integers(1, 12) | st.none(),
    top_p=st.floats(0.05, 1),
)
def test_distribution_equals_plain_python(steps, temperature, top_k, top_p):
    logits = [step / 1024 for step in steps]
    top_k = min(top_k, len(logits)) if top_k else None
    got = probabilities(torch.tensor([logits]), Sampling(temperature, top_k, top_p))[0]
    want = plain(logits, temperature, top_k, top_p)
    assert abs(got.sum().item() - 1) < 1e-12
    # A sum within rounding of top_p may fall on either side: compare unless it does.
    if (got > 0).tolist() == [w > 0 for w in want]:
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))
    else:
        nudged = [plain(logits, temperature, top_k, top_p + d) for d in (-1e-9, 1e-9)]
        assert (got > 0).tolist() in [[w > 0 for w in row] for row in nudged]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_largest_and_the_lowest_id_among_equals(dtype):
    logits = torch.tensor([[0.0, 3, 3, -INF], [-1, -1, -2, -1]], dtype=dtype)
    assert sample(logits, Sampling(temperature=0), []).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-8])
def test_tiny_temperatures_are_greedy_and_finite(temperature):
    probs = probabilities(torch.tensor([[1.0, 2.0, -1e30]]), Sampling(temperature))
    assert probs.tolist() == [[0, 1, 0]]


def test_huge_temperature_is_uniform_over_what_is_not_masked():
    probs = probabilities(torch.tensor([[5.0, -5.0, -INF, 0.0]]), Sampling(1e12))
    torch.testing.assert_close(probs, torch.tensor([[1, 1, 0, 1.0]], dtype=torch.float64) / 3)


def test_draws_follow_the_distribution():
    options = Sampling(temperature=0.7, top_k=4, top_p=0.9)
    logits = torch.tensor([[0.3, 1.2, -0.5, 2.0, 0.9, -3.0]])
    generator = seeded_generator(0)
    want = probabilities(logits, options)[0]
    draws = [int(sample(logits, options, [generator])) for _ in range(4000)]
    got = torch.bincount(torch.tensor(draws), minlength=6) / len(draws)
    assert (got[want == 0] == 0).all()
    # Five standard deviations of a share of 4,000 draws are at most 0.04.
    assert (got - want).abs().max() < 0.04


def test_a_seed_repeats_and_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))

    def draws(rows, seeds):
        generators = [seeded_generator(seed) for seed in seeds]
        return [sample(logits[rows], Sampling(), generators).tolist() for _ in range(20)]

    together = draws([0, 1, 2], [7, 8, 9])
    assert together == draws([0, 1, 2], [7, 8, 9])
    assert [row[1:2] for row in together] == draws([1], [8])
    assert draws([1], [8]) != draws([1], [80])


def test_the_logits_are_left_as_they_were():
    logits = torch.randn(2, 8, dtype=torch.float64)
    before = logits.clone()
    sample(logits, Sampling(0.5, 3, 0.5), [seeded_generator(0), seeded_generator(1)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -3}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": NAN}, "top_p"),
    ],
)
def test_values_out_of_range_are_config_errors(options, name):
    with pytest.raises(ConfigError, match=rf"^{name}: got .*, expected .*; fix"):
        Sampling(**options)


def test_top_k_over_the_vocabulary_is_a_config_error():
    Sampling(top_k=9).check_vocab_size(9)
    with pytest.raises(ConfigError, match=r"^top_k: got 9, expected at most .* 8 tokens"):
        probabilities(torch.zeros(1, 8), Sampling(top_k=9))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range_is_a_config_error(seed):
    with pytest.raises(ConfigError, match=r"^seed: got"):
        seeded_generator(seed)


def test_unseeded_generators_differ():
    assert seeded_generator(None).initial_seed() != seeded_generator(None).initial_seed()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[NAN, 0.0], [INF, 0.0], [-INF, -INF], [NAN, NAN]])
def test_logits_that_are_no_distribution_are_numerics_errors(temperature, row):
    logits = torch.tensor([[0.0, 1.0], row])
    with pytest.raises(NumericsError, match=r"^logits: got .*, expected .*; fix"):
        sample(logits, Sampling(temperature), [seeded_generator(0)] * 2)
