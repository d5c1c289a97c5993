"""A small prepared data set and a small recipe, made once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gla.data.prepare import prepare
from gla.data.tokenizer import Tokenizer
from gla.train.config import RunConfig, build

WORDS = "def return for while if else print self value total count item list name".split()

Recipe = Callable[..., RunConfig]


CLOCK = {"tokens_per_s", "tokens_per_s_overall", "data_wait", "tflops", "memory_gib"}


def rows(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def lines(run: Path) -> list[dict[str, Any]]:
    """The same without what depends on the clock and the process."""
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in rows(run)]


def write_texts(folder: Path) -> None:
    """Write 60 documents of a few lines, from a seeded generator."""
    rng = random.Random(0)
    for i in range(60):
        lines = (" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(30))
        (folder / f"{i:02}.txt").write_text(f"file {i}\n" + "\n".join(lines))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of prepared data: some 8,000 tokens."""
    root = tmp_path_factory.mktemp("data")
    (root / "texts").mkdir()
    write_texts(root / "texts")
    Tokenizer.train(root / "texts", 300, root / "tokenizer")
    prepare(root / "texts", root / "tokenizer", root / "prepared", val_fraction=0.1)
    return root / "prepared"


@pytest.fixture
def recipe(data: Path) -> Recipe:
    """Return a function that builds a tiny recipe; keywords such as train__steps=3 change it."""

    def tiny(**changes: Any) -> RunConfig:
        tables: dict[str, dict[str, Any]] = {
            "model": {
                "d_model": 32,
                "layers": ["mine*2"],
                "mixers": {"mine": {"kind": "linear_attention", "conv_width": 4}},
            },
            "data": {"path": str(data)},
            "train": {"steps": 6, "seq_len": 64, "global_batch_size": 4, "precision": "fp32"},
            "optim": {"lr": 1e-2},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"interval": 2},
            "eval": {"interval": 3, "batches": 2},
            "metrics": {"interval": 1},
        }
        for key, value in changes.items():
            section, name = key.split("__")
            tables.setdefault(section, {})[name] = value
        return build(tables)

    return tiny


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small matrices: one thread is faster, and tests in parallel do not fight."""
    torch.set_num_threads(1)
