"""The loader: right targets, every token once an epoch, any position at once."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gla.data.loader import IGNORE, Loader, permuted
from gla.data.shards import SplitWriter, TokenDataset
from gla.errors import DataError
from gla.storage import write_folder

from .conftest import Split

# 23 documents of 1 to 60 different ids, so that an id says where it stands.
LENGTHS = [1, 2, 3, 60, 16, 17, 15, 33, 1, 1, 40, 2, 59, 8, 8, 8, 31, 5, 6, 7, 32, 48, 20]
STARTS = np.cumsum([0, *LENGTHS])
DOCUMENTS = [list(range(a, b)) for a, b in pairwise(STARTS)]
TOTAL = int(STARTS[-1])


def epoch(loader: Loader, number: int = 0) -> list[list[int]]:
    """The tokens of each sample of an epoch."""
    first = number * loader.num_samples
    return [
        loader.batch(position, 1).tokens[0].tolist()
        for position in range(first, first + loader.num_samples)
    ]


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 17, 60, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_token_is_read_once_an_epoch(make_split: Split, seq_len: int, shuffle: bool) -> None:
    loader = Loader(make_split(DOCUMENTS), seq_len, seed=3, shuffle=shuffle)
    for number in (0, 1):
        samples = epoch(loader, number)
        assert sorted(chain.from_iterable(samples)) == list(range(TOTAL))
        assert max(map(len, samples)) <= seq_len


@pytest.mark.parametrize("seq_len", [1, 2, 16, 1000])
@pytest.mark.parametrize("size", [1, 3, 50])
def test_targets_and_boundaries(make_split: Split, seq_len: int, size: int) -> None:
    """Against a loop over the ids: an id is its own position in the stream."""
    loader = Loader(make_split(DOCUMENTS), seq_len, seed=1)
    predicted: list[int] = []
    for position in range(0, loader.num_samples, size):
        count = min(size, loader.num_samples - position)
        batch = loader.batch(position, count)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.tokens.shape == batch.targets.shape == (1, batch.cu_seqlens[-1])
        lasts = set(STARTS[1:] - 1)
        for token, target in zip(batch.tokens[0].tolist(), batch.targets[0].tolist(), strict=True):
            assert target == (IGNORE if token in lasts else token + 1)
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0
        for a, b in pairwise(bounds):
            window = batch.tokens[0, a:b].tolist()
            assert 0 < len(window) <= seq_len
            assert window == list(range(window[0], window[0] + len(window)))
            assert not set(window[:-1]) & lasts  # within one document
            assert window[0] in STARTS or len(window) <= seq_len
        predicted += [t for t in batch.targets[0].tolist() if t != IGNORE]
    firsts = set(STARTS[:-1])
    assert sorted(predicted) == [t for t in range(TOTAL) if t not in firsts]


def test_a_batch_is_its_samples_one_after_another(make_split: Split) -> None:
    loader = Loader(make_split(DOCUMENTS), 16, seed=5)
    start = loader.num_samples - 3  # into the next epoch
    whole = loader.batch(start, 7)
    parts = [loader.batch(start + i, 1) for i in range(7)]
    assert torch.equal(whole.tokens, torch.cat([p.tokens for p in parts], 1))
    assert torch.equal(whole.targets, torch.cat([p.targets for p in parts], 1))
    ends = torch.cat([p.cu_seqlens.diff() for p in parts]).cumsum(0)
    assert torch.equal(whole.cu_seqlens[1:], ends.int())


def test_the_order_is_that_of_the_seed(make_split: Split) -> None:
    dataset = make_split(DOCUMENTS)
    orders = [epoch(Loader(dataset, 8, seed), number) for seed in (0, 1) for number in (0, 1)]
    assert len({str(order) for order in orders}) == 4
    assert epoch(Loader(dataset, 8, 0), 1) == orders[1]
    straight = epoch(Loader(dataset, 8, 0, shuffle=False))
    assert straight == epoch(Loader(dataset, 8, 7, shuffle=False), 1)
    assert [s[0] for s in straight] == sorted(s[0] for s in straight)


def test_too_few_tokens_for_a_batch(make_split: Split) -> None:
    loader = Loader(make_split([list(range(10))]), 16)
    loader.require(1)
    with pytest.raises(DataError, match=r"got 10 tokens .*expected about 128 or more"):
        loader.require(8)


def test_no_tokens_at_all(make_split: Split) -> None:
    with pytest.raises(DataError, match="got 0 tokens"):
        Loader(make_split([]), 16)


def test_an_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    """A shard from another tokenizer, in a folder whose manifest is right."""

    def fill(folder: Path) -> None:
        writer = SplitWriter(folder, 100, "0" * 64)
        writer.add(np.array([1, 99, 2]), 3, b"a" * 16)
        writer.add(np.array([1, 5, 100, 2]), 3, b"b" * 16)
        writer.close()

    write_folder(tmp_path / "train", fill)
    loader = Loader(TokenDataset.open(tmp_path / "train"), 4, shuffle=False)
    assert loader.batch(0, 1).tokens.max() == 99
    with pytest.raises(DataError, match="got id 100 at token 5, expected ids below 100"):
        loader.batch(1, 1)


# The permutation


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_permuted_is_a_permutation(size: int) -> None:
    for seed, number in ((0, 0), (0, 1), (2**63 - 1, 5)):
        assert sorted(permuted(i, size, seed, number) for i in range(size)) == list(range(size))


@given(st.integers(1, 2**40), st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.data())
def test_permuted_stays_in_range(size: int, seed: int, number: int, data: st.DataObject) -> None:
    a = data.draw(st.integers(0, size - 1))
    b = data.draw(st.integers(0, size - 1))
    assert 0 <= permuted(a, size, seed, number) < size
    assert (a == b) == (permuted(a, size, seed, number) == permuted(b, size, seed, number))


def test_permuted_looks_random() -> None:
    size = 5000
    order = np.array([permuted(i, size, 0, 0) for i in range(size)])
    again = np.array([permuted(i, size, 0, 1) for i in range(size)])
    straight = np.arange(size)
    for a, b in ((order, straight), (again, straight), (order, again)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06  # 4 standard deviations
        assert (a == b).sum() < 10  # 1 expected
    steps = np.diff(order)
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.06  # as for random numbers
