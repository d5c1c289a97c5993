"""A SentencePiece tokenizer that loses nothing: decode(encode(text)) == text for any valid text.

SentencePiece on its own is lossy, and blind to the layout of code: it writes a space as "▁" (so a
real "▁" comes back as a space), uses tab and NUL as separators in training, and refuses pieces
such as newline + indentation. Three rules avoid all of that:

1. Text is cut into words by one pattern (letters with the character before them, up to three
   digits, punctuation with the line end after it, line end + indentation, runs of spaces). Pieces
   are learned within words, and each distinct word is encoded once: its ids are remembered.
2. Inside a word, space, newline and tab are shown to SentencePiece as the control characters 1, 2
   and 3, which to it are letters like any other.
3. The few characters that SentencePiece or rule 2 gives another meaning are spelled as bytes.

Ids are turned back by a table from id to bytes, never by SentencePiece. The model is a byte-pair
encoding with byte fallback and the control pieces <unk> (never produced), <s> and </s>.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from gla.data.corpus import Corpus, Document
from gla.errors import ConfigError, DataError
from gla.storage import write_bytes_atomic

FORMAT = 1
MODEL_FILE = "tokenizer.model"
FACTS_FILE = "tokenizer.json"  # written last: a folder without it holds no tokenizer

SAMPLE_BYTES = 64 << 20  # training looks at a sample of at most this much text
_MAX_WORDS = 2_000_000  # distinct words counted at a time; the rarest are dropped beyond
_MAX_WORD = 64  # characters; training cuts longer words, and their ids are not remembered
_MAX_PIECE = 32  # characters
_COVERAGE = 0.9995  # share of the text's characters that get a piece of their own
_REMEMBERED = 1 << 18  # words whose ids are kept before the memory starts afresh

_WORD = re.compile(r"[^\w\n]?[^\W\d]+|\d{1,3}| ?[^\w\s]+\n* *|\n[\n ]*| +(?= )|\s|.", re.DOTALL)
_SHOWN = {" ": "\x01", "\n": "\x02", "\t": "\x03"}
_HIDDEN = {shown: char for char, shown in _SHOWN.items()}
# NUL; the stand-ins above; "▁", SentencePiece's space; "▅", its mark for an unknown character.
_AS_BYTES = re.compile("([\x00\x01\x02\x03\u2581\u2585])")
_SMALLEST = 256 + 3 + 1  # bytes, control pieces, one character


class Tokenizer:
    """Text to token ids and back. Use ``Tokenizer.train`` or ``Tokenizer.load``.

    Attributes:
        vocab_size: Number of ids.
        bos_id: Id put before a document; ``encode`` never yields it.
        eos_id: Id put after a document; ``encode`` never yields it.
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
            raise DataError(f"{where}: got bytes that are no SentencePiece model") from reason
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = processor.get_piece_size()
        self.bos_id: int = processor.bos_id()
        self.eos_id: int = processor.eos_id()
        self._bytes = [_bytes_of(processor, i) for i in range(self.vocab_size)]
        self._byte_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if min(self.bos_id, self.eos_id) < 0 or not all(map(processor.is_byte, self._byte_ids)):
            raise DataError(
                f"{where}: got a model without <s>, </s> and 256 byte pieces, expected one written "
                "by `gla tokenizer train`"
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
            sample_bytes: Where there is more text, an even sample of documents of this size is
                looked at. Memory grows with it, not with the text.

        Raises:
            ConfigError: ``vocab_size`` is too small, or larger than the text can fill.
            DataError: The source cannot be read, is empty, or ``out`` holds a tokenizer.
        """
        if vocab_size < _SMALLEST:
            raise ConfigError(f"vocab_size: got {vocab_size}, expected at least {_SMALLEST}")
        out = Path(out)
        if (out / FACTS_FILE).exists():
            raise DataError(
                f"{out}: got a folder that holds a tokenizer, expected a new one; fix by naming "
                "another folder"
            )
        documents = source if isinstance(source, Corpus | Iterator) else Corpus(source)
        texts = _sample((document.text for document in documents), sample_bytes)
        model = _train_model(texts, vocab_size)
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
        out.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(out / MODEL_FILE, model)
        write_bytes_atomic(out / FACTS_FILE, (json.dumps(facts, indent=1) + "\n").encode())
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without control ids. The empty text has none.

        Raises:
            DataError: The text holds a lone surrogate, which no UTF-8 can spell.
        """
        try:
            return list(chain.from_iterable(map(self._words.__getitem__, _WORD.findall(text))))
        except UnicodeEncodeError:
            at, char = next((i, c) for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
            raise DataError(
                f"text: got the lone surrogate U+{ord(char):04X} at character {at}, expected "
                "Unicode text; fix by decoding the input as UTF-8"
            ) from None

    def settled(self, text: str) -> int:
        """Return how many characters of a text, from its start, keep their ids whatever follows."""
        # Where a word ends depends on at most one character after its end.
        ends = (word.end() for word in _WORD.finditer(text))
        return max((end for end in ends if end < len(text) - 1), default=0)

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
                f"ids: got {array.dtype} of shape {array.shape}, expected a row of integers"
            )
        if array.min() < 0 or array.max() >= self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)][0]
            raise DataError(f"ids: got {wrong}, expected 0 to {self.vocab_size - 1}")
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
        for i, part in enumerate(_AS_BYTES.split(word)):
            if i % 2:
                ids += [self._byte_ids[byte] for byte in part.encode()]
            elif part:
                ids += self._processor.encode(_show(part))
        if len(word) <= _MAX_WORD:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[word] = ids
        return ids


