"""Where text comes from: files, folders, globs, JSON lines, parquet, the Hub, the stdlib.

A source is a string:

    notes.txt   src/   "books/**/*.txt"     text, one document a file (see ``_PART_BYTES``)
    rows.jsonl  rows.parquet                one document a row, its text in ``text_field``
    stdlib                                  the sources of the running Python's standard library
    hub:ORG/NAME?name=CONFIG&split=train    a dataset of the Hugging Face Hub, streamed

Documents come in an order that depends on names and contents only. Their names do not depend on
where on the machine a folder lies, so a split by name is the same everywhere.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import itertools
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import parse_qsl

from gla.data.mixture import mix
from gla.data.shards import text_digest
from gla.errors import ConfigError, DataError

_BIG_FILE = 16 << 20  # bytes; a text file larger than this is many documents
_PART_BYTES = 1 << 20  # each of about this size, cut at line ends, so that memory stays bounded
_PARQUET_ROWS = 1024  # rows read at a time
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
_HUB_KEYS = ("name", "split", "revision")


class Document(NamedTuple):
    """A text and the name that decides which split it goes to."""

    name: str
    text: str


class Corpus:
    """The documents of a list of sources, read as they are iterated over.

    Attributes:
        skipped: Faulty records left out so far in the latest iteration: rows and files forgiven
            by ``max_bad``, and files of the standard library that are not UTF-8.
        duplicates: Documents that ``unique`` left out so far in the latest iteration.
    """

    def __init__(
        self,
        sources: str | Path | Iterable[str | Path],
        *,
        text_field: str = "text",
        max_bad: int = 0,
        weights: Sequence[float] = (),
    ) -> None:
        """Describe a corpus; nothing is read yet.

        Args:
            sources: One source or several; see the head of this module.
            text_field: Column or key that holds the text of a row.
            max_bad: How many faulty rows and files may be skipped before it is an error.
            weights: Share of each source in the bytes of text, see ``gla.data.mixture``; without,
                all of each, one after another.

        Raises:
            ConfigError: ``max_bad`` is negative, or there is not one positive weight a source.
        """
        self.sources = [str(s) for s in ([sources] if isinstance(sources, str | Path) else sources)]
        self.text_field = text_field
        self.max_bad = max_bad
        self.weights = list(weights)
        self.skipped = self.duplicates = 0
        self._used, self._ended = [0] * len(self.sources), -1
        if max_bad < 0:
            raise ConfigError(f"max_bad: got {max_bad}, expected 0 or more; fix max_bad")
        if self.weights and len(self.weights) != len(self.sources):
            raise ConfigError(
                f"weights: got {len(self.weights)} for {len(self.sources)} sources, expected one "
                "each; fix weights"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ConfigError(f"weights: got {self.weights}, expected positive numbers; fix them")

    def __iter__(self) -> Iterator[Document]:
        """Yield every document that has text.

        Raises:
            DataError: A source matches nothing, or a record is faulty and ``max_bad`` is used up.
                The message names the file and the line or row.
        """
        return self._documents(self._read)

    def unique(self) -> Iterator[Document]:
        """Yield each text once, its first document; weights are shares of what is yielded.

        Raises:
            DataError: As for iteration.
        """
        seen: set[bytes] = set()
        return self._documents(lambda source: self._read_new(source, seen))

    def _documents(self, read: Callable[[str], Iterator[Document | _Fault]]) -> Iterator[Document]:
        self.skipped = self.duplicates = 0
        self._used, self._ended = [0] * len(self.sources), -1
        bad = 0
        streams = [self._counted(i, read(source)) for i, source in enumerate(self.sources)]
        records = (
            mix(streams, self.weights, _size)
            if self.weights
            else itertools.chain.from_iterable(streams)
        )
        for record in records:
            if isinstance(record, Document):
                if record.text:
                    yield record
                continue
            self.skipped += 1
            bad += record.counts
            if bad > self.max_bad:
                more = f" ({bad} faulty records, max_bad {self.max_bad})" if self.max_bad else ""
                raise DataError(record.message + more)

    def _counted(
        self, index: int, stream: Iterator[Document | _Fault]
    ) -> Iterator[Document | _Fault]:
        """Count the documents of a source, and remember which source was the last to run out."""
        for record in stream:
            self._used[index] += isinstance(record, Document) and record.text != ""
            yield record
        self._ended = index

    def end_of_mixture(self) -> str | None:
        """Say which source ended the mixture, and how much was read; None without weights."""
        if not self.weights or self._ended < 0:
            return None
        pairs = list(zip(self.sources, self._used, strict=True))
        name, used = pairs.pop(self._ended)
        others = "; ".join(f"{other}: {counted(count, 'document')} used" for other, count in pairs)
        ended = f"mixture: ended where {name} ran out, with all of its {counted(used, 'document')}"
        return f"{ended} used" + (f"; {others}, the rest left out" if others else "")

    def _read_new(self, source: str, seen: set[bytes]) -> Iterator[Document | _Fault]:
        """Read a source without the texts whose digests are in ``seen``, which grows."""
        for record in self._read(source):
            if isinstance(record, Document) and record.text:
                digest = text_digest(record.text.encode())
                if digest in seen:
                    self.duplicates += 1
                    continue
                seen.add(digest)
            yield record

    def _read(self, source: str) -> Iterator[Document | _Fault]:
        if source == "stdlib":
            yield from _read_stdlib()
        elif source.startswith("hub:"):
            yield from _read_hub(source, self.text_field)
        else:
            for file, name in _files(source):
                if file.suffix == ".jsonl":
                    yield from _read_jsonl(file, name, self.text_field)
                elif file.suffix == ".parquet":
                    yield from _read_parquet(file, name, self.text_field)
                else:
                    yield from _read_text(file, name)


class _Fault(NamedTuple):
    """A record that cannot be used; ``counts`` is false where that is known and accepted."""

    message: str
    counts: bool = True


def _size(record: Document | _Fault) -> int:
    return len(record.text.encode()) if isinstance(record, Document) else 0


def _files(source: str) -> list[tuple[Path, str]]:
    """Return the files of a path, folder or glob with their names, sorted by name."""
    path = Path(source)
    if path.is_file():
        return [(path, path.name)]
    if path.is_dir():
        anchor, found = path, (Path(p) for p in _walk(path))
    else:
        plain = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        anchor = Path(*plain)
        found = (Path(p) for p in glob.glob(source, recursive=True) if os.path.isfile(p))
    named = sorted((p.relative_to(anchor).as_posix(), p) for p in found)
    if not named:
        raise DataError(
            f"{source}: got no file that matches (working folder {Path.cwd()}), expected text, "
            ".jsonl or .parquet; fix the path or the glob"
        )
    return [(file, name) for name, file in named]


def _walk(folder: Path) -> Iterator[str]:
    """Yield the files below a folder, without hidden ones and compiled or installed packages."""
    for root, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        yield from (os.path.join(root, file) for file in files if not file.startswith("."))


def counted(number: int, thing: str) -> str:
    """``1 document``, ``2,000 documents``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _open(file: Path) -> BinaryIO:
    try:
        return open(file, "rb")
    except OSError as reason:
        raise DataError(
            f"{file}: got {reason.strerror}, expected a readable file; fix its permissions"
        ) from reason


