"""Batches of packed rows, in a seeded order, at any position.

A position is the number of samples (rows) since the start of training, whatever the number of
processes: epoch ``position // num_samples``, and in it the sample at ``position % num_samples`` of
that epoch's permutation. Nothing else is remembered, so resuming costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gla.data.packing import pack
from gla.data.shards import TokenDataset, check_disjoint
from gla.errors import DataError

__all__ = ["Batch", "Loader", "TokenDataset", "check_disjoint", "permuted"]

IGNORE = -100  # the target where the next token belongs to another document
_ROUNDS = 6
_MASK = (1 << 64) - 1


class Batch(NamedTuple):
    """Rows and documents packed into one row.

    Attributes:
        tokens: int64 [1, T].
        targets: int64 [1, T], the next token of the document, or -100 after its last.
        cu_seqlens: int32 [N + 1], from 0 to T: where each of N windows begins and ends. A window
            lies within a row and within a document (or is a row, where documents are not isolated).
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor


class Loader:
    """Reads batches from a data set.

    Attributes:
        dataset: Where the tokens are.
        seq_len: Most tokens of a sample.
        num_samples: Samples of an epoch: each token of the data set is in one.
        waste: Share of the num_samples * seq_len places that are empty.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        isolate: bool = True,
    ) -> None:
        """Plan the samples.

        Args:
            dataset: Where the tokens are.
            seq_len: Most tokens of a sample.
            seed: Decides the order of each epoch.
            shuffle: False: every epoch goes through the data set from front to back.
            isolate: False: a row is one window, in which documents see each other. No token is
                predicted from another document all the same.

        Raises:
            DataError: The data set is empty.
        """
        if dataset.num_tokens == 0:
            raise DataError(f"{dataset.path}: got 0 tokens, expected some; fix the sources")
        self.dataset = dataset
        self.seq_len = seq_len
        self._seed = seed
        self._shuffle = shuffle
        self._isolate = isolate
        self._packing = pack(dataset.document_starts, seq_len)
        self.num_samples = self._packing.num_rows
        self.waste = self._packing.waste

    def require(self, batch_size: int) -> None:
        """Make sure that an epoch fills a batch of ``batch_size`` samples.

        Raises:
            DataError: It does not; the message names the tokens needed.
        """
        if self.num_samples < batch_size:
            raise DataError(
                f"{self.dataset.path}: got {self.dataset.num_tokens} tokens ({self.num_samples} "
                f"samples of up to {self.seq_len}), expected about {batch_size * self.seq_len} or "
                f"more for one batch of {batch_size}; fix by adding text or lowering the batch "
                "size or seq_len"
            )

    def sample_at(self, position: int) -> int:
        """Return which sample is read at a position since the start of training."""
        epoch, index = divmod(position, self.num_samples)
        if not self._shuffle:
            return index
        return permuted(index, self.num_samples, self._seed, epoch)

    def batch(self, position: int, size: int) -> Batch:
        """Return the ``size`` samples from ``position`` on; they may reach into the next epoch.

        Raises:
            DataError: A stored id is not below the vocabulary's size.
        """
        packing = self._packing
        tokens, targets, lengths = [], [], []
        for sample in map(self.sample_at, range(position, position + size)):
            row = []
            for window in range(packing.row_offsets[sample], packing.row_offsets[sample + 1]):
                length = int(packing.lengths[window])
                ids, next_ids = read_window(
                    self.dataset,
                    int(packing.starts[window]),
                    length,
                    bool(packing.ends_document[window]),
                )
                tokens.append(ids)
                targets.append(next_ids)
                row.append(length)
            lengths += row if self._isolate else [sum(row)]
        return Batch(
            torch.from_numpy(np.concatenate(tokens)[None]),
            torch.from_numpy(np.concatenate(targets)[None]),
            torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the data set again, and plans the same samples."""
        arguments = (self.seq_len, self._seed, self._shuffle, self._isolate)
        return _reopen, (self.dataset.path, *arguments)


def _reopen(path: Path, seq_len: int, seed: int, shuffle: bool, isolate: bool) -> Loader:
    dataset = TokenDataset.open(path, verify=False)  # the process that sent us here has
    return Loader(dataset, seq_len, seed, shuffle, isolate)


def read_window(
    dataset: TokenDataset, start: int, length: int, ends: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a window and the ids that follow them: int64 [length] each.

    Args:
        dataset: Where the tokens are.
        start: The window's first token.
        length: Its tokens.
        ends: Whether its last token is the last of a document: then -100 follows it.

    Raises:
        DataError: A stored id is not below the vocabulary's size.
    """
    ids = dataset.ids(start, start + length + (not ends))
    if ends:
        return ids, np.append(ids[1:], IGNORE)
    return ids[:-1], ids[1:]


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Return where a permutation of 0 … size - 1 takes ``index``, in constant time and memory.

    A Feistel network over the smallest even number of bits that holds ``size`` is a permutation
    whatever its round function; it is applied again while the result is not below ``size``
    (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), fewer than
    four times on average.

    Args:
        index: 0 … size - 1.
        size: Number of samples.
        seed: Different seeds give unrelated permutations.
        epoch: So do different epochs.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    keys = _round_keys(seed, epoch)
    while True:
        left, right = index >> half, index & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        index = left << half | right
        if index < size:
            return index


def _round_keys(seed: int, epoch: int) -> list[int]:
    start = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    return [_mix(start + i) for i in range(1, _ROUNDS + 1)]


def _mix(x: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64, Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
