"""Turn text into a prepared folder: ``train/``, ``val/`` and the ``tokenizer/`` that made them.

Texts that occur twice are kept once, so validation text cannot be in training too. A document goes
to validation when the hash of its name says so: the same documents in every run, a file never
divided between the splits (but for a file so large that ``corpus`` makes many documents of it).

The folder appears whole or not at all. What a killed run has done stands in a temporary folder
beside it, and the next run goes on from there: it reads the text again, which is quick, makes sure
that it is the same, and tokenizes what is left.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gla.data.corpus import Corpus, Document
from gla.data.encode import encode
from gla.data.shards import SplitWriter, text_digest
from gla.data.tokenizer import FACTS_FILE, MODEL_FILE, Tokenizer
from gla.errors import ConfigError, DataError
from gla.storage import (
    TEMPORARY,
    locked,
    refused_writes,
    remove,
    seal,
    write_bytes_atomic,
    write_manifest,
)

MADE_FILE = "made_from.json"
_REPORT_BYTES = 1 << 18  # text between two calls of on_progress
_SAVE_BYTES = 64 << 20  # text between two records of what has been done
_SPLITS = ("train", "val")


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
        resumed_bytes: Text that an earlier, killed run had done already.
    """

    train: SplitTotals
    val: SplitTotals
    duplicates: int
    skipped: int
    resumed_bytes: int = 0


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
        raise ConfigError(
            f"val_fraction: got {val_fraction}, expected above 0 and below 1; fix with a share "
            "such as 0.05"
        )
    if workers < 1:
        raise ConfigError(f"workers: got {workers}, expected 1 or more; fix with 1 or more")
    out, tokenizer_dir = Path(out), Path(tokenizer_dir)
    tokenizer = Tokenizer.load(tokenizer_dir)  # a damaged one is an error before anything is read
    corpus = sources if isinstance(sources, Corpus) else Corpus(sources)
    made = recorded(corpus.sources, corpus.weights, corpus.text_field, val_fraction)
    settings = {**made, "max_bad": corpus.max_bad, "tokenizer": tokenizer.fingerprint}
    with _lock(out), refused_writes(out, DataError):
        _make_room(out)
        work = _Work(out, tokenizer_dir, tokenizer, settings)
        try:
            try:
                done = _fill(work, corpus, val_fraction, workers, on_progress)
            except _SourcesChangedError:
                work.start_anew()
                done = _fill(work, corpus, val_fraction, workers, on_progress)
            work.finish(out, made)
        except Exception:  # but for Ctrl-C, which leaves what a later run goes on from
            work.discard()
            raise
    return done


def recorded(
    sources: Sequence[str], weights: Sequence[float], text_field: str, val_fraction: float
) -> dict[str, Any]:
    """Return what a prepared folder says that it was made from."""
    return {
        "sources": list(sources),
        "weights": list(weights),
        "text_field": text_field,
        "val_fraction": val_fraction,
    }


