"""A tokenizer that loses nothing: decode(encode(text)) == text for any valid text.

How text becomes words and words become pieces is told in ``vocabulary``. Each distinct word is
encoded once and its ids are remembered for a while; ids are turned back by a table from id to
bytes, never by SentencePiece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from gla.data.corpus import Corpus, Document
from gla.data.vocabulary import (
    AS_BYTES,
    MAX_WORD,
    SAMPLE_BYTES,
    SMALLEST,
    WORD,
    hide,
    learn,
    sample,
    show,
)
from gla.errors import ConfigError, DataError
from gla.storage import make_folder, write_bytes_atomic

FORMAT = 1
MODEL_FILE = "tokenizer.model"
FACTS_FILE = "tokenizer.json"  # written last: a folder without it holds no tokenizer

_REMEMBERED = 1 << 18  # words whose ids are kept before the memory starts afresh


class Tokenizer:
    """Text to token ids and back. Use ``Tokenizer.train`` or ``Tokenizer.load``.

    Attributes:
        vocab_size: Number of ids.
        bos_id: Id put before a document; ``encode`` never yields it.
        eos_id: Id put after a document; ``encode`` never yields it.
        unk_id: ``encode`` never yields it, as bytes spell what has no piece; it can stand for a
            masked token.
        fingerprint: SHA-256 of the model file, in hex.
        piece_bytes: int32 [vocab_size], bytes of text each id stands for (control ids: 0).
    """

    def __init__(self, model: bytes, where: str = "tokenizer") -> None:
        """Build from the bytes of a SentencePiece model that ``Tokenizer.train`` wrote.

        Args:
            model: The serialized model.
            where: What to call it in errors.

        Raises:
            DataError: It is no model, or not one of this tokenizer's kind.
        """
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError as reason:
            raise DataError(
                f"{where}: got bytes that are no SentencePiece model, expected one; fix by "
                "training the tokenizer again"
            ) from reason
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = processor.get_piece_size()
        self.bos_id: int = processor.bos_id()
        self.eos_id: int = processor.eos_id()
        self.unk_id: int = processor.unk_id()
        self._bytes = [_bytes_of(processor, i) for i in range(self.vocab_size)]
        self._byte_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if min(self.bos_id, self.eos_id) < 0 or not all(map(processor.is_byte, self._byte_ids)):
            raise DataError(
                f"{where}: got a model without <s>, </s> and 256 byte pieces, expected one written "
                "by `gla tokenizer train`; fix by training one"
            )
        self.piece_bytes = np.array([len(piece) for piece in self._bytes], dtype=np.int32)
        self._words = _Words(processor, self._byte_ids)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer's folder.

        The model reaches SentencePiece (which may crash on a damaged one) only when its hash is
        the one that was written with it.

        Raises:
            DataError: A file is missing, damaged or of a newer format. The message names it.
        """
        facts = _read_facts(Path(path) / FACTS_FILE)
        file = Path(path) / MODEL_FILE
        try:
            model = file.read_bytes()
        except OSError as reason:
            raise DataError(_missing(file, reason)) from reason
        if (digest := hashlib.sha256(model).hexdigest()) != facts["model_sha256"]:
            raise DataError(
                f"{file}: got SHA-256 {digest[:12]}…, expected {facts['model_sha256'][:12]}…; the "
                "file has changed since it was written; fix by training the tokenizer again"
            )
        return cls(model, str(file))

    @classmethod
    def train(
        cls,
        source: str | Path | Sequence[str | Path] | Corpus | Iterator[Document],
        vocab_size: int,
        out: str | Path,
        *,
        sample_bytes: int = SAMPLE_BYTES,
    ) -> Tokenizer:
        """Learn a vocabulary and write ``tokenizer.model`` and ``tokenizer.json`` into ``out``.

        The same text in the same order gives the same file, byte for byte.

        Args:
            source: The sources of a corpus (files, folders, globs, "stdlib", "hub:NAME"), a
                corpus, or an iterator of documents.
            vocab_size: Number of ids, at least 260: 256 bytes, 3 control pieces, and the rest
                learned.
            out: The folder to write; it must not hold a tokenizer.
            sample_bytes: Where there is more text, an even sample of its documents of this size
                is looked at: of the first 16 times as much, so that a large dataset of the Hub is
                not downloaded twice. Memory grows with it, not with the text.

        Raises:
            ConfigError: ``vocab_size`` is too small, or larger than the text can fill, or ``out``
                cannot be written.
            DataError: The source cannot be read, is empty, or ``out`` holds a tokenizer.
        """
        if vocab_size < SMALLEST:
            raise ConfigError(
                f"vocab_size: got {vocab_size}, expected at least {SMALLEST}; fix by raising it"
            )
        out = Path(out)
        if (out / FACTS_FILE).exists():
            raise DataError(
                f"{out}: got a folder that holds a tokenizer, expected a new one; fix by naming "
                "another folder"
            )
        if out.exists():  # what is no folder is refused before a long text is read
            make_folder(out, "--out")
        documents = source if isinstance(source, Corpus | Iterator) else Corpus(source)
        texts = sample((document.text for document in documents), sample_bytes)
        model = learn(texts, vocab_size)
        tokenizer = cls(model)
        facts = {
            "format": FORMAT,
            "model_sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "trained_on": {
                "documents": len(texts),
                "bytes": sum(len(text.encode()) for text in texts),
            },
        }
        make_folder(out, "--out")
        write_bytes_atomic(out / MODEL_FILE, model)
        write_bytes_atomic(out / FACTS_FILE, (json.dumps(facts, indent=1) + "\n").encode())
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without control ids. The empty text has none.

        Raises:
            DataError: The text holds a lone surrogate, which no UTF-8 can spell.
        """
        try:
            return list(chain.from_iterable(map(self._words.__getitem__, WORD.findall(text))))
        except UnicodeEncodeError:
            at, char = next((i, c) for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
            raise DataError(
                f"text: got the lone surrogate U+{ord(char):04X} at character {at}, expected "
                "Unicode text; fix by decoding the input as UTF-8"
            ) from None

    def settled(self, text: str) -> int:
        """Return how many characters of a text, from its start, keep their ids whatever follows.

        They have these ids by themselves too.
        """
        # Where a word ends depends on two characters after it at most. Of a run of spaces that
        # is shorter than the longest, the last space may belong to what follows.
        settled = 0
        for word in WORD.finditer(text):
            end = word.end()
            if end >= len(text) - 1:
                break
            cut = text[end - 1 : end + 1] == "  " and not word.group().strip(" ")
            if not cut or len(word.group()) == MAX_WORD:
                settled = end
        return settled

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids. Control ids stand for nothing.

        A character cut at either end is shown as U+FFFD; ``decode_bytes`` keeps its bytes.

        Raises:
            DataError: An id is below 0 or not below ``vocab_size``.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 bytes of ids, exactly.

        Raises:
            DataError: An id is below 0 or not below ``vocab_size``.
        """
        array = np.asarray(ids if hasattr(ids, "__len__") else list(ids))
        if array.size == 0:
            return b""
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"ids: got {array.dtype} of shape {array.shape}, expected a row of integers; fix "
                "by giving what encode returned"
            )
        if array.min() < 0 or array.max() >= self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)][0]
            raise DataError(
                f"ids: got {wrong}, expected 0 to {self.vocab_size - 1}; fix by giving ids of this "
                "tokenizer"
            )
        return b"".join(map(self._bytes.__getitem__, array.tolist()))


