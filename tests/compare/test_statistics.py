"""Intervals against numbers worked by hand and a published table of Student's t."""

from __future__ import annotations

import math

import pytest

from gla.compare.plan import measure_of, value_of
from gla.compare.statistics import estimate, paired, t_quantile
from gla.compare.summary import verdict

# Two-sided 95 %, from printed tables (for example Abramowitz and Stegun, table 26.10).
PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042}


@pytest.mark.parametrize(("freedom", "t"), PRINTED.items())
def test_student_t(freedom: int, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, abs=5e-4)


def test_student_t_of_other_levels_and_its_limit() -> None:
    assert t_quantile(1, 0.5) == pytest.approx(1.0)  # a quarter of Cauchy lies beyond 1
    assert t_quantile(4, 0.99) == pytest.approx(4.604, abs=5e-4)
    assert t_quantile(100_000) == pytest.approx(1.95996, abs=1e-4)  # the normal distribution


def test_an_interval_by_hand() -> None:
    # 1, 2, 4: mean 7/3, deviations -4/3, -1/3, 5/3, s² = (16 + 1 + 25) / 9 / 2 = 7/3
    found = estimate([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half_width == pytest.approx(4.302653 * math.sqrt(7 / 3 / 3))
    assert found.n == 3


def test_few_values() -> None:
    assert estimate([2.0]) == (2.0, None, 1)
    assert math.isnan(estimate([]).mean) and estimate([]).n == 0


def test_paired_differences_leave_out_what_seeds_share() -> None:
    ours = {0: 2.0, 1: 5.1, 2: 9.0, 3: 1.0}
    theirs = {0: 1.9, 1: 5.0, 2: 8.8}
    found = paired(ours, theirs)  # 0.1, 0.1, 0.2
    assert found.n == 3 and found.mean == pytest.approx(0.4 / 3)
    assert found.half_width == pytest.approx(4.302653 * math.sqrt(1 / 300 / 3))
    assert not found.distinguishable  # 0.133 ± 0.143
    assert not estimate([2.0 - 1.9, 5.1 - 1.0]).distinguishable


@pytest.mark.parametrize(
    ("values", "more", "words"),
    [
        ([], True, "no pair of seeds"),
        ([0.5], True, "one seed: no interval"),
        ([0.1, -0.1], True, "not distinguishable"),
        ([0.0, 0.0], True, "not distinguishable"),
        ([0.5, 0.51], True, "better"),
        ([0.5, 0.51], False, "worse"),
        ([-0.5, -0.5], False, "better"),
    ],
)
def test_verdicts(values: list[float], more: bool, words: str) -> None:
    assert verdict(estimate(values), more) == words


@pytest.mark.parametrize(
    ("metrics", "figure"),
    [
        ({"loss": 1.0, "bpb": 2.0, "accuracy": 0.5}, ("bpb", False)),
        ({"loss": 1.0, "accuracy": 0.5}, ("accuracy", True)),
        ({"loss": 1.0}, ("loss", False)),
    ],
)
def test_the_figure_that_decides(metrics: dict, figure: tuple[str, bool]) -> None:
    results = {"diverged": {"metrics": {}}, "done": {"metrics": metrics}}
    assert measure_of(results) == figure
    assert value_of(results["done"], figure[0]) == metrics[figure[0]]
    assert value_of(results["diverged"], figure[0]) is None
    assert value_of({"metrics": {"loss": math.nan}}, "loss") is None
