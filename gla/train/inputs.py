"""The data of a run: opened where it is prepared, prepared first where a recipe says from what."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gla.data.prepare import prepare, training_documents
from gla.data.shards import TokenDataset, check_disjoint
from gla.data.tokenizer import Tokenizer
from gla.errors import ConfigError, DataError
from gla.train.config import DataConfig, RunConfig

_SECONDS_BETWEEN_NOTES = 10


class Inputs(NamedTuple):
    """Both splits and the tokenizer that made them."""

    train: TokenDataset
    val: TokenDataset
    tokenizer: Tokenizer

    @property
    def fingerprints(self) -> dict[str, str]:
        """What a resumed run compares with what it started from."""
        return {
            "train": self.train.fingerprint,
            "val": self.val.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
        }


def is_prepared(config: DataConfig) -> bool:
    """Return whether ``data.path`` holds prepared data."""
    path = Path(config.path)
    return all((path / name).is_dir() for name in ("train", "val", "tokenizer"))


def open_inputs(config: DataConfig) -> Inputs:
    """Open prepared data.

    Raises:
        DataError: It is missing, damaged, or made with another tokenizer.
    """
    path = Path(config.path)
    if not is_prepared(config):
        raise DataError(
            f"data.path: got {config.path!r}, expected a folder with train/, val/ and tokenizer/; "
            f"fix with 'gla data prepare SOURCES --tokenizer DIR --out {config.path}'"
        )
    inputs = Inputs(
        TokenDataset.open(path / "train"),
        TokenDataset.open(path / "val"),
        Tokenizer.load(path / "tokenizer"),
    )
    check_disjoint(inputs.train, inputs.val)
    for split in (inputs.train, inputs.val):
        if split.tokenizer_fingerprint != inputs.tokenizer.fingerprint:
            raise DataError(
                f"{split.path}: got tokens of another tokenizer than {path / 'tokenizer'}, "
                "expected the same; fix by preparing the data again"
            )
    return inputs


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """Load the tokenizer of prepared data."""
    return Tokenizer.load(Path(config.path) / "tokenizer")


def with_vocab_size(config: RunConfig, vocab_size: int) -> RunConfig:
    """Return the recipe with the tokenizer's vocabulary filled in where it names none.

    Raises:
        ConfigError: It names another size.
    """
    named = config.model.vocab_size
    if named is None:
        model = config.model.model_copy(update={"vocab_size": vocab_size})
        return config.model_copy(update={"model": model})
    if named != vocab_size:
        raise ConfigError(
            f"model.vocab_size: got {named}, expected the tokenizer's {vocab_size}; "
            "fix by leaving it out"
        )
    return config


def open_or_prepare(config: DataConfig, note: Callable[[str], None]) -> Inputs:
    """Open the data; where nothing stands at ``data.path``, prepare ``data.sources`` first.

    Args:
        config: The [data] section.
        note: Called with a line now and then while preparing.

    Raises:
        ConfigError, DataError: As ``open_inputs``, ``Tokenizer.train`` and ``prepare``.
    """
    if config.sources and not is_prepared(config):
        with tempfile.TemporaryDirectory(prefix="gla-tokenizer-") as tokenizer:
            note(f"training a tokenizer of {config.vocab_size} on {', '.join(config.sources)}")
            Tokenizer.train(
                training_documents(config.sources, config.val_fraction),
                config.vocab_size,
                tokenizer,
            )
            prepare(
                config.sources,
                tokenizer,
                config.path,
                config.val_fraction,
                on_progress=_now_and_then(note),
            )
    return open_inputs(config)


def _now_and_then(note: Callable[[str], None]) -> Callable[[int, int], None]:
    said = [time.monotonic()]

    def report(documents: int, num_bytes: int) -> None:
        if time.monotonic() - said[0] > _SECONDS_BETWEEN_NOTES:
            said[0] = time.monotonic()
            note(f"prepared {documents:,} documents, {num_bytes / 1e6:,.1f} MB")

    return report
