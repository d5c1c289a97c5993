"""``gla data prepare``: text to shards of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

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
    weights: Annotated[tuple[float, ...], tyro.conf.arg(help_behavior_hint="")] = (),
    text_field: str = "text",
    max_bad: int = 0,
    workers: int = 1,
) -> int:
    """Turn text into shards of tokens, split into train and validation by document.

    A document that occurs twice is kept once. After a kill, the same command goes on.

    Args:
        sources: Files, folders, globs, .jsonl, .parquet, "stdlib" (Python's own sources), or
            "hub:NAME" (a data set of the Hugging Face Hub).
        tokenizer: Folder of a trained tokenizer; it is copied beside the shards.
        out: Folder to write: train/, val/ and tokenizer/.
        val_fraction: Share of the documents kept for validation; at least one is.
        weights: Share of each source in the text, in their order; it ends where a source whose turn
            it is runs out. Without, all of each source.
        text_field: Key or column that holds the text of .jsonl, .parquet and Hub rows.
        max_bad: Skip up to this many faulty rows and files instead of stopping at the first.
        workers: Processes that tokenize.
    """
    from rich.console import Console

    from gla.data.corpus import Corpus, counted
    from gla.data.prepare import prepare

    corpus = Corpus(sources, text_field=text_field, max_bad=max_bad, weights=weights)
    began = time.perf_counter()

    def show(documents: int, size: int) -> None:
        rate = size / 1e6 / (time.perf_counter() - began)
        status.update(f"{documents:,} documents, {size / 1e6:,.1f} MB of text, {rate:,.1f} MB/s")

    with Console(stderr=True).status("reading") as status:  # shows nothing off a terminal
        done = prepare(corpus, tokenizer, out, val_fraction, workers=workers, on_progress=show)
    seconds = time.perf_counter() - began
    for name, split in (("train", done.train), ("val", done.val)):
        print(
            f"{out / name}: {counted(split.num_documents, 'document')}, {split.num_tokens:,} "
            f"tokens, {split.num_bytes:,} bytes of text"
        )
    left_out = (counted(done.duplicates, "duplicate"), counted(done.skipped, "faulty record"))
    print(f"left out: {', '.join(left_out)}")
    if (mixture := corpus.end_of_mixture()) is not None:
        print(mixture)
    size = done.train.num_bytes + done.val.num_bytes - done.resumed_bytes
    print(f"speed: {size / 1e6 / seconds:,.1f} MB of text a second, in {seconds:.1f} s")
    print(f"next: gla train RECIPE --data.path {out}")
    return 0
