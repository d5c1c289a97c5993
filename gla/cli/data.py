"""``gla data prepare``: text to shards of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gla.cli.arguments import call_one_of
from gla.cli.tokenizer import Sources


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call_one_of({"prepare": prepare}, "gla data", argv)


def prepare(
    sources: Sources,
    /,
    *,
    tokenizer: Path,
    out: Path,
    val_fraction: float = 0.05,
    text_field: str = "text",
    max_bad: int = 0,
    workers: int = 1,
) -> int:
    """Turn text into shards of tokens, split into train and validation by document.

    Args:
        sources: Files, folders, globs, .jsonl, .parquet, "stdlib" (Python's own sources), or
            "hub:NAME" (a data set of the Hugging Face Hub).
        tokenizer: Folder of a trained tokenizer; it is copied beside the shards.
        out: Folder to write: train/, val/ and tokenizer/.
        val_fraction: Share of the documents kept for validation; at least one is.
        text_field: Key or column that holds the text of .jsonl, .parquet and Hub rows.
        max_bad: Skip up to this many faulty rows and files instead of stopping at the first.
        workers: Processes that tokenize.
    """
    from rich.console import Console

    from gla.data.corpus import Corpus
    from gla.data.prepare import prepare

    corpus = Corpus(sources, text_field=text_field, max_bad=max_bad)
    with Console(stderr=True).status("reading") as status:  # shows nothing off a terminal
        done = prepare(
            corpus,
            tokenizer,
            out,
            val_fraction,
            workers=workers,
            on_progress=lambda documents, size: status.update(
                f"{documents:,} documents, {size / 1e6:,.1f} MB of text"
            ),
        )
    for name, split in (("train", done.train), ("val", done.val)):
        print(
            f"{out / name}: {split.num_documents:,} documents, {split.num_tokens:,} tokens, "
            f"{split.num_bytes:,} bytes of text"
        )
    print(f"left out: {done.duplicates:,} duplicates, {done.skipped:,} faulty records")
    print(f"next: gla train RECIPE --data.path {out}")
    return 0
