"""``gla tokenizer train``: learn a vocabulary from text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from gla.cli.arguments import call_one_of
from gla.errors import ConfigError

Sources = Annotated[
    list[str],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="SOURCES…", help_behavior_hint="(one or more)"),
]


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call_one_of({"train": train}, "gla tokenizer", argv)


def train(
    sources: Sources, /, *, vocab_size: int = 4096, text_field: str = "text", out: Path
) -> int:
    """Train a SentencePiece tokenizer that loses nothing of any UTF-8 text.

    Args:
        sources: Files, folders, globs, "stdlib" (Python's own sources), or "hub:NAME".
        vocab_size: Number of tokens, at least 260.
        text_field: Key or column that holds the text of .jsonl, .parquet and Hub rows.
        out: Folder to write, which must not hold a tokenizer yet.
    """
    if not sources:
        raise ConfigError(
            "SOURCES: got none, expected files, folders or other sources of text; fix by naming one"
        )
    from gla.data.corpus import Corpus
    from gla.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(Corpus(sources, text_field=text_field), vocab_size, out)
    print(f"{out}: {tokenizer.vocab_size:,} tokens; next: gla data prepare … --tokenizer {out}")
    return 0
