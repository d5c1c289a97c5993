"""Token shards: what is written is read; any change is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gla.data.shards import TokenDataset
from gla.errors import DataError
from gla.storage import MANIFEST, write_folder

from .conftest import Split

DOCUMENTS = [list(range(i * 10, i * 10 + n)) for i, n in enumerate([1, 30, 2, 49, 60, 3, 50, 7])]


def test_tokens_across_shards(make_split: Split) -> None:
    dataset = make_split(DOCUMENTS, shard_tokens=50)
    stream = np.concatenate(DOCUMENTS)
    assert len(list(dataset.path.glob("tokens-*.bin"))) == 4
    for start in range(len(stream) + 1):
        for stop in {start, min(start + 1, len(stream)), min(start + 90, len(stream)), len(stream)}:
            assert dataset.tokens(start, stop).tolist() == stream[start:stop].tolist()
    assert dataset.tokens().tolist() == stream.tolist()
    assert dataset.document_starts.tolist() == np.cumsum([0, *map(len, DOCUMENTS)]).tolist()
    assert len({d.tobytes() for d in dataset.document_digests}) == len(DOCUMENTS)
    assert (dataset.num_tokens, dataset.num_documents) == (len(stream), len(DOCUMENTS))
    with pytest.raises(IndexError):
        dataset.tokens(0, len(stream) + 1)


@pytest.mark.parametrize(("vocab_size", "largest"), [(65_536, 65_535), (65_537, 65_536)])
def test_ids_never_wrap(make_split: Split, vocab_size: int, largest: int) -> None:
    dataset = make_split([[1, largest, 2]], vocab_size=vocab_size)
    assert dataset.tokens().tolist() == [1, largest, 2]
    assert dataset.tokens().dtype == ("<u2" if vocab_size <= 65_536 else "<u4")


def test_any_flipped_bit_is_noticed_at_open(make_split: Split) -> None:
    dataset = make_split(DOCUMENTS)
    rng = np.random.default_rng(0)
    for file in sorted(dataset.path.iterdir()):
        good = file.read_bytes()
        for at in rng.integers(len(good), size=20):
            bad = bytearray(good)
            bad[at] ^= 1 << rng.integers(8)
            file.write_bytes(bad)
            with pytest.raises(DataError) as caught:
                TokenDataset.open(dataset.path)
            assert str(caught.value).startswith(str(dataset.path))
        file.write_bytes(good)
    assert TokenDataset.open(dataset.path).fingerprint == dataset.fingerprint


@pytest.mark.parametrize("name", ["tokens-00001.bin", "documents.bin", "index.json", MANIFEST])
def test_a_cut_empty_or_missing_file_is_named(make_split: Split, name: str) -> None:
    file = make_split(DOCUMENTS).path / name
    good = file.read_bytes()
    for damage in (good[:-1], good[: len(good) // 2], b""):
        file.write_bytes(damage)
        with pytest.raises(DataError, match=name):
            TokenDataset.open(file.parent)
    file.unlink()
    with pytest.raises(DataError, match=name):
        TokenDataset.open(file.parent)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gla data prepare"):
        TokenDataset.open(tmp_path / "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "got format 2, expected 1"),
        ({"num_tokens": 5}, "do not add up"),
        ({"num_documents": 3}, "documents.bin: got 256 bytes"),
        ({"shard_tokens": [1, 1]}, "tokens-00000.bin: got"),
        ({"vocab_size": 100_000}, "tokens-00000.bin: got"),
        ({"vocab_size": "many"}, "cannot be read"),
        ({"extra": 1}, "cannot be read"),
    ],
)
def test_an_index_that_does_not_fit(
    make_split: Split, tmp_path: Path, change: dict, message: str
) -> None:
    """Even where someone has written a new manifest."""
    dataset = make_split(DOCUMENTS)

    def copy(folder: Path) -> None:
        for file in dataset.path.iterdir():
            if file.name != MANIFEST:
                (folder / file.name).write_bytes(file.read_bytes())
        index = json.loads((folder / "index.json").read_text())
        (folder / "index.json").write_text(json.dumps(index | change))

    write_folder(tmp_path / "changed", copy)
    with pytest.raises(DataError, match=message):
        TokenDataset.open(tmp_path / "changed")
