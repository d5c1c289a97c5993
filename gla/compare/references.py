"""References for a language model's bits per byte: unigram, bigram and xz on the same text.

The n-gram models see the same tokens and predict the same targets as the language model: every
token of a document after its first (the begin mark), the end mark included, given only what stands
before it in the same document. Both use absolute discounting (Ney, Essen & Kneser 1994): D is taken
from every count, and what this frees is shared out by a simpler distribution,

    unigram  p(w)     = max(c(w) − D, 0) / c  +  D · n / c · 1 / V
    bigram   p(w | u) = max(c(u,w) − D, 0) / c(u)  +  D · n(u) / c(u) · q(w)

where c counts, n is the number of different tokens counted, and q is the unigram formula on the
number of different tokens that w follows instead of c(w): interpolated Kneser–Ney (Kneser & Ney
1995). D is tuned on every tenth training document, with the counts of the others; the model then
counts all of them. Validation text plays no part in either.

Sizes: V vocabulary, P different pairs of neighbours.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gla.data.shards import TokenDataset
from gla.data.tokenizer import Tokenizer
from gla.errors import DataError

TOKENS_AT_ONCE = 1 << 22  # bounds the memory of counting
HELD_OUT = 10  # one training document in this many tunes the discount
XZ_BYTES = 64 << 20  # how far back ``xz -9e`` looks
DISCOUNTS = tuple(d / 20 for d in range(1, 20))


class PairCounts(NamedTuple):
    """How often each token follows each other one: all that a bigram model needs of a text.

    Attributes:
        codes: int64 [P] previous · V + next, ascending.
        counts: int64 [P].
        vocab_size: V.
    """

    codes: NDArray[np.int64]
    counts: NDArray[np.int64]
    vocab_size: int

    @property
    def previous(self) -> NDArray[np.int64]:
        """int64 [P]."""
        return self.codes // self.vocab_size

    @property
    def next(self) -> NDArray[np.int64]:
        """int64 [P]."""
        return self.codes % self.vocab_size

    @property
    def total(self) -> int:
        """The number of targets counted."""
        return int(self.counts.sum())


def merge(parts: list[PairCounts], vocab_size: int) -> PairCounts:
    """The counts of several texts together."""
    codes = np.concatenate([np.empty(0, np.int64), *(part.codes for part in parts)])
    counts = np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])
    merged, where = np.unique(codes, return_inverse=True)
    # fp64 weights are exact up to 2**53 targets.
    summed = np.bincount(where, weights=counts, minlength=len(merged))
    return PairCounts(merged, summed.astype(np.int64), vocab_size)


def count_pairs(documents: Iterable[NDArray], vocab_size: int) -> PairCounts:
    """Counts the targets of documents, each an array of token ids with its begin and end marks."""
    parts: list[PairCounts] = []
    batch: list[NDArray[np.int64]] = []
    waiting = 0
    for document in documents:
        ids = np.asarray(document, np.int64)
        batch.append(ids[:-1] * vocab_size + ids[1:])
        waiting += len(ids)
        if waiting >= TOKENS_AT_ONCE:
            parts.append(_count(batch, vocab_size))
            batch, waiting = [], 0
    return merge([*parts, _count(batch, vocab_size)], vocab_size)


def _count(batch: list[NDArray[np.int64]], vocab_size: int) -> PairCounts:
    codes, counts = np.unique(np.concatenate([np.empty(0, np.int64), *batch]), return_counts=True)
    return PairCounts(codes, counts, vocab_size)


class UnigramModel:
    """Tokens drawn one by one, whatever stands before them.

    Args:
        counts: the training counts.
        discount: D, 0 < D < 1.
    """

    name = "unigram"

    def __init__(self, counts: PairCounts, discount: float) -> None:
        self.discount = discount
        seen = np.bincount(counts.next, counts.counts, minlength=counts.vocab_size)
        self._probs = _discounted(seen, discount)

    def log_probs(self, pairs: PairCounts) -> NDArray[np.float64]:
        """ln p(next) of each pair, fp64 [P]."""
        return np.log(self._probs[pairs.next])


class BigramModel:
    """Interpolated Kneser–Ney on pairs of tokens.

    Args:
        counts: the training counts.
        discount: D of both levels, 0 < D < 1.
    """

    name = "bigram"

    def __init__(self, counts: PairCounts, discount: float) -> None:
        self.discount = discount
        self._counts = counts
        self._previous_total = np.bincount(
            counts.previous, counts.counts, minlength=counts.vocab_size
        )
        self._previous_kinds = np.bincount(counts.previous, minlength=counts.vocab_size)
        kinds_before = np.bincount(counts.next, minlength=counts.vocab_size)
        self._lower = _discounted(kinds_before, discount)

    def log_probs(self, pairs: PairCounts) -> NDArray[np.float64]:
        """ln p(next | previous) of each pair, fp64 [P]."""
        known = self._counts
        where = np.minimum(np.searchsorted(known.codes, pairs.codes), max(len(known.codes) - 1, 0))
        seen = np.zeros(len(pairs.codes))
        if len(known.codes):
            seen = np.where(known.codes[where] == pairs.codes, known.counts[where], 0)
        previous = pairs.previous
        # A previous token that training never saw leaves everything to the lower level.
        total = np.maximum(self._previous_total[previous], 1)
        new = self._previous_total[previous] == 0
        freed = np.where(new, 1.0, self.discount * self._previous_kinds[previous] / total)
        probs = np.maximum(seen - self.discount, 0) / total + freed * self._lower[pairs.next]
        return np.log(probs)


def _discounted(counts: NDArray, discount: float) -> NDArray[np.float64]:
    """Absolute discounting against the uniform distribution: fp64 [V] from counts [V]."""
    total = counts.sum()
    if total == 0:
        return np.full(len(counts), 1 / len(counts))
    freed = discount * np.count_nonzero(counts) / total
    return np.maximum(counts - discount, 0) / total + freed / len(counts)


def loss(model: UnigramModel | BigramModel, pairs: PairCounts) -> float:
    """Mean negative log-likelihood of the targets, in nats per token."""
    return float(-(pairs.counts * model.log_probs(pairs)).sum() / pairs.total)


def fit(
    kind: type[UnigramModel] | type[BigramModel], tuning: PairCounts, others: PairCounts
) -> UnigramModel | BigramModel:
    """Tunes the discount on one part of the training documents; counts both parts with it."""
    best = min(DISCOUNTS, key=lambda discount: loss(kind(others, discount), tuning))
    return kind(merge([tuning, others], tuning.vocab_size), best)


def xz_size(text: Iterable[bytes]) -> int:
    """Bytes that ``xz -9e`` makes of a text given in pieces."""
    compressor = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    return sum(len(compressor.compress(piece)) for piece in text) + len(compressor.flush())


def references(data: str | Path, xz_after_train: bool = False) -> dict[str, dict[str, float]]:
    """Measures every reference on the validation split of prepared data.

    Args:
        data: the folder, with its splits and tokenizer.
        xz_after_train: also give xz the training text first, its last 64 MiB: what the validation
            text adds to the size. (xz looks no farther back.) About a minute for each 20 MB of it,
            two cores and 1.4 GB of memory.

    Returns:
        A row for each of "unigram", "bigram", "xz -9e" and, if asked for, "xz -9e after train":
        ``bpb`` (bits per byte of the raw text) and ``bytes``; for the n-gram models also ``loss``
        (nats per token), ``ppl`` and ``tokens``, as ``gla eval`` gives them.

    Raises:
        DataError: the data are missing, damaged or without validation text.
    """
    data = Path(data)
    train, val = TokenDataset.open(data / "train"), TokenDataset.open(data / "val")
    if val.num_bytes == 0:
        raise DataError(f"{val.path}: got no text, expected some; fix by preparing more of it")
    vocab_size, size = val.vocab_size, val.num_bytes
    tuning = count_pairs(_documents(train, range(0, train.num_documents, HELD_OUT)), vocab_size)
    rest = (i for i in range(train.num_documents) if i % HELD_OUT)
    others = count_pairs(_documents(train, rest), vocab_size)
    targets = count_pairs(_documents(val, range(val.num_documents)), vocab_size)
    rows = {}
    for kind in (UnigramModel, BigramModel):
        nats = loss(fit(kind, tuning, others), targets)
        bits = nats * targets.total / math.log(2)
        rows[kind.name] = {
            "loss": nats,
            "ppl": math.exp(nats),
            "bpb": bits / size,
            "tokens": targets.total,
            "bytes": size,
        }
    tokenizer = Tokenizer.load(data / "tokenizer")
    rows["xz -9e"] = {"bpb": 8 * xz_size(_text(val, tokenizer)) / size, "bytes": size}
    if xz_after_train:
        first = first_of_last(train, XZ_BYTES)
        with ThreadPoolExecutor() as pool:  # xz lets go of Python's lock
            before = pool.submit(xz_size, _text(train, tokenizer, first))
            both = chain(_text(train, tokenizer, first), _text(val, tokenizer))
            added = xz_size(both) - before.result()
        rows["xz -9e after train"] = {"bpb": 8 * added / size, "bytes": size}
    return rows


def _documents(dataset: TokenDataset, which: Iterable[int]) -> Iterator[NDArray]:
    starts = dataset.document_starts
    return (dataset.tokens(starts[i], starts[i + 1]) for i in which)


def first_of_last(dataset: TokenDataset, size: int) -> int:
    """The first of the last documents that together hold at most ``size`` bytes of text."""
    behind = np.cumsum(dataset.document_bytes[::-1])
    return dataset.num_documents - int(np.searchsorted(behind, size, side="right"))


def _text(dataset: TokenDataset, tokenizer: Tokenizer, first: int = 0) -> Iterator[bytes]:
    """The raw text of the documents from the ``first`` on: the tokenizer loses nothing."""
    those = range(first, dataset.num_documents)
    return (tokenizer.decode_bytes(document) for document in _documents(dataset, those))
