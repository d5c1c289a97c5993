"""Text to tokens, in this process or in several, in the order of the documents either way."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gla.data.children import exit_with_parent, started_deaf
from gla.data.corpus import Document
from gla.data.shards import text_digest
from gla.data.tokenizer import Tokenizer
from gla.errors import DataError

_BATCH_CHARACTERS = 1 << 20  # text that a worker is handed at a time


class Encoded(NamedTuple):
    """A document as it is stored.

    Attributes:
        tokens: uint32 [T], <s> and </s> included.
        num_bytes: Of its raw text in UTF-8.
        digest: ``text_digest`` of them.
        name: Of the document in its corpus.
    """

    tokens: np.ndarray
    num_bytes: int
    digest: bytes
    name: str


def encode(
    documents: Iterable[tuple[str, Document]], tokenizer_dir: Path, workers: int
) -> Iterator[tuple[str, Encoded]]:
    """Yield the documents' tokens, in order whatever the number of workers."""
    if workers == 1:
        tokenizer = Tokenizer.load(tokenizer_dir)
        for split, document in documents:
            yield split, _encode_one(tokenizer, document)
        return
    context = multiprocessing.get_context("spawn")  # forking a process with threads may hang it
    waiting: deque[tuple[list[str], Future[list[Encoded]]]] = deque()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_dir,))
    try:
        for batch in _batches(documents):
            splits = [split for split, _ in batch]
            with started_deaf(signal.SIGINT):  # on Ctrl-C this process ends them, and says so
                future = pool.submit(_encode_batch, [doc for _, doc in batch])
            waiting.append((splits, future))
            if len(waiting) > 2 * workers:
                yield from _take(waiting)
        while waiting:
            yield from _take(waiting)
    except BrokenProcessPool as reason:
        raise DataError(
            "workers: a tokenizing process died; fix by starting again, with fewer workers if "
            "memory ran out"
        ) from reason
    finally:
        pool.shutdown(cancel_futures=True)


def _take(
    waiting: deque[tuple[list[str], Future[list[Encoded]]]],
) -> Iterator[tuple[str, Encoded]]:
    splits, future = waiting.popleft()
    yield from zip(splits, future.result(), strict=True)


def _batches(
    documents: Iterable[tuple[str, Document]],
) -> Iterator[list[tuple[str, Document]]]:
    batch: list[tuple[str, Document]] = []
    size = 0
    for entry in documents:
        batch.append(entry)
        size += len(entry[1].text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker: dict[str, Tokenizer] = {}  # of a tokenizing process


def _start_worker(tokenizer_dir: Path) -> None:
    exit_with_parent()
    _worker["tokenizer"] = Tokenizer.load(tokenizer_dir)


def _encode_batch(documents: list[Document]) -> list[Encoded]:
    return [_encode_one(_worker["tokenizer"], document) for document in documents]


def _encode_one(tokenizer: Tokenizer, document: Document) -> Encoded:
    try:
        ids = tokenizer.encode(document.text)
    except DataError as reason:
        raise DataError(f"{document.name}: {reason}") from reason
    data = document.text.encode()
    tokens = np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], np.uint32)
    return Encoded(tokens, len(data), text_digest(data), document.name)
