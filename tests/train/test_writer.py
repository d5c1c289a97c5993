"""Checkpoints written by a thread: what it copies, what it keeps, how it fails."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gla import storage
from gla.errors import CheckpointError
from gla.models.language_model import LanguageModel
from gla.train import checkpoint
from gla.train.config import RunConfig
from gla.train.loop import resume, train
from gla.train.writer import CheckpointWriter

Recipe = Callable[..., RunConfig]


def snapshot(model: nn.Module, step: int = 1) -> checkpoint.Snapshot:
    facts = checkpoint.TrainerFacts(
        step=step, tokens=0, window={}, validation={}, best=None, updater={}, clock={}, data={}
    )
    return checkpoint.snapshot(model, torch.optim.AdamW(model.parameters()), facts, "")


def test_what_changes_after_the_copy_does_not_reach_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    original = checkpoint.save_file

    def slow(*arguments: Any) -> None:
        assert go.wait(10)
        original(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with CheckpointWriter(tmp_path, keep=2) as writer:
        folder = tmp_path / "step-00000001"
        writer.save(folder, snapshot(model), None)
        with torch.no_grad():
            model.weight += 1
        go.set()
        writer.wait()
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], before)
    assert storage.verify_folder(folder)


def test_an_error_of_the_thread_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with CheckpointWriter(tmp_path, keep=2) as writer:
        writer.save(tmp_path / "step-00000001", snapshot(nn.Linear(2, 2)), None)
        while threading.active_count() > 1 and not writer._error:
            pass
        with pytest.raises(CheckpointError, match="No space left"):
            writer.check()
        writer.check()  # said once


def test_a_full_disk_in_training_stops_at_the_next_step_and_keeps_the_older_one(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.save_file

    def full(tensors: Any, file: Path) -> None:
        if "step-00000004" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", full)
    config = recipe(train__steps=50, eval__interval=50)
    with pytest.raises(CheckpointError, match=r"step-00000004.*No space left"):
        train(config, tmp_path / "run", device="cpu")
    names = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-00000002"]
    monkeypatch.undo()
    assert resume(tmp_path / "run", overrides=[("train.steps", "6")], device="cpu").step == 6


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    """In a process of its own, for which the system refuses files over 10 kB."""
    model = nn.Linear(100, 100)
    checkpoint.write(tmp_path / "step-00000001", snapshot(nn.Linear(2, 2)))
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        code = 1
        try:
            checkpoint.write(tmp_path / "step-00000002", snapshot(model))
        except CheckpointError:
            code = 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failing_sync_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage.os, "fsync", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.write(tmp_path / "step-00000001", snapshot(nn.Linear(2, 2)))
    assert list(tmp_path.iterdir()) == []


def test_the_best_is_kept_and_reachable(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 3.0, 4.0, 3.5])  # of the part that all evaluations read

    def evaluate(*_: Any, batches: int, **__: Any) -> dict[str, float]:
        loss = next(losses) if batches else 2.0  # the whole split is easier
        return {"loss": loss, "bpb": 1.0, "ppl": float("inf")}

    monkeypatch.setattr("gla.train.objective.evaluate", evaluate)
    config = recipe(
        train__steps=12,
        eval__interval=3,
        checkpoint__keep=1,
        checkpoint__keep_best=True,
        checkpoint__interval=4,
    )
    assert train(config, tmp_path / "run", device="cpu").validation["loss"] == 2.0
    metrics = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in metrics if "val_loss" in line]
    assert [line["val_loss"] for line in recorded] == [5.0, 3.0, 4.0, 2.0]
    parent = tmp_path / "run/checkpoints"
    names = sorted(p.name for p in parent.iterdir())
    assert names == ["best", "step-00000006", "step-00000012"]
    assert (parent / "best").resolve() == (parent / "step-00000006").resolve()
    best = LanguageModel.load(parent / "best")
    again = LanguageModel.load(parent / "step-00000006")
    assert torch.equal(best.embed.weight, again.embed.weight)
