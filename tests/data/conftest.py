"""A small tokenizer and a maker of prepared splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from gla.data.corpus import Document
from gla.data.shards import SplitWriter, TokenDataset, text_digest
from gla.data.tokenizer import Tokenizer
from gla.storage import write_folder

PROSE = """def greet(name: str) -> str:
    # A comment, 12345 and "quotes".
\treturn f"Hello, {name}!"


class Thing:
    def __init__(self, value=None):
        self.value = value if value is not None else []
"""


def train_text() -> str:
    """Text with enough repetition for some hundred pieces."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(300)]
    return PROSE * 5 + " ".join(rng.choice(words, 3000)) + "\nGrüße, 漢字 und 😀\n"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train(iter([Document("text", train_text())]), 512, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


Split = Callable[..., TokenDataset]


@pytest.fixture
def make_split(tmp_path: Path) -> Split:
    """Return a function that writes documents (rows of ids) and opens the result."""

    def make(
        documents: Sequence[Sequence[int]],
        name: str = "train",
        vocab_size: int = 1000,
        shard_tokens: int = 50,
    ) -> TokenDataset:
        def fill(folder: Path) -> None:
            writer = SplitWriter(folder, vocab_size, "0" * 64, shard_tokens)
            for i, tokens in enumerate(documents):
                data = f"{name} {i}".encode()
                writer.add(np.array(tokens, np.uint32), len(data), text_digest(data))
            writer.close()

        write_folder(tmp_path / name, fill, replace=True)
        return TokenDataset.open(tmp_path / name)

    return make
