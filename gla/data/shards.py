"""The format of prepared text: token shards, a record for each document, and an index.

A split's folder holds

    tokens-00000.bin …   token ids, little-endian uint16 (uint32 for vocabularies above 65,536);
                         a stored document is <s>, its tokens, </s>; none crosses a shard
    documents.bin        one record a document: first token, bytes of raw text, digest of the text
    names.jsonl          the name of each document, a JSON string a line
    index.json           what they are, totals, and the hash of the tokenizer that made them
    manifest.json        sizes and SHA-256 of the above, see ``gla.storage``

and appears whole or not at all. Opening it checks every byte.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from gla.errors import DataError
from gla.storage import verify_folder

FORMAT = 1
INDEX_FILE = "index.json"
DOCUMENTS_FILE = "documents.bin"
NAMES_FILE = "names.jsonl"
SHARD_TOKENS = 1 << 27  # a shard ends with the document that reaches this many
DIGEST_BYTES = 16
_ANEW = "by preparing the data again"
_DOCUMENT = np.dtype([("start", "<i8"), ("bytes", "<i8"), ("digest", "u1", (DIGEST_BYTES,))])


def text_digest(data: bytes) -> bytes:
    """Return the digest by which equal documents are found (BLAKE2b, 16 bytes)."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


class _Index(BaseModel):
    """``index.json``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int
    vocab_size: PositiveInt
    tokenizer_fingerprint: str
    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    num_bytes: NonNegativeInt
    shard_tokens: list[PositiveInt]

    @property
    def dtype(self) -> np.dtype:
        """The type of a stored token id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")


