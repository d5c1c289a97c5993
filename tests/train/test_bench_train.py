"""What checkpoints cost: the sums by hand, and a run of seconds."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "bench_train.py"
    spec = importlib.util.spec_from_file_location("bench_train", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_train"] = module
    spec.loader.exec_module(module)
    return module


def test_what_a_checkpoint_adds_is_the_excess_of_the_steps_it_touches(bench) -> None:
    # Steps of 1 s, but the one that ends at 8.5 (1.5 s) and at 9.7 (1.2 s); then 1 s again.
    ends = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.5, 9.7, 10.7, 11.7]
    saves = [
        (3.1, 3.5),  # the first: left out
        (7.01, 8.9),  # touches two steps, 0.7 s more than two medians
        (10.71, 10.9),  # touches one, nothing more
        (11.7, 12.5),  # whole after the last step: left out
    ]
    cost = bench.cost_of_a_checkpoint([bench.Times(ends, saves)])
    assert cost.seconds == pytest.approx(0.35)
    assert cost.median == pytest.approx(1.0)
    assert (cost.checkpoints, cost.steps) == (2, 1.5)
    assert bench.cost_of_a_checkpoint([bench.Times(ends, saves[:1])]) is None
    assert bench.seconds_a_step(bench.Times(ends, saves), 5) == pytest.approx(7.7 / 7)


def test_a_run_is_measured(bench, recipe, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # or a busy disk leaves no step untouched
    config = recipe(checkpoint__interval=50)
    (tmp_path / "tiny.toml").write_text(config.to_toml())
    where = ["--recipe", str(tmp_path / "tiny.toml"), "--data", config.data.path]
    bench.main([*where, "--steps", "40", "--interval", "10", "--rounds", "1"])
    shown = capsys.readouterr().out
    assert re.search(r"one checkpoint adds +-?[\d.]+ ms, over [\d.]+ steps \(of [23] check", shown)
    assert re.search(r"every 50 steps, as the recipe says: [+-][\d.]+%", shown)