def _read_text(file: Path, name: str) -> Iterator[Document | _Fault]:
    with _open(file) as stream:
        big = os.fstat(stream.fileno()).st_size > _BIG_FILE
        start = 0
        while data := _read_part(stream) if big else stream.read():
            try:
                text = data.decode("utf-8-sig" if start == 0 else "utf-8")
            except UnicodeDecodeError as reason:
                yield _Fault(_not_utf8(str(file), start + reason.start))
                return
            yield Document(f"{name}#{start}" if big else name, text)
            start += len(data)


def _read_part(stream: BinaryIO) -> bytes:
    """Return about ``_PART_BYTES``, to a line's end (or a character's, where lines are longer)."""
    data = stream.read(_PART_BYTES) + stream.readline(_PART_BYTES)
    if not data.endswith(b"\n"):
        while (more := stream.read(1)) and more[0] & 0xC0 == 0x80:  # inside a character
            data += more
        stream.seek(-len(more), os.SEEK_CUR)
    return data


def _read_jsonl(file: Path, name: str, field: str) -> Iterator[Document | _Fault]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{file}:{number}"
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as reason:
                yield _Fault(_not_utf8(where, reason.start))
            except (ValueError, RecursionError) as reason:
                yield _Fault(
                    f"{where}: got a line that is no JSON ({reason}), expected an object; fix the "
                    "line, or skip such lines with --max-bad"
                )
            else:
                yield _row(row, field, where, f"{name}:{number}")


