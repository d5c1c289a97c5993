"""The comparison of encoders, with one step on a few files."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gla.data.prepare import prepare
from gla.data.tokenizer import Tokenizer
from gla.train.trainer import Trainer


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "bench_encoders.py"
    spec = importlib.util.spec_from_file_location("bench_encoders", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with the twenty training files that the recipe asks for."""
    root, rng = tmp_path_factory.mktemp("bench"), random.Random(0)
    for word in ("one", "two"):
        for i in range(30):
            path = root / "texts" / word / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(" ".join(rng.choices([word, "and", "more", str(i)], k=40)))
    Tokenizer.train(root / "texts", 270, root / "tokenizer")
    prepare(root / "texts", root / "tokenizer", root / "data", val_fraction=0.1)
    return root


def test_every_variant_gives_its_row(bench, folder, capsys):
    out, file = folder / "runs", folder / "rows.json"
    bench.bench(out, steps=1, data=str(folder / "data"), device="cpu", json_file=file)
    rows = json.loads(file.read_text())
    assert list(rows) == list(bench.VARIANTS)
    parameters = {name: row["parameters"] for name, row in rows.items()}
    # softmax has four maps of d = 96 in each of three layers; E and F add k * 512 each
    for k in (32, 128):
        more = parameters[f"linformer, k = {k}"] - parameters["softmax"]
        assert more == 3 * 2 * k * 512
    assert parameters["linear"] == parameters["softmax"]
    assert parameters["nystrom"] - parameters["softmax"] == 3 * 33
    for row in rows.values():
        assert 0 <= row["macro_f1"] <= 1 and 0 <= row["accuracy"] <= 1 and row["loss"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows) and "most frequent class" in printed
    weights = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    bench.bench(out, steps=1, only=["k = 32"], data=str(folder / "data"), device="cpu")
    after = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    assert after == weights  # read, not trained


def test_another_recipe_is_another_run_and_a_broken_one_goes_on(bench, folder, monkeypatch):
    def loss(out: str, steps: int) -> float:
        file, data = folder / f"{out}.json", str(folder / "data")
        bench.bench(folder / out, steps, only=["softmax"], data=data, device="cpu", json_file=file)
        return json.loads(file.read_text())["softmax"]["loss"]

    short, long = loss("whole", 1), loss("whole", 3)
    assert short != long and len(list((folder / "whole").iterdir())) == 2
    backward = Trainer.backward

    def interrupted(self: Trainer, batches: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return backward(self, batches)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "backward", interrupted)
        loss("broken", 3)
    assert [path.name for path in (folder / "broken").rglob("step-*")] == ["step-00000001"]
    assert loss("broken", 3) == long
