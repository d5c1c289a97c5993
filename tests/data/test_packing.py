"""Packing: every token in one window, windows where they fit best."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gla.data.packing import Packing, pack


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def rows_of(packing: Packing) -> list[list[int]]:
    """The lengths of the windows of each row."""
    bounds = packing.row_offsets
    return [packing.lengths[a:b].tolist() for a, b in pairwise(bounds)]


def best_fit_decreasing(lengths: list[int], seq_len: int) -> int:
    """Return the number of rows of the textbook algorithm, one window at a time."""
    windows = []
    for length in lengths:
        windows += [seq_len] * (length // seq_len) + [length % seq_len] * (length % seq_len > 0)
    rooms: list[int] = []
    for window in sorted(windows, reverse=True):
        fits = [i for i, room in enumerate(rooms) if room >= window]
        if fits:
            rooms[min(fits, key=lambda i: rooms[i])] -= window
        else:
            rooms.append(seq_len - window)
    return len(rooms)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(1, 40))
def test_nothing_is_lost_and_rows_are_as_few(lengths: list[int], seq_len: int) -> None:
    packing = pack(starts_of(lengths), seq_len)
    covered = np.concatenate(
        [np.arange(a, a + n) for a, n in zip(packing.starts, packing.lengths, strict=True)]
    )
    assert sorted(covered) == list(range(sum(lengths)))
    rows = rows_of(packing)
    assert all(0 < sum(row) <= seq_len for row in rows)
    assert packing.num_rows == len(rows) == best_fit_decreasing(lengths, seq_len)
    assert packing.waste == pytest.approx(1 - sum(lengths) / (len(rows) * seq_len))


@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(1, 40))
def test_windows_keep_to_their_document(lengths: list[int], seq_len: int) -> None:
    starts = starts_of(lengths)
    packing = pack(starts, seq_len)
    stops = packing.starts + packing.lengths
    document = np.searchsorted(starts, packing.starts, side="right") - 1
    assert (stops <= starts[document + 1]).all()
    assert (packing.ends_document == (stops == starts[document + 1])).all()
    assert ((packing.starts - starts[document]) % seq_len == 0).all()  # cut from its start on
    first = packing.starts[packing.row_offsets[:-1]]
    assert (np.diff(first) > 0).all()


def test_known_rows() -> None:
    assert rows_of(pack(starts_of([25]), 10)) == [[10], [10], [5]]
    assert rows_of(pack(starts_of([6, 4, 7, 3]), 10)) == [[6, 4], [7, 3]]
    assert rows_of(pack(starts_of([1, 1, 1]), 3)) == [[1, 1, 1]]
    assert rows_of(pack(starts_of([5, 5, 5]), 1)) == [[1]] * 15


def test_a_large_data_set_is_planned_fast() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 300, 200_000)
    packing = pack(np.append(0, np.cumsum(lengths)), 1024)
    assert packing.lengths.sum() == lengths.sum()
    assert packing.waste < 0.001
