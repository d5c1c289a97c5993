"""Rows that go on where they stopped, for training with a carried state.

In an epoch the documents stand one after another in a seeded order, and this line of tokens is cut
into as many parts of equal length (or one token more) as a batch has rows. Row r reads part r of
epoch 0, then part r of epoch 1, and so on, ``seq_len`` tokens a step: each token is read once an
epoch, a document goes on in the same row of the next step, and all steps have the same number of
tokens, so that each token weighs the same in an update. Where an epoch ends within a row, the row
begins its next part with a fresh state.
"""

from __future__ import annotations

from collections.abc import Iterator
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
            row and within a document (or an epoch, where documents are not isolated).
        goes_on: int64 [rows], the window that continues what the row read in the step before, or
            -1 where the row begins with a new document or a new epoch.
        last: int64 [rows], the last window of each row.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    goes_on: Tensor
    last: Tensor


class Window(NamedTuple):
    """A piece of a row.

    Attributes:
        start: Its first token in the data set.
        length: Its tokens.
        ends: Whether its last token is the last of a document.
        afresh: Whether nothing that the row has read before belongs to it.
    """

    start: int
    length: int
    ends: bool
    afresh: bool


class Streams:
    """Reads batches whose rows go on from step to step.

    Attributes:
        dataset: Where the tokens are.
    """

    def __init__(
        self, dataset: TokenDataset, seq_len: int, rows: int, seed: int = 0, isolate: bool = True
    ) -> None:
        """Plan the rows.

        Args:
            dataset: Where the tokens are.
            seq_len: Tokens of a row.
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
        self._seq_len, self._rows = seq_len, rows
        self._seed, self._isolate = seed, isolate
        self._lines: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the data set again, and plans the same rows."""
        arguments = (self._seq_len, self._rows, self._seed, self._isolate)
        return _reopen, (self.dataset.path, *arguments)

    def batch(self, step: int, first: int, rows: int) -> StreamBatch:
        """Return rows ``first`` to before ``first + rows`` of a step.

        Raises:
            DataError: A stored id is not below the vocabulary's size.
        """
        tokens, targets, lengths, goes_on, last = [], [], [], [], []
        for row in range(first, first + rows):
            for nth, (start, length, ends, afresh) in enumerate(self._windows(row, step)):
                ids, next_ids = read_window(self.dataset, start, length, ends)
                tokens.append(ids)
                targets.append(next_ids)
                if nth == 0:
                    goes_on.append(-1 if afresh else len(lengths))
                if nth == 0 or afresh:
                    lengths.append(length)
                else:
                    lengths[-1] += length
            last.append(len(lengths) - 1)
        return StreamBatch(
            torch.from_numpy(np.concatenate(tokens)[None]),
            torch.from_numpy(np.concatenate(targets)[None]),
            torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            torch.tensor(goes_on),
            torch.tensor(last),
        )

    def _line(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Lay out an epoch's line of tokens, which takes time with the number of documents.

        Returns:
            The order of the documents [D], and where each begins in the line and the last one ends
            [D + 1]: int64.
        """
        if epoch not in self._lines:
            lengths = np.diff(self.dataset.document_starts)
            order = np.random.default_rng([self._seed, epoch]).permutation(len(lengths))
            kept = sorted(self._lines)[-1:]  # while some rows end an epoch, others begin the next
            self._lines = {nth: self._lines[nth] for nth in kept}
            self._lines[epoch] = order, np.cumsum(np.concatenate([[0], lengths[order]]))
        return self._lines[epoch]

    def _windows(self, row: int, step: int) -> Iterator[Window]:
        """Yield what a row reads in a step."""
        total = self.dataset.num_tokens
        begin, end = (total * r // self._rows for r in (row, row + 1))
        at, missing = step * self._seq_len, self._seq_len  # tokens that the row has read, and wants
        while missing:
            epoch, read = divmod(at, end - begin)
            stop = begin + min(read + missing, end - begin)
            yield from self._part(epoch, begin, begin + read, stop)
            at += stop - begin - read
            missing -= stop - begin - read

    def _part(self, epoch: int, begin: int, at: int, stop: int) -> Iterator[Window]:
        """Yield what stands from ``at`` to before ``stop`` in an epoch's line.

        Args:
            epoch: Which line.
            begin: Where the row's part begins.
            at, stop: Places in the line.
        """
        order, line = self._line(epoch)
        starts = self.dataset.document_starts
        place = int(np.searchsorted(line, at, side="right")) - 1
        while at < stop:
            document_end = int(line[place + 1])
            length = min(document_end, stop) - at
            offset = at - int(line[place])
            if length:  # a document without tokens is nowhere
                start = int(starts[order[place]]) + offset
                afresh = at == begin or (self._isolate and offset == 0)
                yield Window(start, length, at + length == document_end, afresh)
            at += length
            place += 1


def _reopen(path: Path, seq_len: int, rows: int, seed: int, isolate: bool) -> Streams:
    dataset = TokenDataset.open(path, verify=False)  # the process that sent us here has
    return Streams(dataset, seq_len, rows, seed, isolate)