def _show(text: str) -> str:
    for char, shown in _SHOWN.items():
        text = text.replace(char, shown)
    return text


def _bytes_of(processor: sentencepiece.SentencePieceProcessor, token: int) -> bytes:
    """Return the bytes of text that an id stands for."""
    piece: str = processor.id_to_piece(token)
    if processor.is_byte(token):
        return bytes([int(piece[3:5], 16)])
    if processor.is_control(token) or processor.is_unknown(token):
        return b""
    for shown, char in _HIDDEN.items():
        piece = piece.replace(shown, char)
    return piece.encode()


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


def _sample(texts: Iterable[str], limit: int) -> list[str]:
    """Return all texts, or an even sample of them of about ``limit`` characters, in their order.

    Each text gets a number that looks random and is the same in every run; the texts with the
    smallest numbers are kept (one pass, memory of the sample).
    """
    kept: list[tuple[float, int, str]] = []  # a heap with the largest number on top
    size = 0
    for index, text in enumerate(texts):
        number = int.from_bytes(hashlib.sha256(index.to_bytes(8, "little")).digest()[:8], "little")
        heapq.heappush(kept, (-number, index, text))
        size += len(text)
        while size > limit and len(kept) > 1:
            size -= len(heapq.heappop(kept)[2])
    return [text[:limit] for _, _, text in sorted(kept, key=lambda entry: entry[1])]


def _count_words(texts: Iterable[str]) -> Counter[str]:
    """Count the words, as SentencePiece will be shown them."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_WORD.findall(text))
        floor = 1
        while len(counts) > _MAX_WORDS:
            counts = Counter({word: n for word, n in counts.items() if n > floor})
            floor *= 2
    shown: Counter[str] = Counter()
    for word, count in counts.items():
        for part in filter(None, _AS_BYTES.split(word)[::2]):
            for start in range(0, len(part), _MAX_WORD):
                shown[_show(part[start : start + _MAX_WORD])] += count
    return shown


def _common_characters(counts: Counter[str], room: int) -> set[str]:
    """Return the characters that get a piece, at most ``room``; the others are spelled as bytes."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for char in word:
            characters[char] += count
    enough = _COVERAGE * characters.total()
    common: set[str] = set()
    covered = 0
    for char, count in sorted(characters.items(), key=lambda entry: (-entry[1], entry[0])):
        if covered >= enough or len(common) >= room:
            break
        common.add(char)
        covered += count
    return common


def _training_lines(counts: Counter[str], common: set[str]) -> Iterator[str]:
    """Yield ``word TAB count``, commonest first, words cut where a character has no piece."""
    rare = re.compile("[^" + re.escape("".join(sorted(common))) + "]+")
    cut: Counter[str] = Counter()
    for word, count in counts.items():
        for part in rare.split(word):
            if part:
                cut[part] += count
    for part, count in sorted(cut.items(), key=lambda entry: (-entry[1], entry[0])):
        yield f"{part}\t{count}"


def _train_model(texts: list[str], vocab_size: int) -> bytes:
    counts = _count_words(texts)
    if not counts:
        raise DataError("tokenizer: got no text to train on, expected some; fix the sources")
    # Characters take half of what is left at most, so that a large script leaves room for pieces;
    # or all of it, where the text does not have that many pieces.
    left = vocab_size - _SMALLEST + 1
    reason = ""
    for room in (max(1, left // 2), left):
        try:
            return _run_trainer(counts, _common_characters(counts, room), vocab_size)
        except RuntimeError as error:
            reason = str(error)
    if largest := re.search(r"value <= (\d+)", reason):
        raise ConfigError(
            f"vocab_size: got {vocab_size}, expected at most {largest[1]} for this text; fix by "
            "lowering it or adding text"
        )
    raise DataError(f"tokenizer: SentencePiece could not train ({reason})")


def _run_trainer(counts: Counter[str], common: set[str], vocab_size: int) -> bytes:
    """Return a serialized model. SentencePiece's faults are RuntimeErrors."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_training_lines(counts, common),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        input_format="tsv",
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
        character_coverage=1.0,
        split_by_unicode_script=False,
        split_by_number=False,
        split_by_whitespace=False,
        max_sentencepiece_length=_MAX_PIECE,
        max_sentence_length=1 << 20,
        pad_id=-1,
        num_threads=1,
        minloglevel=3,
    )
    return model.getvalue()
