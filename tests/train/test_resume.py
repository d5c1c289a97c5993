"""k steps, a kill at any moment, and a new process: bit for bit what an unbroken run gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gla import storage
from gla.data.shards import TokenDataset
from gla.train.config import build
from tests.train.conftest import lines

# One worker for all: the kills are made once, by a fixture of the module.
pytestmark = pytest.mark.xdist_group("kills")

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
STOPPED = {"sigint": 130, "sigterm": 143, "sigterm-twice": 143}


class Runs(NamedTuple):
    folder: Path
    codes: dict[str, list[int]]


def recipes(data: Path) -> dict[str, dict]:
    """What is trained, broken and resumed. An update is two micro-batches everywhere.

    "rich" goes through an epoch, in fp16, with an average of the weights; "carried" through one
    with states carried from step to step; "workers" reads with two processes.
    """
    plain = {
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
    long = {"steps": 30, "global_batch_size": 20, "micro_batch_size": 10}
    rich = {"precision": "fp16", "ema_decay": 0.9, "activation_checkpointing": True}
    return {
        "plain": plain,
        "rich": plain
        | {
            "train": plain["train"] | long | rich,
            "optim": {"kind": "muon", "groups": [{"pattern": "embed", "lr_factor": 0.5}]},
            "checkpoint": {"interval": 4, "keep_best": True},
        },
        "carried": plain | {"train": plain["train"] | long | {"carry_state": True}},
        "workers": plain | {"train": plain["train"] | {"loader_workers": 2}},
    }


def run_driver(folder: Path, data: Path, kills: int, names: tuple[str, ...] | None = None) -> Runs:
    """Run all scenarios, or those of the named recipes, in a process of their own."""
    for name, tables in recipes(data).items():
        if names is not None and name not in names:
            continue
        (folder / f"{name}.toml").write_text(build(tables).to_toml())
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, str(DRIVER), str(folder), str(kills)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return Runs(folder, json.loads(process.stdout))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Runs:
    return run_driver(tmp_path_factory.mktemp("runs"), data, kills=10)


def assert_same(run: Path, straight: Path) -> None:
    newest, skipped = storage.newest_verified(run / "checkpoints")
    last, _ = storage.newest_verified(straight / "checkpoints")
    assert newest is not None and last is not None
    assert (newest.name, skipped) == (last.name, [])
    other = straight / "checkpoints" / newest.name
    assert {p.name for p in newest.iterdir()} == {p.name for p in other.iterdir()}
    for file in newest.glob("*.safetensors"):
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name
    ours, theirs = (json.loads((f / "trainer.json").read_text()) for f in (newest, other))
    for facts in (ours, theirs):
        del facts["clock"]
    assert ours == theirs
    assert lines(run) == lines(straight)
    names, others = ({p.name for p in (r / "checkpoints").iterdir()} for r in (run, straight))
    assert names == others
    assert not list(run.rglob(f"{storage.TEMPORARY}*"))


def test_an_unbroken_run_ends_well(runs: Runs) -> None:
    steps = [line["step"] for line in lines(runs.folder / "plain") if "loss" in line]
    assert steps == [3, 6, 9, 12]


@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed_is_bitwise_the_same(runs: Runs, name: str) -> None:
    assert runs.codes[name] == [-signal.SIGKILL, 0]
    assert_same(runs.folder / name, runs.folder / "plain")


@pytest.mark.parametrize("name", STOPPED)
def test_a_stop_signal_saves_and_exits_with_its_code(runs: Runs, name: str) -> None:
    assert runs.codes[name] == [STOPPED[name], 0]
    assert_same(runs.folder / name, runs.folder / "plain")
    log = (runs.folder / name / "log.txt").read_text()
    # The signal comes in step 5, where no checkpoint is due; a second one does not wait for it.
    assert ("stopped at step 5" in log) == (name != "sigterm-twice")
    assert ("resumed from" in log) and (("step-00000005" in log) == (name != "sigterm-twice"))


@pytest.mark.parametrize(("recipe", "kills"), [("rich", 10), ("carried", 10), ("workers", 1)])
def test_kills_at_random_moments(runs: Runs, recipe: str, kills: int) -> None:
    codes = runs.codes[recipe]
    assert codes[-1] == 0
    assert codes.count(-signal.SIGKILL) == kills
    assert set(codes) <= {0, -signal.SIGKILL}
    assert_same(runs.folder / f"{recipe}-killed", runs.folder / recipe)


def test_the_recipes_do_what_they_are_there_for(runs: Runs, data: Path) -> None:
    files = {r: {p.name for p in (runs.folder / r).rglob("*.safetensors")} for r in recipes(Path())}
    assert "average.safetensors" in files["rich"] and "carried.safetensors" in files["carried"]
    best = (runs.folder / "rich/checkpoints/best").resolve()
    assert best.parent == (runs.folder / "rich/checkpoints").resolve() and best.is_dir()
    epoch = TokenDataset.open(data / "train").num_tokens
    for recipe in ("rich", "carried"):  # they go through an epoch's end, the plain one does not
        *_, last = (line["tokens"] for line in lines(runs.folder / recipe) if "tokens" in line)
        assert last > epoch
    assert lines(runs.folder / "plain")[-2]["tokens"] < epoch


def test_workers_change_nothing(runs: Runs) -> None:
    assert_same(runs.folder / "workers", runs.folder / "plain")


def assert_same_board(run: Path, straight: Path) -> None:
    """TensorBoard shows each step once, with the value of an unbroken run."""
    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("validation/loss", "val_loss")):
        rows = {line["step"]: line[key] for line in lines(straight) if key in line}
        scalars = events.Scalars(tag)
        assert [e.step for e in scalars] == sorted(rows)
        assert [e.value for e in scalars] == [np.float32(rows[e.step]) for e in scalars]


@pytest.mark.parametrize("name", [*KILLED[:-1], "sigterm", "rich-killed", "carried-killed"])
def test_tensorboard_shows_each_step_once(runs: Runs, name: str) -> None:
    whole = name.removesuffix("-killed") if name.endswith("-killed") else "plain"
    assert_same_board(runs.folder / name, runs.folder / whole)
