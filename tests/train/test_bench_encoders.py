"""The comparison of encoders, with one step on a few files."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from gla.data.prepare import prepare
from gla.data.tokenizer import Tokenizer


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
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    bench.bench(out, steps=1, only=["k = 32"], data=str(folder / "data"), device="cpu")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before  # read, not trained
