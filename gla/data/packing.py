"""Cut documents into windows and pack the windows into rows of at most ``seq_len`` tokens.

A document is cut into consecutive windows of ``seq_len`` tokens; what is left at its end goes
where it fits best: longest first, into the row with the least room that suffices (best-fit
decreasing, as in "Fewer Truncations Improve Language Modeling", arXiv 2404.10830). So no token is
lost or repeated, a document is cut only where it must be, and few places stay empty.

Legend: D documents, W windows, R rows. Positions count tokens from the start of the data set.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Which windows make which row.

    Attributes:
        starts: int64 [W], first token of each window, ordered by row.
        lengths: int64 [W], its tokens, 1 to ``seq_len``.
        ends_document: bool [W], whether its last token is the last of a document.
        row_offsets: int64 [R + 1]; row r is the windows from row_offsets[r] to row_offsets[r + 1].
        waste: Share of the R * seq_len places that stay empty.
    """

    starts: np.ndarray
    lengths: np.ndarray
    ends_document: np.ndarray
    row_offsets: np.ndarray
    waste: float

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1


def pack(document_starts: np.ndarray, seq_len: int) -> Packing:
    """Plan the rows of a data set.

    Args:
        document_starts: int64 [D + 1], first token of each document, then the number of tokens.
        seq_len: Most tokens of a row.

    Returns:
        A plan in which each token is in one window. Rows are ordered by their first token.
    """
    starts, lengths, ends = _windows(document_starts, seq_len)
    row = _best_fit(lengths, seq_len)
    order = np.lexsort((starts, row))
    row, starts, lengths, ends = row[order], starts[order], lengths[order], ends[order]
    offsets = np.flatnonzero(np.diff(row, prepend=-1, append=-1 if len(row) == 0 else row[-1] + 1))
    waste = 1 - lengths.sum() / (max(len(offsets) - 1, 1) * seq_len)
    return _by_first_token(Packing(starts, lengths, ends, offsets, float(waste)))


def _windows(document_starts: np.ndarray, seq_len: int) -> tuple[np.ndarray, ...]:
    """Cut each document; return starts, lengths and ends_document, all [W]."""
    tokens = np.diff(document_starts)
    counts = -(-tokens // seq_len)
    document = np.repeat(np.arange(len(tokens)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = document_starts[:-1][document] + nth * seq_len
    stops = document_starts[1:][document]
    lengths = np.minimum(stops - starts, seq_len)
    return starts, lengths, starts + lengths == stops


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the row of each window: int64 [W].

    Windows of one length are placed together, so the work grows with ``seq_len`` and the number
    of windows, not with their product.
    """
    row = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    bounds = np.searchsorted(-lengths[by_length], np.arange(-seq_len, 1))
    free: dict[int, list[np.ndarray]] = {}  # room -> rows that have it
    rooms: list[int] = []  # the keys of free, ascending
    num_rows = 0
    for length in range(seq_len, 0, -1):
        windows = by_length[bounds[seq_len - length] : bounds[seq_len - length + 1]]
        while len(windows):
            at = bisect.bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms.pop(at)
                rows = np.concatenate(free.pop(room))
            else:
                room = seq_len
                needed = -(-len(windows) // (seq_len // length))
                rows = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            each = room // length  # a row just used has less room: the best fit once more
            placed = min(len(windows), each * len(rows))
            row[windows[:placed]] = np.repeat(rows, each)[:placed]
            windows = windows[placed:]
            full, rest = divmod(placed, each)
            used = full + (rest > 0)
            _give_back(free, rooms, room - each * length, rows[:full])
            _give_back(free, rooms, room - rest * length, rows[full:used])
            _give_back(free, rooms, room, rows[used:])
    return row


def _give_back(
    free: dict[int, list[np.ndarray]], rooms: list[int], room: int, rows: np.ndarray
) -> None:
    if room == 0 or len(rows) == 0:
        return
    if room not in free:
        free[room] = []
        bisect.insort(rooms, room)
    free[room].append(rows)


def _by_first_token(packing: Packing) -> Packing:
    """Order the rows by the position of their first token, for reading that moves forward."""
    counts = np.diff(packing.row_offsets)
    order = np.argsort(packing.starts[packing.row_offsets[:-1]], kind="stable")
    offsets = np.concatenate([[0], np.cumsum(counts[order])])
    nth = np.arange(len(packing.starts)) - np.repeat(offsets[:-1], counts[order])
    take = np.repeat(packing.row_offsets[:-1][order], counts[order]) + nth
    return Packing(
        packing.starts[take],
        packing.lengths[take],
        packing.ends_document[take],
        offsets,
        packing.waste,
    )
