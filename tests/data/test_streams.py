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
    if dataset.num_tokens < rows:
        return
    streams = Streams(dataset, seq_len, rows, seed=3)
    after = {token: token + 1 for doc in numbered(lengths) for token in doc[:-1]}
    orders = []
    for epoch in range(2):
        seen: list[list[int]] = [[] for _ in range(rows)]
        for step in range(streams.steps):
            at = epoch * streams.steps + step
            batch = streams.batch(at, 0, rows)
            assert batch.tokens.shape == batch.targets.shape == (1, int(batch.cu_seqlens[-1]))
            begin = 0
            for row in range(rows):
                last = int(batch.last[row])
                stop = int(batch.cu_seqlens[last + 1])
                tokens = batch.tokens[0, begin:stop].tolist()
                assert 1 <= len(tokens) <= seq_len + 1
                goes_on = int(batch.goes_on[row])
                mid_document = tokens[0] % 100 != 0
                assert (goes_on >= 0) == (step > 0 and mid_document)
                if goes_on >= 0:
                    assert int(batch.cu_seqlens[goes_on]) == begin
                    assert after[seen[row][-1]] == tokens[0]
                for token, target in zip(
                    tokens, batch.targets[0, begin:stop].tolist(), strict=True
                ):
                    assert target == after.get(token, IGNORE)
                seen[row] += tokens
                begin = stop
        flat = [token for row in seen for token in row]
        assert sorted(flat) == sorted(token for doc in numbered(lengths) for token in doc)
        orders.append(flat)
    assert orders[0] != orders[1] or len(lengths) < 6
    again = Streams(dataset, seq_len, rows, seed=3)
    middle = streams.steps + streams.steps // 2
    for one, two in zip(again.batch(middle, 0, rows), streams.batch(middle, 0, rows), strict=True):
        assert torch.equal(one, two)  # entered anywhere


def test_rows_of_a_batch_are_those_of_the_whole_batch(make_split: Split) -> None:
    streams = Streams(make_split(numbered([30, 7, 22, 15]), vocab_size=3000), 5, 4)
    for step in range(2 * streams.steps):
        whole = streams.batch(step, 0, 4).tokens[0].tolist()
        parts = [streams.batch(step, first, 2).tokens[0].tolist() for first in (0, 2)]
        assert parts[0] + parts[1] == whole


def test_without_isolation_a_row_is_one_window_that_always_goes_on(make_split: Split) -> None:
    streams = Streams(make_split(numbered([3, 4, 5, 6]), vocab_size=3000), 5, 2, isolate=False)
    for step in range(streams.steps):
        batch = streams.batch(step, 0, 2)
        assert len(batch.cu_seqlens) == 3
        assert batch.goes_on.tolist() == ([-1, -1] if step == 0 else [0, 1])


def test_fewer_tokens_than_rows(make_split: Split) -> None:
    with pytest.raises(DataError, match="got 3 tokens, expected 40 or more"):
        Streams(make_split([[1, 2, 3]]), 10, 4)
