"""What a run writes when values, disks and terminals misbehave."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from gla.errors import CheckpointError
from gla.train.monitor import Monitor, cut_metrics


def test_a_value_that_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    with Monitor(tmp_path, 0, 5) as monitor:
        monitor.record(1, {"loss": math.nan, "lr": 0.1, "grad_norm": math.inf})

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {
        "step": 1,
        "loss": None,
        "lr": 0.1,
        "grad_norm": None,
        "nonfinite": ["loss", "grad_norm"],
    }


def test_a_board_that_fails_is_said_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Monitor(tmp_path, 0, 5) as monitor:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monitor._board.add_scalar = full
        for step in (1, 2, 3):
            monitor.record(step, {"loss": 1.0})
            monitor.histograms(step, {"x": torch.zeros(3)})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_full_disk_names_the_file_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for attribute, name in (("_log", "log.txt"), ("_metrics", "metrics.jsonl")):
        with (
            pytest.raises(CheckpointError, match=rf"{name}: got No space left .*; fix by freeing"),
            Monitor(tmp_path, 0, 5) as monitor,
        ):
            monkeypatch.setattr(monitor, attribute, SimpleNamespace(write=full, close=full))
            monitor.record(1, {"loss": 1.0})
    with Monitor(tmp_path, 0, 5) as monitor:
        monkeypatch.setattr("gla.train.monitor.os.fsync", full)
        with pytest.raises(CheckpointError, match=r"metrics.jsonl: got No space left"):
            monitor.sync()
        with pytest.raises(CheckpointError, match=r"samples: got No space left"):
            monitor.sample(1, "text")


def test_a_kill_within_an_event_leaves_a_board_that_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are read in the order of this number's letters: let it not pass from 9
    # to 10, as it never does in a process that writes one board.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with Monitor(tmp_path, 0, 9) as monitor:
        for step in (1, 2, 3):
            monitor.record(step, {"loss": float(step)})
    (events,) = (tmp_path / "tb").iterdir()
    events.write_bytes(events.read_bytes()[:-7])  # the last event is cut
    with Monitor(tmp_path, 2, 9) as monitor:  # resumed from step 2
        monitor.record(3, {"loss": 30.0})
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30)]


def test_hyperparameters_stand_with_the_final_figures(tmp_path: Path) -> None:
    with Monitor(tmp_path, 0, 5) as monitor:
        monitor.record(5, {"loss": 1.0})
        monitor.finish({"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "x": None}, {"bpb": 1.5})
    assert len(list((tmp_path / "tb").iterdir())) == 1  # no writer beside the run's own
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("final/bpb")] == [(5, 1.5)]
    metadata = board.SummaryMetadata("_hparams_/session_start_info")
    assert metadata.plugin_data.plugin_name == "hparams"
    assert b"optim.lr" in metadata.plugin_data.content


def test_a_board_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("in the way")
    with Monitor(tmp_path, 0, 5) as monitor:
        monitor.record(1, {"loss": 1.0})
    assert "training goes on without TensorBoard" in (tmp_path / "log.txt").read_text()


def test_metrics_are_cut_to_a_step_and_cut_lines_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "val_loss": 1}\nnonsense\n{"step": 3}\n{"step": 2')
    cut_metrics(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2, "val_loss": 1}\n'
    cut_metrics(tmp_path / "absent", 2)
    assert not (tmp_path / "absent").exists()


def test_elsewhere_than_on_a_terminal_lines_are_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Monitor(tmp_path, 0, 5) as monitor:
        monitor.record(1, {"loss": 1.25, "lr": 1e-3, "tokens": 1000, "tokens_per_s": 1234.5})
        monitor.advance(1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "step 1  loss 1.2500  lr 1.00e-03  tokens 1,000  tokens_per_s 1,234\n"


def test_a_sample_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "# not a *heading*\n\tété  \n"
    with Monitor(tmp_path, 0, 5) as monitor:
        monitor.sample(7, text)
    assert (tmp_path / "samples/step-00000007.txt").read_bytes() == text.encode()
