"""k steps, a kill at any moment, and a new process: bit for bit what an unbroken run gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gla import storage
from gla.train.config import build

DRIVER = Path(__file__).with_name("kill_driver.py")
ROOT = Path(__file__).parents[2]
STEPS = 12
KILLED = [
    "after-model-file",
    "before-manifest",
    "before-sync",
    "before-rename",
    "before-prune",
    "while-pruning",
    "in-a-step",
    "between-update-and-log",
    "in-evaluation",
    "before-the-first-checkpoint",
    "in-creation",
]
CLOCK = {"tokens_per_s", "tokens_per_s_overall", "data_wait", "tflops", "memory_gib"}
STOPPED = {"sigint": 130, "sigterm": 143, "sigterm-twice": 143}


class Runs(NamedTuple):
    folder: Path
    codes: dict[str, list[int]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Runs:
    """Run all scenarios: an update is two micro-batches; logs, saves, evaluations interleave."""
    folder = tmp_path_factory.mktemp("runs")
    config = build(
        {
            "model": {"d_model": 32, "layers": ["gla", "window"]},
            "data": {"path": str(data)},
            "train": {
                "steps": STEPS,
                "seq_len": 64,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "precision": "fp32",
            },
            "checkpoint": {"interval": 2},
            "eval": {"interval": 5, "batches": 1},
            "metrics": {"interval": 3},
        }
    )
    (folder / "recipe.toml").write_text(config.to_toml())
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, str(DRIVER), str(folder / "recipe.toml"), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    print(process.stderr[-3000:])
    return Runs(folder, json.loads(process.stdout))


def lines(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock and the process."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in CLOCK} for r in rows]


def assert_same(run: Path, straight: Path) -> None:
    newest, skipped = storage.newest_verified(run / "checkpoints")
    assert newest is not None
    assert (newest.name, skipped) == (f"step-{STEPS:08d}", [])
    other = straight / "checkpoints" / newest.name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest / name).read_bytes() == (other / name).read_bytes(), name
    ours, theirs = (json.loads((f / "trainer.json").read_text()) for f in (newest, other))
    for facts in (ours, theirs):
        del facts["clock"]
    assert ours == theirs
    assert lines(run) == lines(straight)
    names = {p.name for p in (run / "checkpoints").iterdir()}
    assert names == {f"step-{STEPS - 2:08d}", f"step-{STEPS:08d}"}
    assert not list(run.rglob(f"{storage.TEMPORARY}*"))


def test_an_unbroken_run_ends_well(runs: Runs) -> None:
    assert runs.codes["straight"] == [0]
    steps = [line["step"] for line in lines(runs.folder / "straight") if "loss" in line]
    assert steps == [3, 6, 9, 12]


@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed_is_bitwise_the_same(runs: Runs, name: str) -> None:
    assert runs.codes[name] == [-signal.SIGKILL, 0]
    assert_same(runs.folder / name, runs.folder / "straight")


@pytest.mark.parametrize("name", STOPPED)
def test_a_stop_signal_saves_and_exits_with_its_code(runs: Runs, name: str) -> None:
    assert runs.codes[name] == [STOPPED[name], 0]
    assert_same(runs.folder / name, runs.folder / "straight")
    log = (runs.folder / name / "log.txt").read_text()
    # The signal comes in step 5, where no checkpoint is due; a second one does not wait for it.
    assert ("stopped at step 5" in log) == (name != "sigterm-twice")
    assert ("resumed from" in log) and (("step-00000005" in log) == (name != "sigterm-twice"))


def test_kills_at_random_moments(runs: Runs) -> None:
    codes = runs.codes["random"]
    assert codes[-1] == 0
    assert codes.count(-signal.SIGKILL) > 3
    assert set(codes) <= {0, -signal.SIGKILL}
    assert_same(runs.folder / "random", runs.folder / "straight")


@pytest.mark.parametrize("name", [*KILLED[:-1], "sigterm", "random"])
def test_tensorboard_shows_each_step_once(runs: Runs, name: str) -> None:
    events = EventAccumulator(str(runs.folder / name / "tb"))
    events.Reload()
    straight = {line["step"]: line for line in lines(runs.folder / "straight") if "loss" in line}
    scalars = events.Scalars("train/loss")
    assert [e.step for e in scalars] == sorted(straight)
    assert [e.value for e in scalars] == pytest.approx([straight[e.step]["loss"] for e in scalars])
