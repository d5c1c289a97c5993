"""Rows that go on where they stopped, for training with a carried state.

In an epoch the documents stand one after another in a seeded order, and this line of tokens is cut
into as many parts of equal length as a batch has rows. Row r of step j is the j-th piece of part r:
each token is read once an epoch, and a document goes on in the same row of the next step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gla.data.loader import read_window
from gla.data.shards import TokenDataset
from gla.errors import DataError


class StreamBatch(NamedTuple):
    """Rows packed into one, with what is needed to carry their states.

    Attributes:
        tokens: int64 [1, T].
        targets: int64 [1, T], the next token of the document, or -100 after its last.
        cu_seqlens: int32 [N + 1], where each of N windows begins and ends; a window lies within a
            row and within a document (or is a row, where documents are not isolated).
        goes_on: int64 [rows], the window that continues what the row read in the step before, or
            -1 where the row begins with a new document.
        last: int64 [rows], the last window of each row.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    goes_on: Tensor
    last: Tensor


class Streams:
    """Reads batches whose rows go on from step to step.

    Attributes:
        dataset: Where the tokens are.
        steps: Steps of an epoch.
    """

    def __init__(
        self, dataset: TokenDataset, seq_len: int, rows: int, seed: int = 0, isolate: bool = True
    ) -> None:
        """Plan the steps.

        Args:
            dataset: Where the tokens are.
            seq_len: Tokens of a row (the last step of an epoch has fewer, or one more).
            rows: Rows of a whole batch.
            seed: Decides the order of the documents in each epoch.
            isolate: False: documents of a row see each other, and state is never reset within an
                epoch.

        Raises:
            DataError: There is less than one token a row.
        """
        if dataset.num_tokens < rows:
            raise DataError(
                f"{dataset.path}: got {dataset.num_tokens} tokens, expected {rows * seq_len} or "
                f"more for a batch of {rows} rows; fix by adding text or lowering the batch size"
            )
        self.dataset = dataset
        self.steps = -(-(dataset.num_tokens // rows) // seq_len)
        self._seq_len, self._rows = seq_len, rows
        self._seed, self._isolate = seed, isolate
        self._epoch = -1
        self._order = self._line = np.empty(0, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the data set again, and plans the same steps."""
        arguments = (self._seq_len, self._rows, self._seed, self._isolate)
        return _reopen, (self.dataset.path, *arguments)

    def batch(self, step: int, first: int, rows: int) -> StreamBatch:
        """Return rows ``first`` to before ``first + rows`` of a step.

        Raises:
            DataError: A stored id is not below the vocabulary's size.
        """
        epoch, nth = divmod(step, self.steps)
        self._enter(epoch)
        tokens, targets, lengths, goes_on, last = [], [], [], [], []
        for row in range(first, first + rows):
            windows = list(self._windows(row, nth))
            begins = windows[0][3]
            goes_on.append(-1 if nth == 0 or (begins and self._isolate) else len(lengths))
            for start, length, ends, _ in windows:
                ids, next_ids = read_window(self.dataset, start, length, ends)
                tokens.append(ids)
                targets.append(next_ids)
            sizes = [length for _, length, _, _ in windows]
            lengths += sizes if self._isolate else [sum(sizes)]
            last.append(len(lengths) - 1)
        return StreamBatch(
            torch.from_numpy(np.concatenate(tokens)[None]),
            torch.from_numpy(np.concatenate(targets)[None]),
            torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            torch.tensor(goes_on),
            torch.tensor(last),
        )

    def _enter(self, epoch: int) -> None:
        """Lay out an epoch's line of tokens, which takes time with the number of documents."""
        if epoch == self._epoch:
            return
        lengths = np.diff(self.dataset.document_starts)
        self._order = np.random.default_rng([self._seed, epoch]).permutation(len(lengths))
        self._line = np.cumsum(np.concatenate([[0], lengths[self._order]]))
        self._epoch = epoch

    def _windows(self, row: int, nth: int) -> Any:
        """Yield (start in the data set, length, ends a document, begins one) in a row's piece."""
        total = self.dataset.num_tokens
        begin, end = (total * r // self._rows for r in (row, row + 1))
        at = begin + nth * self._seq_len
        stop = end if nth == self.steps - 1 else at + self._seq_len
        place = int(np.searchsorted(self._line, at, side="right")) - 1
        while at < stop:
            document_end = int(self._line[place + 1])
            length = min(document_end, stop) - at
            offset = at - int(self._line[place])
            if length:  # a document without tokens is nowhere
                start = int(self.dataset.document_starts[self._order[place]]) + offset
                yield start, length, at + length == document_end, offset == 0
            at += length
            place += 1


def _reopen(path: Path, seq_len: int, rows: int, seed: int, isolate: bool) -> Streams:
    dataset = TokenDataset.open(path, verify=False)  # the process that sent us here has
    return Streams(dataset, seq_len, rows, seed, isolate)
