"""How text is cut into words, and how a vocabulary of pieces is learned from them.

SentencePiece on its own is lossy, and blind to the layout of code: it writes a space as "▁" (so a
real "▁" comes back as a space), uses tab and NUL as separators in training, and refuses pieces
such as newline + indentation. Three rules avoid all of that:

1. Text is cut into words by one pattern (letters with the character before them, up to three
   digits, punctuation with the line end after it, line end + indentation, runs of spaces), each
   run at most 64 characters long. A piece lies within a word.
2. Inside a word, space, newline and tab are shown to SentencePiece as the control characters 1, 2
   and 3, which to it are letters like any other.
3. The few characters that SentencePiece or rule 2 gives another meaning are spelled as bytes.

The model is a byte-pair encoding with byte fallback and the control pieces <unk> (never produced),
<s> and </s>. It is learned from counts of words, not from running text: a few seconds for 30 MB.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import sentencepiece

from gla.errors import ConfigError, DataError

SAMPLE_BYTES = 64 << 20  # training looks at a sample of at most this much text
_SAMPLED_FROM = 16  # times as much
_MAX_WORDS = 2_000_000  # distinct words counted at a time; the rarest are dropped beyond
MAX_WORD = 64  # characters in a row of one kind: so all text is cut in bounded memory
_MAX_PIECE = 32  # characters
_COVERAGE = 0.9995  # share of the text's characters that get a piece of their own

WORD = re.compile(
    (
        r"[^\w\n]?[^\W\d]{1,N}|\d{1,3}| ?[^\w\s]{1,N}\n{0,N} {0,N}"
        r"|\n[\n ]{0,N}| {N}| +(?= )|\s|."
    ).replace("N", str(MAX_WORD)),
    re.DOTALL,
)
_SHOWN = {" ": "\x01", "\n": "\x02", "\t": "\x03"}
# NUL; the stand-ins above; "▁", SentencePiece's space; "▅", its mark for an unknown character.
AS_BYTES = re.compile("([\x00\x01\x02\x03\u2581\u2585])")
SMALLEST = 256 + 3 + 1  # bytes, control pieces, one character


def show(text: str) -> str:
    """Return a word as SentencePiece sees it."""
    for char, shown in _SHOWN.items():
        text = text.replace(char, shown)
    return text


def hide(piece: str) -> str:
    """Return the text of a piece: ``show`` backwards."""
    for char, shown in _SHOWN.items():
        piece = piece.replace(shown, char)
    return piece


def sample(texts: Iterable[str], limit: int) -> list[str]:
    """Return all texts, or an even sample of them of about ``limit`` characters, in their order.

    Each text gets a number that looks random and is the same in every run; the texts with the
    smallest numbers are kept (one pass, memory of the sample), of the first 16 ``limit``.
    """
    kept: list[tuple[int, int, str]] = []  # a heap with the largest number on top
    size = seen = 0
    for index, text in enumerate(texts):
        number = int.from_bytes(hashlib.sha256(index.to_bytes(8, "little")).digest()[:8], "little")
        heapq.heappush(kept, (-number, index, text))
        size += len(text)
        seen += len(text)
        while size > limit and len(kept) > 1:
            size -= len(heapq.heappop(kept)[2])
        if seen >= _SAMPLED_FROM * limit:
            break
    return [text[:limit] for _, _, text in sorted(kept, key=lambda entry: entry[1])]


def _count_words(texts: Iterable[str]) -> Counter[str]:
    """Count the words, as SentencePiece will be shown them."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(WORD.findall(text))
        floor = 1
        while len(counts) > _MAX_WORDS:
            counts = Counter({word: n for word, n in counts.items() if n > floor})
            floor *= 2
    shown: Counter[str] = Counter()
    for word, count in counts.items():
        for part in filter(None, AS_BYTES.split(word)[::2]):
            for start in range(0, len(part), MAX_WORD):
                shown[show(part[start : start + MAX_WORD])] += count
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


def learn(texts: list[str], vocab_size: int) -> bytes:
    """Learn a vocabulary.

    Args:
        texts: What to learn from; the same texts give the same bytes.
        vocab_size: Number of pieces, at least ``SMALLEST``.

    Returns:
        A serialized SentencePiece model.

    Raises:
        ConfigError: The texts do not have so many pieces; the message names how many.
        DataError: There is no text.
    """
    counts = _count_words(texts)
    if not counts:
        raise DataError("tokenizer: got no text to train on, expected some; fix the sources")
    # Characters take half of what is left at most, so that a large script leaves room for pieces;
    # or all of it, where the text does not have that many pieces.
    left = vocab_size - SMALLEST + 1
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
    raise DataError(
        f"tokenizer: got an error of SentencePiece ({reason}), expected a model; fix with more "
        "text or another vocab_size"
    )


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