class SplitWriter:
    """Writes the files of a split, one document after another, in bounded memory."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        tokenizer_fingerprint: str,
        shard_tokens: int = SHARD_TOKENS,
        saved: str | None = None,
    ) -> None:
        """Start in an empty folder, or go on where ``save`` was called.

        Args:
            folder: Where the files go.
            vocab_size: Ids are below it.
            tokenizer_fingerprint: ``Tokenizer.fingerprint``.
            shard_tokens: Tokens after which a new shard begins.
            saved: What ``save`` returned: whatever was written later is cut off.

        Raises:
            OSError, ValueError: The folder does not hold what was saved.
        """
        self._folder = folder
        self._limit = shard_tokens
        self._shard: BinaryIO | None = None
        if saved is None:
            self._documents = open(folder / DOCUMENTS_FILE, "wb")
            self._names = open(folder / NAMES_FILE, "wb")
            self.index = _Index(
                format=FORMAT,
                vocab_size=vocab_size,
                tokenizer_fingerprint=tokenizer_fingerprint,
                num_tokens=0,
                num_documents=0,
                num_bytes=0,
                shard_tokens=[],
            )
            return
        self.index = index = _Index.model_validate_json(saved)
        for path in folder.glob("tokens-*.bin"):
            if path.name not in {shard_name(i) for i in range(len(index.shard_tokens))}:
                path.unlink()
        for i, tokens in enumerate(index.shard_tokens):
            self._shard = _cut(folder / shard_name(i), tokens * index.dtype.itemsize)
        self._documents = _cut(folder / DOCUMENTS_FILE, index.num_documents * _DOCUMENT.itemsize)
        with open(folder / NAMES_FILE, "rb") as names:
            size = sum(len(line) for line in itertools.islice(names, index.num_documents))
        self._names = _cut(folder / NAMES_FILE, size)

    def save(self) -> str:
        """Bring all that was added to the disk, and return what a later writer goes on from."""
        for file in (self._shard, self._documents, self._names):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return self.index.model_dump_json()

    def digests(self) -> Iterator[bytes]:
        """Yield the digests of the documents added so far, in their order."""
        self._documents.flush()
        with open(self._folder / DOCUMENTS_FILE, "rb") as file:
            while record := file.read(_DOCUMENT.itemsize):
                yield record[-DIGEST_BYTES:]

    def add(self, tokens: np.ndarray, num_bytes: int, digest: bytes, name: str = "") -> None:
        """Append a document.

        Args:
            tokens: Integer [T], from <s> to </s>.
            num_bytes: Bytes of its raw text in UTF-8.
            digest: ``text_digest`` of them.
            name: Of the document in its corpus.
        """
        index = self.index
        if self._shard is None or index.shard_tokens[-1] >= self._limit:
            self._next_shard()
        assert self._shard is not None
        self._shard.write(tokens.astype(index.dtype).tobytes())
        record = np.zeros(1, _DOCUMENT)
        record["start"], record["bytes"] = index.num_tokens, num_bytes
        record["digest"] = np.frombuffer(digest, np.uint8)
        self._documents.write(record.tobytes())
        self._names.write(json.dumps(name).encode() + b"\n")
        index.shard_tokens[-1] += len(tokens)
        index.num_tokens += len(tokens)
        index.num_documents += 1
        index.num_bytes += num_bytes

    def _next_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = open(self._folder / shard_name(len(self.index.shard_tokens)), "wb")
        self.index.shard_tokens.append(0)

    def close(self) -> None:
        """Finish the files and write the index."""
        if self._shard is not None:
            self._shard.close()
        self._documents.close()
        self._names.close()
        text = self.index.model_dump_json(indent=1)
        (self._folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")


def _cut(file: Path, size: int) -> BinaryIO:
    """Open a file for appending after its first ``size`` bytes, and drop the others."""
    if file.stat().st_size < size:
        raise ValueError(f"{file} is shorter than what was saved")
    stream = open(file, "r+b")
    stream.truncate(size)
    stream.seek(size)
    return stream


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"tokens-{number:05d}.bin"


class TokenDataset:
    """The tokens of a split, mapped from the disk.

    Attributes:
        path: The folder.
        num_tokens: All tokens, <s> and </s> of every document included.
        num_documents: Number of documents.
        num_bytes: Bytes of raw text in UTF-8.
        vocab_size: Of the tokenizer; stored ids are below it.
        tokenizer_fingerprint: SHA-256 of the tokenizer's model.
        fingerprint: SHA-256 over the hashes of all files: changes when any byte does.
        document_starts: int64 [num_documents + 1], first token of each document, then num_tokens.
        document_bytes: int64 [num_documents], bytes of raw text of each document.
        document_digests: uint8 [num_documents, 16], equal for equal texts.
    """

    def __init__(self, path: Path, index: _Index, fingerprint: str) -> None:
        """Map the files of a folder that has been checked; use ``TokenDataset.open``."""
        self.path = path
        self.fingerprint = fingerprint
        self.vocab_size = index.vocab_size
        self.tokenizer_fingerprint = index.tokenizer_fingerprint
        self.num_tokens = index.num_tokens
        self.num_documents = index.num_documents
        self.num_bytes = index.num_bytes
        self._shards = [
            np.memmap(path / shard_name(i), index.dtype, "r", shape=(tokens,))
            for i, tokens in enumerate(index.shard_tokens)
        ]
        self._shard_starts = np.cumsum([0, *index.shard_tokens])
        records = np.fromfile(path / DOCUMENTS_FILE, _DOCUMENT)
        self.document_starts = np.append(records["start"], np.int64(index.num_tokens))
        if self.document_starts[0] != 0 or (np.diff(self.document_starts) < 0).any():
            raise DataError(
                f"{path / DOCUMENTS_FILE}: got documents that do not follow one another, expected "
                "them in order; fix by preparing the data again"
            )
        self.document_bytes = records["bytes"].copy()
        self.document_digests = records["digest"].copy()

    @property
    def document_names(self) -> list[str]:
        """The name of each document in its corpus.

        Raises:
            DataError: The data were prepared when names were not kept.
        """
        file = self.path / NAMES_FILE
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if len(lines) != self.num_documents:
            raise DataError(
                f"{file}: got {len(lines)} names, expected {self.num_documents}, one a document; "
                "fix by preparing the data again"
            )
        return [json.loads(line) for line in lines]

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> TokenDataset:
        """Open a split's folder, such as ``DIR/train``.

        Args:
            path: The folder.
            verify: False leaves out the hashes of its bytes, which another process has checked.

        Raises:
            DataError: The folder is missing, unfinished or changed since it was written (any
                file cut, flipped or absent), or of a newer format. The message names the file.
        """
        path = Path(path)
        if not path.is_dir():
            raise DataError(
                f"{path}: got no folder, expected one from `gla data prepare`; fix the path, or "
                "prepare it"
            )
        files = verify_folder(path, error=DataError, contents=verify, fix=_ANEW)
        index = _read_index(path / INDEX_FILE)
        _check_sizes(path, index, files)
        hashes = json.dumps({name: facts["sha256"] for name, facts in sorted(files.items())})
        return cls(path, index, hashlib.sha256(hashes.encode()).hexdigest())

    def tokens(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the tokens from ``start`` to before ``stop`` (default: all), across shards.

        Returns:
            uint16 or uint32 [stop - start]; a view of the disk where one shard holds them.
        """
        stop = self.num_tokens if stop is None else stop
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        if start == stop:
            return np.empty(0, np.uint16)
        first, last = np.searchsorted(self._shard_starts, (start, stop - 1), side="right") - 1
        parts = []
        for i in range(first, last + 1):
            begin = self._shard_starts[i]
            parts.append(self._shards[i][max(start - begin, 0) : stop - begin])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Return ``tokens`` as int64 [stop - start] that a model may look up.

        Raises:
            DataError: One is not below the vocabulary's size.
        """
        ids = self.tokens(start, stop).astype(np.int64)
        wrong = ids >= self.vocab_size
        if wrong.any():
            at = int(wrong.argmax())
            raise DataError(
                f"{self.path}: got id {ids[at]} at token {start + at}, expected ids below "
                f"{self.vocab_size}; fix by preparing the data again"
            )
        return ids


def check_disjoint(train: TokenDataset, val: TokenDataset) -> None:
    """Make sure that no document is in both splits.

    Raises:
        DataError: Some are, as their digests say; a score on ``val`` would be too good.
    """
    ours, theirs = (np.ascontiguousarray(d.document_digests).view("S16") for d in (val, train))
    if shared := int(np.isin(ours, theirs).sum()):
        raise DataError(
            f"{val.path}: got {shared} of {val.num_documents} documents that {train.path} holds "
            "too, expected none; fix by preparing both splits with one `gla data prepare`"
        )


def _read_index(file: Path) -> _Index:
    try:
        index = _Index.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as reason:
        raise DataError(
            f"{file}: got an index that cannot be read, expected that of a split; fix {_ANEW}"
        ) from reason
    if index.format != FORMAT:
        raise DataError(f"{file}: got format {index.format}, expected {FORMAT}; fix by updating")
    return index


def _check_sizes(path: Path, index: _Index, files: dict[str, dict]) -> None:
    """Check that the files are those of the index: hashes cannot tell a wrong set of files."""
    expected = {
        shard_name(i): tokens * index.dtype.itemsize for i, tokens in enumerate(index.shard_tokens)
    }
    expected[DOCUMENTS_FILE] = index.num_documents * _DOCUMENT.itemsize
    for name, size in expected.items():
        if (got := files.get(name, {}).get("size")) != size:
            raise DataError(f"{path / name}: got {got} bytes, expected {size}; fix {_ANEW}")
    if sum(index.shard_tokens) != index.num_tokens:
        raise DataError(
            f"{path / INDEX_FILE}: got shards that do not add up to its tokens, expected so; "
            f"fix {_ANEW}"
        )
