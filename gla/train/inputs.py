"""The data of a run: opened where it is prepared, prepared first where a recipe says from what."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gla.data.corpus import Corpus
from gla.data.prepare import made_from, prepare, recorded, training_documents
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


def fingerprints_of(config: DataConfig) -> dict[str, str]:
    """Return ``Inputs.fingerprints`` of prepared data, without a look at their bytes.

    Raises:
        DataError: They are unfinished.
    """
    path = Path(config.path)
    train, val = (TokenDataset.open(path / name, verify=False) for name in ("train", "val"))
    return Inputs(train, val, tokenizer_of(config)).fingerprints


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


def make_ready(config: DataConfig, note: Callable[[str], None]) -> None:
    """Where nothing stands at ``data.path``, prepare ``data.sources``; else compare it with them.

    Args:
        config: The [data] section.
        note: Called with a line now and then while preparing, and where the prepared data are made
            of something else than the recipe says.

    Raises:
        ConfigError, DataError: As ``Tokenizer.train`` and ``prepare``; or the prepared data have
            another vocabulary than the recipe asks for.
    """
    if is_prepared(config):
        check_prepared(config, note)
    elif config.sources:
        prepare_data(config, note)


def prepare_data(config: DataConfig, note: Callable[[str], None]) -> None:
    """Train a tokenizer on ``data.sources``, and prepare them into ``data.path``."""
    corpus = Corpus(config.sources, text_field=config.text_field, weights=config.weights)
    with tempfile.TemporaryDirectory(prefix="gla-tokenizer-") as tokenizer:
        note(f"training a tokenizer of {config.new_vocab_size} on {', '.join(config.sources)}")
        Tokenizer.train(
            training_documents(corpus, config.val_fraction), config.new_vocab_size, tokenizer
        )
        prepare(
            corpus,
            tokenizer,
            config.path,
            config.val_fraction,
            on_progress=_now_and_then(note),
        )
    if (mixture := corpus.end_of_mixture()) is not None:
        note(mixture)


def check_prepared(config: DataConfig, note: Callable[[str], None]) -> None:
    """Compare what stands at ``data.path`` with what the recipe would make there.

    Raises:
        ConfigError: The recipe names a vocabulary of another size.
    """
    size = tokenizer_of(config).vocab_size
    if config.vocab_size not in (None, size):
        raise ConfigError(
            f"data.vocab_size: got {config.vocab_size}, expected {size}, that of the prepared data "
            f"in {config.path}; fix by leaving it out, or with another data.path"
        )
    made = made_from(Path(config.path))
    wanted = recorded(config.sources, config.weights, config.text_field, config.val_fraction)
    if config.sources and made is not None and made != wanted:
        changed = ", ".join(f"{k} = {v!r}" for k, v in made.items() if wanted.get(k) != v)
        note(
            f"data.path: {config.path} is prepared already, from {changed}; the recipe's other "
            "values are not used (name another data.path to prepare anew)"
        )


def _now_and_then(note: Callable[[str], None]) -> Callable[[int, int], None]:
    said = [time.monotonic()]

    def report(documents: int, num_bytes: int) -> None:
        if time.monotonic() - said[0] > _SECONDS_BETWEEN_NOTES:
            said[0] = time.monotonic()
            note(f"prepared {documents:,} documents, {num_bytes / 1e6:,.1f} MB")

    return report
