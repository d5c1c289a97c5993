"""The learning rate as a function of the step."""

from __future__ import annotations

import itertools

import pytest

from gla.train.config import ScheduleConfig
from gla.train.schedule import lr_factor, warmup_steps


def factors(steps: int, **kind: object) -> list[float]:
    config = ScheduleConfig.model_validate(kind)
    return [lr_factor(config, steps, step) for step in range(steps)]


def test_cosine_warms_up_peaks_and_ends_at_the_floor() -> None:
    rates = factors(100, kind="cosine", warmup_steps=10, min_lr_ratio=0.1)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10 + 44] == pytest.approx(0.55)  # half way down
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_wsd_is_flat_until_its_linear_decay() -> None:
    rates = factors(100, kind="wsd", warmup_steps=10, min_lr_ratio=0.0, decay_fraction=0.2)
    assert set(rates[9:80]) == {1.0}
    assert rates[80:] == pytest.approx([1 - (i + 1) / 20 for i in range(20)])


def test_linear_and_constant() -> None:
    rates = factors(100, kind="linear", warmup_steps=10, min_lr_ratio=0.1)
    assert rates[10:] == pytest.approx([1 - 0.9 * (i + 1) / 90 for i in range(90)])
    rates = factors(100, kind="constant", warmup_steps=10, min_lr_ratio=0.1)
    assert rates[9:] == [1.0] * 91 and rates[4] == 0.5


def test_a_group_may_have_its_own_warmup() -> None:
    config = ScheduleConfig(kind="constant", warmup_steps=10)
    assert [lr_factor(config, 100, step, 2) for step in range(3)] == [0.5, 1.0, 1.0]
    assert lr_factor(config, 100, 0, 0) == 1.0


def test_a_group_whose_warmup_is_cut_does_not_end_it_before_the_others() -> None:
    config = ScheduleConfig(kind="linear", warmup_steps=30, min_lr_ratio=0.0)
    rates = [lr_factor(config, 100, step) for step in range(100)]
    assert rates[29] == 1.0 and rates[28] < 1.0
    assert [lr_factor(config, 100, step, 500) for step in range(100)] == rates
    assert lr_factor(config, 20, 0, 500) == lr_factor(config, 20, 0) == 0.5  # both are cut to 2
    assert lr_factor(config, 100, 0, 5) == 1 / 5  # one that fits is its own


def test_a_warmup_longer_than_the_run_is_cut() -> None:
    assert warmup_steps(1000, 50) == 5
    assert warmup_steps(1000, 5) == 1
    assert warmup_steps(1000, 1000) == 100
    assert warmup_steps(1000, 1001) == 1000
    assert max(factors(50, warmup_steps=1000)) == 1.0


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0, 1, 100])
def test_every_short_run_has_a_valid_rate(kind: str, steps: int, warmup: int) -> None:
    rates = factors(steps, kind=kind, warmup_steps=warmup)
    assert all(0 < rate <= 1 for rate in rates)