def _read_parquet(file: Path, name: str, field: str) -> Iterator[Document | _Fault]:
    parquet = _import("pyarrow.parquet", f"{file}: a parquet file")
    arrow = _import("pyarrow.lib", f"{file}: a parquet file")
    try:
        with parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if field not in columns:
                raise DataError(_no_text(str(file), field, columns))
            number = 0
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row = {**dict.fromkeys(columns), field: value}
                    yield _row(row, field, f"{file}: row {number}", f"{name}:{number}")
                    number += 1
    except (OSError, ValueError, arrow.ArrowException) as reason:
        raise DataError(
            f"{file}: got a file that is no parquet ({_line(reason)}), expected one; fix by making "
            "it again"
        ) from reason


def _read_hub(source: str, field: str) -> Iterator[Document | _Fault]:
    name, _, query = source.removeprefix("hub:").partition("?")
    options = {"split": "train", **dict(parse_qsl(query))}
    unknown = sorted(set(options) - set(_HUB_KEYS))
    if unknown or not name:
        raise ConfigError(
            f"{source}: got {', '.join(unknown) or 'no name'}, expected hub:ORG/NAME with "
            f"?{'&'.join(f'{key}=…' for key in _HUB_KEYS)}; fix by writing it so"
        )
    datasets = _import("datasets", f"{source}: a Hub dataset")
    try:
        with _without_warnings("huggingface_hub"):  # two lines for each of five retries
            rows = datasets.load_dataset(name, streaming=True, **options)
        for number, row in enumerate(rows):
            yield _row(row, field, f"{source} row {number}", f"{source}:{number}")
    except Exception as reason:  # datasets and its HTTP client share no class of error
        raise DataError(
            f"{source}: got no rows from the Hub ({_line(reason)}), expected some; fix the name "
            "or the connection"
        ) from reason


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read_stdlib() -> Iterator[Document | _Fault]:
    """Yield the standard library's ``.py`` files. A few hold other encodings on purpose."""
    folder = Path(sysconfig.get_path("stdlib"))
    for file, name in _files(str(folder)):
        if file.suffix == ".py":
            for record in _read_text(file, f"stdlib/{name}"):
                yield record if isinstance(record, Document) else record._replace(counts=False)


def _row(row: Any, field: str, where: str, name: str) -> Document | _Fault:
    """Make a document of a row, or say what is wrong with it."""
    if not isinstance(row, dict):
        return _Fault(
            f"{where}: got {type(row).__name__}, expected an object with {field!r}; fix the row"
        )
    if field not in row:
        return _Fault(_no_text(where, field, row))
    text = row[field]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        return _Fault(
            f"{where}: got {kind} in {field!r}, expected text (columns: {', '.join(row)}); fix the "
            "row or name another text_field"
        )
    try:
        text.encode()
    except UnicodeEncodeError as reason:
        return _Fault(
            f"{where}: got a lone surrogate at character {reason.start}, expected text; fix the row"
        )
    return Document(name, text)


def _no_text(where: str, field: str, columns: Iterable[str]) -> str:
    return (
        f"{where}: got columns {', '.join(map(str, columns)) or 'none'}, expected {field!r}; fix "
        "by naming another text_field"
    )


def _not_utf8(where: str, offset: int) -> str:
    return (
        f"{where}: got bytes that are not UTF-8 at offset {offset}, expected UTF-8; fix by "
        "converting it, e.g. `iconv -f latin1 -t utf-8`"
    )


def _line(reason: Exception) -> str:
    """Return another library's message on one line."""
    return " ".join(str(reason).split())


def _import(module: str, what: str) -> Any:
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as reason:
        package = module.partition(".")[0]
        raise DataError(
            f"{what} needs the package {package}; fix by running `pip install 'gla[hub]'`"
        ) from reason
