"""The page about a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gla.errors import ConfigError, DataError
from gla.train.config import RunConfig
from gla.train.loop import train
from gla.train.report import curve, draw, figures, present, read_metrics, write_report

pytest.importorskip("matplotlib")
Recipe = Callable[..., RunConfig]


def test_one_page_has_everything_inside(tmp_path: Path, recipe: Recipe) -> None:
    run = tmp_path / "my <run>"
    train(recipe(), run, device="cpu", sampler=lambda *_: "<b>text</b> & more")
    page = write_report(run)
    assert page == run / "report.html"
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert "&lt;b&gt;text&lt;/b&gt; &amp; more" in text and "my &lt;run&gt;" in text
    for word in ('src="http', "href=", "<script", "<b>text"):
        assert word not in text
    assert "global_batch_size = 4" in text and "&quot;torch&quot;" in text
    rows = read_metrics(run / "metrics.jsonl")
    last = [row for row in rows if "val_loss" in row][-1]
    assert f"{last['val_loss']:.4f}" in text
    assert write_report(run, tmp_path / "out/here") == tmp_path / "out/here/report.html"


def test_figures_that_are_missing_are_not_available() -> None:
    shown = figures([{"step": 3, "loss": None, "tokens": 1000}])
    assert shown["training loss"] == "n/a" and shown["model FLOPs utilization"] == "n/a"
    assert shown["training tokens"] == "1,000"
    assert curve([{"step": 1, "x": None}, {"step": 2}, {"step": 3, "x": 2}], "x")[0] == [1, 3]


def test_an_encoder_shows_what_it_is_measured_by() -> None:
    rows = [
        {"step": 1, "loss": 1.5},
        {"step": 1, "val_loss": 1.25, "val_accuracy": 0.75, "val_macro_f1": 0.5},
    ]
    shown = figures(rows)
    assert shown["validation accuracy"] == "75.00%" and shown["validation macro-F1"] == "0.5000"
    assert "validation bits per byte" not in shown
    curves = {label: key for panel in present(rows) for label, key in panel.curves.items()}
    assert curves == {
        "training": "loss",
        "validation": "val_loss",
        "accuracy": "val_accuracy",
        "macro-F1": "val_macro_f1",
    }
    masked = figures([{"step": 1, "val_loss": 1.25, "val_accuracy": 0.75}])
    assert "validation accuracy" in masked and "validation macro-F1" not in masked
    text = [{"step": 1, "bpb": 1.0}, {"step": 1, "val_loss": 1.0, "val_bpb": 1.0, "decay/b.0.m": 1}]
    assert [panel.curves for panel in present(text)] == [
        {"validation": "val_loss"},
        {"training": "bpb", "validation": "val_bpb"},
        {"0": "decay/b.0.m"},
    ]
    assert "validation bits per byte" in figures(text) and "validation accuracy" not in figures(
        text
    )
    assert draw([{"step": 1}]).startswith(b"\x89PNG")  # nothing measured yet


def test_what_cannot_be_read_is_said(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        write_report(tmp_path)
    file = tmp_path / "metrics.jsonl"
    with pytest.raises(DataError, match="expected metrics"):
        read_metrics(file)
    file.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"jsonl:2: got a line that is no metrics"):
        read_metrics(file)
    file.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo')
    assert read_metrics(file) == [{"step": 1}]


def test_without_matplotlib_the_fix_is_said(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(train__steps=1), tmp_path / "run", device="cpu")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'gla\[plots\]'"):
        write_report(tmp_path / "run")
