"""A small suite, and a small prepared data set."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from gla.data.prepare import prepare
from gla.data.tokenizer import Tokenizer

SUITE = """
title = "Tiny"
baseline = "softmax"
seeds = 2

[model]
d_model = 32
depth = 2

[train]
steps = 6
global_batch_size = 4
precision = "fp32"

[optim]
lr = 3e-3

[variants.softmax]
layers = ["softmax"]

[variants.gla]
layers = ["mine"]
lr = [1e-3, 1e-2]
mixers.mine = { kind = "linear_attention", gate = "channel" }

[tasks.recall]
kind = "mqar"
vocab_size = 32
length = 32
pairs = 4
test_examples = 32
tests = [[32, 4], [64, 8]]

[sizes.long.train]
steps = 200

[sizes.long.checkpoint]
interval = 5

[sizes.long.metrics]
interval = 1
"""
WORDS = "def return for while if else print self value total count item list name".split()


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    """Return a suite of 6 cells: 2 seeds of each variant, and a sweep of one."""
    file = tmp_path / "tiny.toml"
    file.write_text(SUITE)
    return file


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of prepared data: some thousands of tokens."""
    root = tmp_path_factory.mktemp("data")
    (root / "texts").mkdir()
    rng = random.Random(0)
    for i in range(40):
        lines = (" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(30))
        (root / "texts" / f"{i:02}.txt").write_text(f"file {i}\n" + "\n".join(lines))
    Tokenizer.train(root / "texts", 300, root / "tokenizer")
    prepare(root / "texts", root / "tokenizer", root / "prepared", val_fraction=0.2)
    return root / "prepared"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small matrices: one thread is faster."""
    torch.set_num_threads(1)
