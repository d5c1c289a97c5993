"""Turn text into a prepared folder: ``train/``, ``val/`` and the ``tokenizer/`` that made them.

Texts that occur twice are kept once, so validation text cannot be in training too. A document goes
to validation when the hash of its name says so: the same documents in every run, a file never
divided between the splits (but for a file so large that ``corpus`` makes many documents of it). The
folder appears whole or not at all; a killed run leaves only a temporary one, which the next run
removes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np

from gla.data.corpus import Corpus, Document
from gla.data.shards import SplitWriter, text_digest
from gla.data.tokenizer import FACTS_FILE, MODEL_FILE, Tokenizer
from gla.errors import ConfigError, DataError
from gla.storage import TEMPORARY, remove, write_folder

_BATCH_CHARACTERS = 1 << 20  # text that a worker is handed at a time
_REPORT_BYTES = 1 << 18  # text between two calls of on_progress


class SplitTotals(NamedTuple):
    """What a split holds; ``num_bytes`` counts raw UTF-8 text."""

    num_documents: int
    num_tokens: int
    num_bytes: int


class Prepared(NamedTuple):
    """What ``prepare`` wrote, and what it left out.

    Attributes:
        train: The training split.
        val: The validation split.
        duplicates: Documents left out since an equal one came before.
        skipped: Faulty records left out, see ``Corpus.skipped``.
    """

    train: SplitTotals
    val: SplitTotals
    duplicates: int
    skipped: int


def prepare(
    sources: str | Path | Iterable[str | Path] | Corpus,
    tokenizer_dir: str | Path,
    out: str | Path,
    val_fraction: float = 0.05,
    *,
    workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Tokenize a corpus into ``out/train`` and ``out/val``.

    At least one document goes to each split. Where there is only one, its last part is validation.

    Args:
        sources: A corpus, or its sources: files, folders, globs, "stdlib", "hub:NAME".
        tokenizer_dir: A folder written by ``Tokenizer.train``; copied to ``out/tokenizer``.
        out: The folder to write; it must not exist, or be empty.
        val_fraction: Share of the documents that goes to validation.
        workers: Processes that tokenize. More than one needs a main module that can be imported.
        on_progress: Called now and then with the documents and bytes of text written so far.

    Raises:
        ConfigError: ``val_fraction`` or ``workers`` is out of range.
        DataError: The corpus or tokenizer cannot be read, a split would be empty, ``out`` is in
            use or holds something, or the disk refuses.
    """
    if not 0 < val_fraction < 1:
        raise ConfigError(f"val_fraction: got {val_fraction}, expected above 0 and below 1")
    if workers < 1:
        raise ConfigError(f"workers: got {workers}, expected 1 or more")
    out = Path(out)
    tokenizer_dir = Path(tokenizer_dir)
    Tokenizer.load(tokenizer_dir)  # a damaged one is an error before anything is read
    corpus = sources if isinstance(sources, Corpus) else Corpus(sources)
    unique = _Unique(corpus)
    report = on_progress or (lambda documents, num_bytes: None)
    totals: list[SplitTotals] = []

    def write(folder: Path) -> None:
        (folder / "tokenizer").mkdir()
        for name in (MODEL_FILE, FACTS_FILE):
            shutil.copyfile(tokenizer_dir / name, folder / "tokenizer" / name)
        encoded = _encode(_split(unique, val_fraction), tokenizer_dir, workers)
        totals.extend(_write_splits(folder, encoded, Tokenizer.load(tokenizer_dir), report))

    with _lock(out):
        _make_room(out)
        write_folder(out, write, error=DataError)
    return Prepared(totals[0], totals[1], unique.duplicates, corpus.skipped)


def goes_to_validation(name: str, val_fraction: float) -> bool:
    """Return whether the document of this name belongs to validation."""
    return _number(name) < val_fraction


def training_documents(
    sources: str | Path | Iterable[str | Path] | Corpus, val_fraction: float = 0.05
) -> Iterator[Document]:
    """Yield what ``prepare`` would put into training: what a tokenizer may learn from.

    Args:
        sources: As for ``prepare``.
        val_fraction: As for ``prepare``.
    """
    corpus = sources if isinstance(sources, Corpus) else Corpus(sources)
    for split, document in _split(_Unique(corpus), val_fraction):
        if split == "train":
            yield document


