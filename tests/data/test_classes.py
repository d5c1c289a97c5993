"""Classes from folders, chunks of documents, and masked tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from gla.data.chunks import ChunkLoader, class_of, find_classes
from gla.data.loader import IGNORE, Loader
from gla.data.masking import MaskedLoader
from gla.data.prepare import goes_to_validation, prepare
from gla.data.shards import NAMES_FILE, SplitWriter, TokenDataset, text_digest
from gla.data.tokenizer import Tokenizer
from gla.errors import DataError
from gla.storage import write_folder

FILES = {
    **{f"red/{i}.txt": f"red {i} " * (10 + 7 * i) for i in range(12)},
    **{f"green/deep/{i}.txt": f"green {i} " * 30 for i in range(9)},
    "blue/one.txt": "blue " * 50,
    "top.txt": "top " * 50,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classes")
    for name, text in FILES.items():
        path = root / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Tokenizer.train(root / "texts", 270, root / "tokenizer")
    prepare(root / "texts", root / "tokenizer", root / "data", val_fraction=0.3)
    return root / "data"


@pytest.fixture(scope="module")
def train(folder: Path) -> TokenDataset:
    return TokenDataset.open(folder / "train")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder / "tokenizer")


def test_names_are_kept_in_the_order_of_the_documents(folder, tokenizer):
    seen = {}
    for split in ("train", "val"):
        data = TokenDataset.open(folder / split)
        starts = data.document_starts
        for n, name in enumerate(data.document_names):
            text = tokenizer.decode(data.tokens(int(starts[n]), int(starts[n + 1])))
            seen[name] = (split, text)
    assert {name: text for name, (_, text) in seen.items()} == FILES
    moved = [n for n, (s, _) in seen.items() if (s == "val") != goes_to_validation(n, 0.3)]
    assert len(moved) <= 1  # the one held back so that no split is empty


def test_names_go_on_where_a_writer_was_saved(tmp_path):
    """As a killed preparation does: what came after the record is cut off."""

    def add(writer: SplitWriter, name: str) -> None:
        writer.add(np.array([1, 5, 2]), 3, text_digest(name.encode()), name)

    def fill(folder: Path) -> None:
        writer = SplitWriter(folder, 10, "0" * 64)
        for name in ("a", "Größe\n2"):
            add(writer, name)
        saved = writer.save()
        add(writer, "lost")
        writer.save()
        again = SplitWriter(folder, 10, "0" * 64, saved=saved)
        add(again, "b")
        again.close()

    write_folder(tmp_path / "split", fill)
    assert TokenDataset.open(tmp_path / "split").document_names == ["a", "Größe\n2", "b"]


def test_data_without_names_say_so(folder, train, tmp_path):
    copy = TokenDataset.open(folder / "train")
    copy.path = tmp_path
    with pytest.raises(DataError, match=rf"{NAMES_FILE}: got 0 names, expected \d+, one a docu"):
        _ = copy.document_names


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("stdlib/json/decoder.py", "json"),
        ("stdlib/ast.py", None),
        ("sports/cups/a.txt", "sports"),
        ("a.txt", None),
    ],
)
def test_the_class_is_the_first_folder(name, wanted):
    assert class_of(name) == wanted


def test_classes_need_documents_enough(train):
    assert find_classes(train, 2) == ["green", "red"]
    with pytest.raises(DataError, match="got 1 folders of 2 documents or more"):
        find_classes(train, 2, exclude=["red"])


@pytest.mark.parametrize("seq_len", [1, 16, 50, 1000])
def test_chunks_cover_each_document_of_a_class_evenly(train, seq_len):
    loader = ChunkLoader(train, ["red", "green"], seq_len, shuffle=False)
    found = {"red": [], "green": []}
    for i in range(loader.num_samples):
        batch = loader.batch(i, 1)
        assert batch.cu_seqlens.tolist() == [0, batch.tokens.shape[1]]
        assert batch.tokens.shape[1] <= seq_len
        found[["red", "green"][int(batch.labels)]].append(batch.tokens[0])
    starts = train.document_starts
    for name, chunks in found.items():
        documents = [
            train.tokens(int(starts[n]), int(starts[n + 1])).astype(np.int64)
            for n, title in enumerate(train.document_names)
            if title.startswith(f"{name}/")
        ]
        assert torch.cat(chunks).tolist() == np.concatenate(documents).tolist()
        assert len(chunks) == sum(-(-len(d) // seq_len) for d in documents)
        if seq_len == 16:
            assert min(map(len, chunks)) >= 8


def test_chunks_are_shuffled_by_the_seed_and_every_one_comes_once_an_epoch(train):
    loader = ChunkLoader(train, ["red", "green"], 16, seed=1)
    n = loader.num_samples

    def epoch(number: int, loader: ChunkLoader = loader) -> list[tuple[int, ...]]:
        return [tuple(loader.batch(number * n + i, 1).tokens[0].tolist()) for i in range(n)]

    assert Counter(epoch(0)) == Counter(epoch(1))
    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, ChunkLoader(train, ["red", "green"], 16, seed=2))
    batch = loader.batch(n - 2, 4)  # into the next epoch
    rows = batch.tokens[0].split(batch.cu_seqlens.diff().tolist())
    assert [tuple(r.tolist()) for r in rows] == epoch(0)[-2:] + epoch(1)[:2]


def test_no_document_of_the_classes(train):
    with pytest.raises(DataError, match="got no document of grey"):
        ChunkLoader(train, ["grey"], 16)
    with pytest.raises(DataError, match=r"got \d+ chunks, expected 1000 or more"):
        ChunkLoader(train, ["red"], 16).require(1000)


@pytest.fixture(scope="module")
def masked(train, tokenizer):
    is_text = tokenizer.piece_bytes > 0
    return MaskedLoader(train, 64, seed=5, mask_id=tokenizer.unk_id, is_text=is_text, fraction=0.3)


def test_masks_have_their_shares_and_spare_control_tokens(train, tokenizer, masked):
    plain = Loader(train, 64, seed=5)
    counts = Counter()
    for epoch in range(8):
        first = epoch * masked.num_samples
        a, b = plain.batch(first, masked.num_samples), masked.batch(first, masked.num_samples)
        assert torch.equal(a.cu_seqlens, b.cu_seqlens)
        asked = b.targets != IGNORE
        assert torch.equal(b.targets[asked], a.tokens[asked])
        assert torch.equal(b.tokens[~asked], a.tokens[~asked])
        text = a.tokens > tokenizer.eos_id
        assert not asked[~text].any()
        counts["text"] += int(text.sum())
        counts["asked"] += int(asked.sum())
        hidden = b.tokens[asked] == tokenizer.unk_id
        counts["hidden"] += int(hidden.sum())
        counts["kept"] += int((b.tokens[asked] == a.tokens[asked]).sum())
        assert int(b.tokens[asked][~hidden].min()) > tokenizer.eos_id
    n = counts["asked"]
    assert abs(n / counts["text"] - 0.3) < 0.02
    assert abs(counts["hidden"] / n - 0.8) < 0.02
    assert abs(counts["kept"] / n - 0.1) < 0.02
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)


def test_what_is_asked_depends_on_the_position_alone(train, masked):
    whole = masked.batch(3, 4)
    parts = [masked.batch(3 + i, 1) for i in range(4)]
    assert torch.equal(whole.tokens, torch.cat([p.tokens for p in parts], 1))
    assert torch.equal(whole.targets, torch.cat([p.targets for p in parts], 1))
    # The same row in the next epoch, at another position: other tokens are asked for.
    plain, n = Loader(train, 64, seed=5), masked.num_samples
    place = {tuple(plain.batch(n + i, 1).tokens[0].tolist()): n + i for i in range(n)}
    others = [place[tuple(plain.batch(3 + i, 1).tokens[0].tolist())] for i in range(4)]
    assert others != [n + 3, n + 4, n + 5, n + 6]
    for part, other in zip(parts, others, strict=True):
        again = masked.batch(other, 1).targets
        assert again.shape == part.targets.shape and len(again[0]) > 20
        assert not torch.equal(again != IGNORE, part.targets != IGNORE)


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    def fill(folder: Path) -> None:
        writer = SplitWriter(folder, 100, "0" * 64)
        writer.add(np.array([1, 99, 2]), 3, b"a" * 16, "x/1.txt")
        writer.add(np.array([1, 5, 100, 2]), 3, b"b" * 16, "y/1.txt")
        writer.close()

    write_folder(tmp_path / "train", fill)
    dataset = TokenDataset.open(tmp_path / "train")
    loader = ChunkLoader(dataset, ["x", "y"], 4, shuffle=False)
    assert loader.batch(0, 1).tokens.max() == 99
    with pytest.raises(DataError, match="got id 100 at token 5, expected ids below 100"):
        loader.batch(0, 2)
    assert dataset.tokens().max() == 100  # what is stored may be looked at