class _Words(dict[str, list[int]]):
    """Ids of the words seen lately; a new one is encoded when it is looked up."""

    def __init__(
        self, processor: sentencepiece.SentencePieceProcessor, byte_ids: list[int]
    ) -> None:
        super().__init__()
        self._processor = processor
        self._byte_ids = byte_ids

    def __missing__(self, word: str) -> list[int]:
        word.encode()  # a lone surrogate ends here, not inside SentencePiece
        ids: list[int] = []
        for i, part in enumerate(AS_BYTES.split(word)):
            if i % 2:
                ids += [self._byte_ids[byte] for byte in part.encode()]
            elif part:
                ids += self._processor.encode(show(part))
        if len(self) >= _REMEMBERED:
            self.clear()
        self[word] = ids
        return ids


def _bytes_of(processor: sentencepiece.SentencePieceProcessor, token: int) -> bytes:
    """Return the bytes of text that an id stands for."""
    piece: str = processor.id_to_piece(token)
    if processor.is_byte(token):
        return bytes([int(piece[3:5], 16)])
    if processor.is_control(token) or processor.is_unknown(token):
        return b""
    return hide(piece).encode()


def _read_facts(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_bytes())
        version, digest = facts["format"], facts["model_sha256"]
    except OSError as reason:
        raise DataError(_missing(file, reason)) from reason
    except (ValueError, TypeError, KeyError, RecursionError) as reason:
        raise DataError(
            f"{file}: got text that is no tokenizer description; fix by training the tokenizer "
            "again"
        ) from reason
    if version != FORMAT or not isinstance(digest, str):
        raise DataError(
            f"{file}: got format {version!r}, expected {FORMAT}; fix by updating gla or training "
            "the tokenizer again"
        )
    return facts


def _missing(file: Path, reason: OSError) -> str:
    return (
        f"{file}: got {reason.strerror}, expected a file; fix by running `gla tokenizer train` or "
        "naming its folder"
    )
