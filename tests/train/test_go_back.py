"""A run that is sent back to an older checkpoint goes on as if what came later had not been."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gla import storage
from gla.cli.main import main
from gla.errors import CheckpointError
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig
from gla.train.loop import resume, train
from tests.train.conftest import lines

Recipe = Callable[..., RunConfig]


def sampler(model: LanguageModel, _: object) -> str:
    return str(float(sum(p.sum() for p in model.parameters())))


@pytest.fixture
def spoiled(tmp_path: Path, recipe: Recipe) -> tuple[Path, Path]:
    """An unbroken run of 8 steps, and one that took another way after step 4."""
    options = {
        "train__carry_state": True,
        "train__ema_decay": 0.9,
        "model__layers": ["gla", "window"],
        "schedule__kind": "constant",
        "checkpoint__keep": 9,
        "checkpoint__keep_best": True,
        "eval__interval": 2,
        "eval__batches": 0,
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(recipe(**options, train__steps=8), whole, device="cpu", sampler=sampler)
    train(recipe(**options, train__steps=4), run, device="cpu", sampler=sampler)
    other = [("optim.lr", "0.05"), ("train.steps", "9"), ("eval.interval", "1")]
    resume(run, overrides=other, device="cpu", sampler=sampler)
    assert lines(run) != lines(whole)
    return whole, run


BACK = [("optim.lr", "0.01"), ("train.steps", "8"), ("eval.interval", "2")]


def test_what_follows_is_what_an_unbroken_run_gives(spoiled: tuple[Path, Path]) -> None:
    whole, run = spoiled
    assert resume(run, step=4, overrides=BACK, device="cpu", sampler=sampler).step == 8
    assert lines(run) == lines(whole)
    training = [line["step"] for line in lines(run) if "loss" in line]
    assert training == list(range(1, 9))
    for folder in (whole / "checkpoints").glob("step-*"):
        files = sorted(folder.glob("*.safetensors"))
        assert [f.name for f in files] == [
            "average.safetensors",
            "carried.safetensors",
            "model.safetensors",
            "optimizer.safetensors",
        ]
        for file in files:
            assert file.read_bytes() == (run / "checkpoints" / folder.name / file.name).read_bytes()
    ours, theirs = ({p.name for p in (r / "checkpoints").glob("step-*")} for r in (run, whole))
    assert ours == theirs
    aside = sorted(p.name for p in (run / "checkpoints").glob("aside-*"))
    assert aside[-1] == "aside-step-00000009" and "aside-step-00000006" in aside
    storage.verify_folder(run / "checkpoints" / aside[-1])
    assert f"put aside in {run / 'checkpoints'}: {aside[-1]}" in (run / "log.txt").read_text()
    best = [(r / "checkpoints/best").resolve().name for r in (run, whole)]
    assert best[0] == best[1] and best[0].startswith("step-")
    samples = [{p.name: p.read_text() for p in (r / "samples").iterdir()} for r in (run, whole)]
    assert samples[0] == samples[1]
    board = EventAccumulator(str(run / "tb"))
    board.Reload()
    for tag, key in (("train/loss", "loss"), ("validation/loss", "val_loss")):
        rows = [(line["step"], line[key]) for line in lines(whole) if key in line]
        assert [(e.step, e.value) for e in board.Scalars(tag)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in rows
        ]


def test_a_kill_while_they_are_put_aside_leaves_a_run_that_goes_on(
    spoiled: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = spoiled
    before, rename, calls = lines(run), Path.rename, []

    def die(self: Path, target: Path) -> Path:
        calls.append(self.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        resume(run, step=4, overrides=BACK, device="cpu", sampler=sampler)
    monkeypatch.undo()
    assert calls == [f"step-{n:08d}" for n in (9, 8, 7)]
    assert lines(run) == before  # the newest left is of step 7, whose lines are there
    assert resume(run, step=4, overrides=BACK, device="cpu", sampler=sampler).step == 8
    assert lines(run) == lines(whole)


def test_a_best_that_was_pruned_since_is_looked_for_again(tmp_path: Path, recipe: Recipe) -> None:
    run = tmp_path / "run"
    options = {"checkpoint__keep": 9, "checkpoint__keep_best": True, "eval__interval": 4}
    train(recipe(**options, train__steps=8), run, device="cpu")
    best = run / "checkpoints/best"
    assert best.resolve().name == "step-00000008"
    facts = json.loads((run / "checkpoints/step-00000006/trainer.json").read_text())
    assert facts["best"][0] == 4
    shutil.rmtree(run / "checkpoints/step-00000004")  # as if pruned, after step 8 was better
    worse = [("optim.lr", "100"), ("train.steps", "7")]
    result = resume(run, step=6, overrides=worse, device="cpu")
    assert result.validation["loss"] > facts["best"][1]
    assert best.resolve().name == "step-00000007" and best.exists()
    resume(run, step=6, overrides=[("train.steps", "6")], device="cpu")
    assert not best.is_symlink()  # it led to step 7


def test_a_step_without_a_checkpoint_names_those_that_are_there(
    spoiled: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = spoiled
    capsys.readouterr()
    assert main(["resume", str(run), "--step", "3", "--device", "cpu"]) == 4
    line = capsys.readouterr().err.strip()
    assert "--step: got 3, expected a step with a checkpoint in" in line and "\n" not in line
    assert "(2, 4, 5, 6, 7, 8, 9); fix --step" in line
    weights = run / "checkpoints/step-00000004/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: got .* fix with another --step"
    ):
        resume(run, step=4, device="cpu")
    assert not list((run / "checkpoints").glob("aside-*"))  # nothing was touched
    assert main(["resume", str(run), "--step", "6", "--train.steps", "7", "--device", "cpu"]) == 0
    assert lines(run)[-1]["step"] == 7
    assert torch.isfinite(next(LanguageModel.load(run).parameters())).all()


def test_a_kill_before_the_link_to_the_best_is_in_place_leaves_a_run_that_goes_on(
    tmp_path: Path, recipe: Recipe
) -> None:
    run = tmp_path / "run"
    train(recipe(train__steps=2, checkpoint__keep_best=True), run, device="cpu")
    (run / "checkpoints" / f"{storage.TEMPORARY}best-7").symlink_to("step-00000002")
    assert resume(run, overrides=[("train.steps", "3")], device="cpu").step == 3
    assert not list((run / "checkpoints").glob(f"{storage.TEMPORARY}*"))
    assert (run / "checkpoints/step-00000002").is_dir()


def test_the_last_figures_stand_once_however_often_a_finished_run_is_resumed(
    tmp_path: Path, recipe: Recipe
) -> None:
    run = tmp_path / "run"
    train(recipe(train__steps=3), run, device="cpu")
    for _ in range(2):
        assert resume(run, device="cpu").step == 3
    board = EventAccumulator(str(run / "tb"))
    board.Reload()
    assert [e.step for e in board.Scalars("final/loss")] == [3]
