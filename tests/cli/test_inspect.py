"""``gla inspect``: a summary, tables and plots of a run."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
from pathlib import Path

import pytest

from gla.cli.inspect import describe
from gla.cli.main import main
from gla.data.shards import TokenDataset
from gla.errors import DataError
from gla.train.config import build
from gla.train.loop import train

PLOTS = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("inspect"), random.Random(0)
    for i in range(12):
        path = root / "texts" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(rng.choices("a few words and some more of them".split(), k=300)))
    return root


def trained(folder: Path, name: str, objective: str, layers: list[str]) -> Path:
    run = folder / name
    tables = {
        "objective": {"kind": objective},
        "model": {"d_model": 32, "layers": layers},
        "data": {"path": str(folder / "data"), "sources": [str(folder / "texts")],
                 "vocab_size": 280},
        "train": {"steps": 2, "seq_len": 64, "global_batch_size": 2, "precision": "fp32"},
    }  # fmt: skip
    train(build(tables), run, device="cpu")
    return run


def table(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_language_model(folder, capsys):
    run = trained(folder, "lm", "next_token", ["gla", "softmax", "performer"])
    assert main(["inspect", str(run), "--tokens", "200", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tokens"] == 200
    assert set(figures["output_std"]) == {f"blocks.{i}.mixer" for i in range(3)}
    assert 0 < figures["half_life"]["blocks.0.mixer"]["p10"]
    assert 1 <= figures["attention_rank"]["blocks.1.mixer"] <= 200
    assert figures["attention_tokens"] == 200
    assert figures["state"]["blocks.0.mixer"]["norm"] > 0
    assert figures["redraws"] == {"blocks.2.mixer": 0}
    assert figures["output_norm"] == ["blocks.0.mixer"]
    out = run / "inspect"
    assert next(row["position"] for row in table(out / "state.csv")) == "1"
    spectrum = table(out / "attention_spectrum.csv")
    assert len(spectrum) == 200 and float(spectrum[-1]["cumulative_share"]) == pytest.approx(1)
    assert {row["layer"] for row in table(out / "half_life.csv")} == {"blocks.0.mixer"}
    names = ("output_std", "half_life", "attention_spectrum", "state_norm", "state_rank")
    for name in names:
        assert (out / f"{name}.png").exists() == PLOTS
    assert main(["inspect", str(run), "--out", str(folder / "elsewhere")]) == 0
    text = capsys.readouterr().out
    assert "half-life" in text and "attention rank" in text and "0 redraws" in text
    assert "10 %, 50 % and 90 % of a layer's gates" in text
    assert (folder / "elsewhere" / "output_std.csv").exists()


def test_the_advice_fits_what_the_layer_has():
    empty = {"half_life": {}, "attention_rank": {}, "state": {}, "redraws": {}}
    empty |= {"projection_gradient": {}, "checkpoint": "c", "tokens": 1}
    for normed, words in (([], "; an output norm or"), (["a"], "behind an output norm")):
        shown = {"output_std": {"a": 0.1}, "outside_band": ["a"], "output_norm": normed}
        (advice,) = [line for line in describe(empty | shown) if line.startswith("!:")]
        assert words in advice


def test_an_encoder_and_what_training_watched(folder, capsys):
    run = trained(folder, "mlm", "masked", ["linformer*2"])
    assert main(["inspect", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    wanted = {f"blocks.{i}.mixer.{p}" for i in range(2) for p in "EF"}
    assert set(figures["projection_gradient"]) == wanted
    assert min(figures["projection_gradient"].values()) > 0
    assert len(table(run / "inspect" / "gradients.csv")) == 4
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    assert last["gradient/blocks.0.mixer.E"] > 0
    assert last["output_std/blocks.1.mixer"] > 0
    assert 1 <= last["attention_rank/blocks.0.mixer"] <= 64


def test_what_is_wrong_is_one_line(folder, tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_id_beyond_the_vocabulary_is_one_line(folder, capsys, monkeypatch):
    run = trained(folder, "ids", "next_token", ["gla"])
    capsys.readouterr()
    stored = TokenDataset.tokens
    monkeypatch.setattr(TokenDataset, "tokens", lambda self, *at: stored(self, *at) + 280)
    assert main(["inspect", str(run), "--tokens", "64"]) == DataError.exit_code
    line = capsys.readouterr().err.strip()
    assert "got id 281 at token 0, expected ids below 280; fix" in line and "\n" not in line