def _number(name: str) -> float:
    """Return a number from 0 to below 1 that looks random and depends on the name alone."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


class _Unique:
    """The documents of a corpus, each text once."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.duplicates = 0

    def __iter__(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        for document in self._corpus:
            digest = text_digest(document.text.encode())
            if digest in seen:
                self.duplicates += 1
                continue
            seen.add(digest)
            yield document


def _split(documents: Iterable[Document], val_fraction: float) -> Iterator[tuple[str, Document]]:
    """Yield each document with its split; of two documents or more, each split gets one.

    The one whose name has the smallest number of all is held back to the end and goes to
    validation; the one before goes to training where none has yet.
    """
    held: Document | None = None  # smallest number so far
    last: Document | None = None  # of the others
    trained = False
    for document in documents:
        if held is None:
            held = document
            continue
        if _number(document.name) < _number(held.name):
            held, document = document, held
        if last is not None:
            val = goes_to_validation(last.name, val_fraction)
            trained |= not val
            yield "val" if val else "train", last
        last = document
    if held is None:
        raise DataError("sources: got no text, expected at least one document; fix the sources")
    if last is None:
        last, held = _cut(held, 1 - val_fraction)
    val = trained and goes_to_validation(last.name, val_fraction)
    yield "val" if val else "train", last
    yield "val", held


def _cut(document: Document, fraction: float) -> tuple[Document, Document]:
    """Cut a document at the last line's end within its first ``fraction``."""
    name, text = document
    if len(text) < 2:
        raise DataError(f"{name}: got {len(text)} character, expected text for two splits")
    limit = min(max(1, round(len(text) * fraction)), len(text) - 1)
    at = text.rfind("\n", 0, limit) + 1 or limit
    return Document(name, text[:at]), Document(name, text[at:])


class _Encoded(NamedTuple):
    tokens: np.ndarray  # uint32 [T], <s> and </s> included
    num_bytes: int
    digest: bytes


def _encode(
    documents: Iterable[tuple[str, Document]], tokenizer_dir: Path, workers: int
) -> Iterator[tuple[str, _Encoded]]:
    """Yield the documents' tokens, in order whatever the number of workers."""
    if workers == 1:
        tokenizer = Tokenizer.load(tokenizer_dir)
        for split, document in documents:
            yield split, _encode_one(tokenizer, document)
        return
    context = multiprocessing.get_context("spawn")  # forking a process with threads may hang it
    waiting: deque[tuple[list[str], Future[list[_Encoded]]]] = deque()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_dir,))
    try:
        for batch in _batches(documents):
            splits = [split for split, _ in batch]
            waiting.append((splits, pool.submit(_encode_batch, [doc for _, doc in batch])))
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
    waiting: deque[tuple[list[str], Future[list[_Encoded]]]],
) -> Iterator[tuple[str, _Encoded]]:
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
    _worker["tokenizer"] = Tokenizer.load(tokenizer_dir)


def _encode_batch(documents: list[Document]) -> list[_Encoded]:
    return [_encode_one(_worker["tokenizer"], document) for document in documents]


def _encode_one(tokenizer: Tokenizer, document: Document) -> _Encoded:
    try:
        ids = tokenizer.encode(document.text)
    except DataError as reason:
        raise DataError(f"{document.name}: {reason}") from reason
    data = document.text.encode()
    tokens = np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], np.uint32)
    return _Encoded(tokens, len(data), text_digest(data))


def _write_splits(
    folder: Path,
    encoded: Iterable[tuple[str, _Encoded]],
    tokenizer: Tokenizer,
    report: Callable[[int, int], None],
) -> tuple[SplitTotals, SplitTotals]:
    """Write ``folder/train`` and ``folder/val``, each with its manifest."""
    totals: list[SplitTotals] = []

    def fill(train: Path, val: Path) -> None:
        writers = {
            name: SplitWriter(path, tokenizer.vocab_size, tokenizer.fingerprint)
            for name, path in (("train", train), ("val", val))
        }
        documents = num_bytes = reported = 0
        for split, (tokens, size, digest) in encoded:
            writers[split].add(tokens, size, digest)
            documents += 1
            num_bytes += size
            if num_bytes - reported >= _REPORT_BYTES:
                report(documents, num_bytes)
                reported = num_bytes
        report(documents, num_bytes)
        for writer in writers.values():
            writer.close()
            index = writer.index
            totals.append(SplitTotals(index.num_documents, index.num_tokens, index.num_bytes))

    def fill_both(train: Path) -> None:
        write_folder(folder / "val", lambda val: fill(train, val), error=DataError)

    write_folder(folder / "train", fill_both, error=DataError)
    return totals[0], totals[1]


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold ``out`` against a second writer; the system lets go of it when a process dies."""
    lock = filelock.FileLock(out.parent / f".{out.name}.lock", timeout=0)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as reason:
        raise DataError(
            f"{out}: got a folder that another process is preparing, expected a free one; fix by "
            "waiting for it or naming another"
        ) from reason
    except OSError as reason:
        raise DataError(
            f"{out}: got {reason.strerror}, expected a place that can be written; fix the path or "
            "its permissions"
        ) from reason
    try:
        yield
    finally:
        lock.release()


def _make_room(out: Path) -> None:
    """Remove what killed runs left, and an empty folder; refuse anything else."""
    leftover = re.compile(re.escape(f"{TEMPORARY}{out.name}-") + r"\d+")
    if out.parent.is_dir():
        for path in out.parent.iterdir():
            if leftover.fullmatch(path.name):
                remove(path)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if out.exists():
        raise DataError(
            f"{out}: got a path that holds something, expected a new one; fix by naming another or "
            "removing it"
        )
