"""Rows that go on where they stopped: each token once an epoch, documents in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gla.data.loader import IGNORE
from gla.data.shards import TokenDataset
from gla.data.streams import Streams
from gla.errors import DataError

Split = Callable[..., TokenDataset]


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents whose tokens are all different: 100 a document, and their place."""
    return [[100 * (i + 1) + j for j in range(length)] for i, length in enumerate(lengths)]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_each_token_is_read_once_an_epoch_and_rows_go_on(
    make_split: Split, lengths: list[int], seq_len: int, rows: int
) -> None:
    dataset = make_split(numbered(lengths), vocab_size=3000)
    total = dataset.num_tokens
    if total < rows:
        return
    streams = Streams(dataset, seq_len, rows, seed=3)
    after = {token: token + 1 for doc in numbered(lengths) for token in doc[:-1]}
    parts = [total * (r + 1) // rows - total * r // rows for r in range(rows)]
    seen: list[list[int]] = [[] for _ in range(rows)]
    steps = -(-2 * max(parts) // seq_len)
    for step in range(steps):
        batch = streams.batch(step, 0, rows)
        # Every step has the same number of tokens: each weighs the same in an update.
        assert batch.tokens.shape == batch.targets.shape == (1, rows * seq_len)
        ends = batch.cu_seqlens.tolist()
        begins = set()
        for row in range(rows):
            tokens = batch.tokens[0, row * seq_len : (row + 1) * seq_len].tolist()
            targets = batch.targets[0, row * seq_len : (row + 1) * seq_len].tolist()
            assert ends[int(batch.last[row]) + 1] == (row + 1) * seq_len
            assert targets == [after.get(token, IGNORE) for token in tokens]
            begins.add(row * seq_len)
            for place, token in enumerate(tokens):
                if token % 100 == 0 or len(seen[row]) % parts[row] == 0:
                    fresh = True
                    begins.add(row * seq_len + place)
                else:
                    fresh = False
                    assert after[seen[row][-1]] == token
                if place == 0:
                    assert (int(batch.goes_on[row]) >= 0) == (not fresh)
                    assert fresh or ends[int(batch.goes_on[row])] == row * seq_len
                seen[row].append(token)
        assert set(ends[:-1]) == begins
    whole = sorted(token for doc in numbered(lengths) for token in doc)
    orders = []
    for epoch in range(2):
        read = [row[epoch * n : (epoch + 1) * n] for row, n in zip(seen, parts, strict=True)]
        orders.append([token for row in read for token in row])
        assert sorted(orders[-1]) == whole
    assert orders[0] != orders[1] or len(lengths) < 6
    again = Streams(dataset, seq_len, rows, seed=3)
    middle = steps // 2
    for one, two in zip(again.batch(middle, 0, rows), streams.batch(middle, 0, rows), strict=True):
        assert torch.equal(one, two)  # entered anywhere


def test_rows_of_a_batch_are_those_of_the_whole_batch(make_split: Split) -> None:
    streams = Streams(make_split(numbered([30, 7, 22, 15]), vocab_size=3000), 5, 4)
    for step in range(8):
        whole = streams.batch(step, 0, 4).tokens[0].tolist()
        parts = [streams.batch(step, first, 2).tokens[0].tolist() for first in (0, 2)]
        assert parts[0] + parts[1] == whole


def test_without_isolation_a_row_is_one_window_an_epoch(make_split: Split) -> None:
    streams = Streams(make_split(numbered([3, 4, 5, 6]), vocab_size=3000), 5, 2, isolate=False)
    found = [streams.batch(step, 0, 2) for step in range(4)]  # rows of 9 tokens an epoch
    assert [batch.goes_on.tolist() for batch in found] == [[-1, -1], [0, 2], [0, 1], [0, 2]]
    assert [batch.cu_seqlens.tolist() for batch in found] == [
        [0, 5, 10],
        [0, 4, 5, 9, 10],
        [0, 5, 10],
        [0, 3, 5, 8, 10],
    ]
    assert [batch.last.tolist() for batch in found] == [[0, 1], [1, 3], [0, 1], [1, 3]]


def test_fewer_tokens_than_rows(make_split: Split) -> None:
    with pytest.raises(DataError, match="got 3 tokens, expected 40 or more"):
        Streams(make_split([[1, 2, 3]]), 10, 4)
