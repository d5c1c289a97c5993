"""A tokenizer, a model with every kind of state, and a maker of run folders."""

from __future__ import annotations

import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gla.data.corpus import Document
from gla.data.tokenizer import Tokenizer
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.storage import write_folder

CONFIG = """
[model]
d_model = 32
vocab_size = 320
layers = ["gated", "near", "short", "softmax"]
[model.mixers.gated]
kind = "linear_attention"
gate = "channel"
num_heads = 2
[model.mixers.near]
kind = "softmax_attention"
num_heads = 2
window = 5
[model.mixers.short]
kind = "linear_attention"
gate = "head"
num_heads = 2
conv_width = 4
"""


def training_text() -> str:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randrange(1, 6))) for _ in range(80)]
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(200)]
    return "\n    ".join(lines) + "Grüße ((a, b)) 1234 漢字 😀\n"


def make_model(seed: int = 0, config: str = CONFIG) -> LanguageModel:
    """A model whose weights are large, so that its logits are spread out."""
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(**tomllib.loads(config)["model"])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train(iter([Document("text", training_text())]), 320, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    return make_model()


@pytest.fixture
def make_run(tokenizer_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run folder with one checkpoint."""

    def make(model: LanguageModel, name: str = "run", config: str = CONFIG) -> Path:
        run = tmp_path / name

        def fill(folder: Path) -> None:
            save_file(
                {k: v.clone() for k, v in model.state_dict().items()}, folder / "model.safetensors"
            )

        (run / "checkpoints").mkdir(parents=True)
        write_folder(run / "checkpoints" / "step-00000001", fill)
        (run / "config.toml").write_text(config)
        shutil.copytree(tokenizer_dir, run / "tokenizer")
        return run

    return make