def made_from(path: Path) -> dict[str, Any] | None:
    """Read ``recorded`` from a prepared folder; None where it does not say."""
    try:
        made = json.loads((path / MADE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) else None


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
    for split, document in _split(corpus.unique(), val_fraction):
        if split == "train":
            yield document


def _number(name: str) -> float:
    """Return a number from 0 to below 1 that looks random and depends on the name alone."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


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
        raise DataError(
            f"{name}: got {len(text)} character, expected text for two splits; fix by adding text"
        )
    limit = min(max(1, round(len(text) * fraction)), len(text) - 1)
    at = text.rfind("\n", 0, limit) + 1 or limit
    return Document(name, text[:at]), Document(name, text[at:])


class _SourcesChangedError(Exception):
    """The text is not the one that a killed run read."""


class _Work:
    """The unfinished folder of a ``prepare``, and the record of what of it is on the disk.

    Attributes:
        writers: Of both splits, by name.
        documents: How many the record says are done.
    """

    def __init__(
        self, out: Path, tokenizer_dir: Path, tokenizer: Tokenizer, settings: dict[str, Any]
    ) -> None:
        """Go on with what a run with the same settings left, or start anew."""
        self.folder = out.parent / f"{TEMPORARY}{out.name}-part"
        self._record = out.parent / f"{TEMPORARY}{out.name}-part.json"
        self._tokenizer_dir, self._tokenizer, self._settings = tokenizer_dir, tokenizer, settings
        self.writers: dict[str, SplitWriter] = {}
        self.documents = 0
        try:
            record = json.loads(self._record.read_bytes())
            if record["settings"] != settings:
                raise ValueError("made with other settings")
            self._open(record["splits"])
            self.documents = record["documents"]
        except (OSError, ValueError, TypeError, KeyError):
            self.start_anew()

    def start_anew(self) -> None:
        """Empty the folder."""
        self.discard()
        (self.folder / "tokenizer").mkdir(parents=True)
        for name in (MODEL_FILE, FACTS_FILE):
            shutil.copyfile(self._tokenizer_dir / name, self.folder / "tokenizer" / name)
        for name in _SPLITS:
            (self.folder / name).mkdir()
        self._open(dict.fromkeys(_SPLITS))
        self.documents = 0

    def _open(self, saved: dict[str, str | None]) -> None:
        self.writers = {
            name: SplitWriter(
                self.folder / name,
                self._tokenizer.vocab_size,
                self._tokenizer.fingerprint,
                saved=saved[name],
            )
            for name in _SPLITS
        }

    def save(self, documents: int) -> None:
        """Record that so many documents are on the disk."""
        splits = {name: writer.save() for name, writer in self.writers.items()}
        record = {"settings": self._settings, "documents": documents, "splits": splits}
        write_bytes_atomic(self._record, json.dumps(record).encode())

    def finish(self, out: Path, made: dict[str, Any]) -> None:
        """Close the files, describe them, and move the folder into place."""
        for name, writer in self.writers.items():
            writer.close()
            write_manifest(self.folder / name)
        (self.folder / MADE_FILE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        seal(self.folder, out, error=DataError)
        self._record.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the folder and the record."""
        self._record.unlink(missing_ok=True)
        remove(self.folder)


def _fill(
    work: _Work,
    corpus: Corpus,
    val_fraction: float,
    workers: int,
    on_progress: Callable[[int, int], None] | None,
) -> Prepared:
    """Write all documents that are not written yet.

    Raises:
        _SourcesChangedError: Those written are not the first ones of the corpus.
    """
    report = on_progress or (lambda documents, num_bytes: None)
    documents = work.documents
    num_bytes = sum(writer.index.num_bytes for writer in work.writers.values())
    resumed = reported = saved = num_bytes
    rest = _after(_split(corpus.unique(), val_fraction), work)
    for split, (tokens, size, digest, name) in encode(rest, work.folder / "tokenizer", workers):
        work.writers[split].add(tokens, size, digest, name)
        documents += 1
        num_bytes += size
        if num_bytes - saved >= _SAVE_BYTES:
            work.save(documents)
            saved = num_bytes
        if num_bytes - reported >= _REPORT_BYTES:
            report(documents, num_bytes)
            reported = num_bytes
    report(documents, num_bytes)
    train, val = (
        SplitTotals(index.num_documents, index.num_tokens, index.num_bytes)
        for index in (work.writers[name].index for name in _SPLITS)
    )
    return Prepared(train, val, corpus.duplicates, corpus.skipped, resumed)


def _after(
    documents: Iterator[tuple[str, Document]], work: _Work
) -> Iterator[tuple[str, Document]]:
    """Drop the documents that are written, and make sure that they are those."""
    written = {name: writer.digests() for name, writer in work.writers.items()}
    for _ in range(work.documents):
        split, document = next(documents, ("train", Document("", "")))
        if next(written[split], None) != text_digest(document.text.encode()):
            raise _SourcesChangedError
    yield from documents


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold ``out`` against a second writer; the system lets go of it when a process dies."""

    def busy(process: str) -> DataError:
        return DataError(
            f"{out}: got a folder that another process is preparing ({process}), expected a free "
            "one; fix by waiting for it or naming another"
        )

    with ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out.parent / f".{out.name}.lock", busy))
        except OSError as reason:
            below = isinstance(reason, FileExistsError | NotADirectoryError)
            what = "a path below a file" if below else reason.strerror
            raise DataError(
                f"{out}: got {what}, expected a place that can be written; fix the path "
                "or its permissions"
            ) from reason
        yield


def _make_room(out: Path) -> None:
    """Remove temporary files of killed runs, and an empty folder; refuse anything else."""
    leftover = re.compile(re.escape(f"{TEMPORARY}{out.name}-") + r"\d+")
    for path in out.parent.iterdir():
        if leftover.fullmatch(path.name):
            remove(path)
    for path in out.parent.glob(f"{TEMPORARY}{TEMPORARY}{out.name}-part.json-*"):
        path.unlink()
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if out.exists():
        raise DataError(
            f"{out}: got a path that holds something, expected a new one; fix by naming another or "
            "removing it"
        )
