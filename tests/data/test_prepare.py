"""Prepared folders: complete, without loss or leak, whole or absent."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gla.data.corpus import Corpus
from gla.data.prepare import (
    Prepared,
    goes_to_validation,
    made_from,
    prepare,
    recorded,
    training_documents,
)
from gla.data.shards import TokenDataset, check_disjoint
from gla.data.tokenizer import Tokenizer
from gla.errors import ConfigError, DataError


def write_texts(folder: Path, count: int = 60) -> dict[str, str]:
    """Write files with different texts; return them by name."""
    texts = {f"f{i:02d}.txt": f"text {i}\n" * (i % 7 + 1) + "\t漢 end" for i in range(count)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return texts


def texts_of(split: Path, tokenizer: Tokenizer) -> list[str]:
    """Read the documents of a split back."""
    dataset = TokenDataset.open(split)
    texts = []
    for start, stop in pairwise(dataset.document_starts):
        tokens = dataset.tokens(start, stop)
        assert tokens[0] == tokenizer.bos_id and tokens[-1] == tokenizer.eos_id
        assert tokenizer.bos_id not in tokens[1:] and tokenizer.eos_id not in tokens[:-1]
        texts.append(tokenizer.decode(tokens))
    return texts


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_every_document_is_stored_once(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer
) -> None:
    texts = write_texts(tmp_path / "text")
    done = prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out", 0.2)
    train, val = (texts_of(tmp_path / "out" / name, tokenizer) for name in ("train", "val"))
    assert sorted(train + val) == sorted(texts.values())
    assert done.duplicates == done.skipped == 0
    assert (len(train), len(val)) == (done.train.num_documents, done.val.num_documents)
    expected = {text for name, text in texts.items() if goes_to_validation(name, 0.2)}
    assert 3 < len(expected) < 25
    assert set(val) == expected
    for name, split in (("train", done.train), ("val", done.val)):
        dataset = TokenDataset.open(tmp_path / "out" / name)
        assert dataset.num_tokens == split.num_tokens == len(dataset.tokens())
        assert dataset.num_documents == split.num_documents
        assert dataset.tokenizer_fingerprint == tokenizer.fingerprint
        assert dataset.vocab_size == tokenizer.vocab_size
        assert dataset.num_bytes == split.num_bytes == dataset.document_bytes.sum()
        assert dataset.num_bytes == tokenizer.piece_bytes[dataset.tokens()].sum()
    assert done.train.num_bytes + done.val.num_bytes == sum(len(t.encode()) for t in texts.values())
    check_disjoint(
        TokenDataset.open(tmp_path / "out/train"), TokenDataset.open(tmp_path / "out/val")
    )
    assert Tokenizer.load(tmp_path / "out/tokenizer").fingerprint == tokenizer.fingerprint


def test_the_result_is_the_same_anywhere_and_with_any_workers(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "a/text")
    shutil.copytree(tmp_path / "a/text", tmp_path / "b/other")
    monkeypatch.setattr("gla.data.encode._BATCH_CHARACTERS", 100)
    one = prepare(tmp_path / "a/text", tokenizer_dir, tmp_path / "out1")
    two = prepare(tmp_path / "b/other", tokenizer_dir, tmp_path / "out2", workers=2)
    assert one == two
    files = [files_of(tmp_path / name) for name in ("out1", "out2")]
    for found in files:  # but for what says where the sources stood
        del found["made_from.json"], found["manifest.json"]
    assert files[0] == files[1]
    fingerprints = [TokenDataset.open(tmp_path / o / "train").fingerprint for o in ("out1", "out2")]
    assert fingerprints[0] == fingerprints[1]


def test_the_fingerprint_follows_the_text(tmp_path: Path, tokenizer_dir: Path) -> None:
    texts = write_texts(tmp_path / "text")
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out1")
    name = next(name for name in texts if not goes_to_validation(name, 0.05))
    (tmp_path / "text" / name).write_text(texts[name].replace("text", "test"), encoding="utf-8")
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out2")
    one, two = (TokenDataset.open(tmp_path / o / "train") for o in ("out1", "out2"))
    assert one.fingerprint != two.fingerprint


def test_equal_texts_are_kept_once(tmp_path: Path, tokenizer_dir: Path) -> None:
    texts = write_texts(tmp_path / "text")
    write_texts(tmp_path / "text/again")
    done = prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out", 0.3)
    assert done.duplicates == len(texts)
    assert done.train.num_documents + done.val.num_documents == len(texts)


def test_a_document_in_both_splits_is_an_error(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text")
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out1", 0.2)
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out2", 0.4)
    train = TokenDataset.open(tmp_path / "out1/train")
    val = TokenDataset.open(tmp_path / "out2/val")
    with pytest.raises(DataError, match=r"got \d+ of \d+ documents") as caught:
        check_disjoint(train, val)
    assert str(val.path) in str(caught.value) and str(train.path) in str(caught.value)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_at_least_one_document_goes_to_each_split(
    tmp_path: Path, tokenizer_dir: Path, count: int
) -> None:
    write_texts(tmp_path / "text", count)
    done = prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out", 1e-9)
    assert (done.train.num_documents, done.val.num_documents) == (count - 1, 1)
    done = prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out2", 1 - 1e-9)
    assert (done.train.num_documents, done.val.num_documents) == (1, count - 1)


def test_a_single_document_is_cut_at_a_line_end(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer
) -> None:
    text = "".join(f"line number {i}\n" for i in range(1000))
    (tmp_path / "one.txt").write_text(text)
    prepare(tmp_path / "one.txt", tokenizer_dir, tmp_path / "out", 0.1)
    [train] = texts_of(tmp_path / "out/train", tokenizer)
    [val] = texts_of(tmp_path / "out/val", tokenizer)
    assert train + val == text
    assert train.endswith("\n")
    assert 0.09 < len(val) / len(text) < 0.11


@pytest.mark.parametrize("text", ["ab", "a\n", "\n\n", "no line end at all" * 9])
def test_a_single_document_of_few_lines(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer, text: str
) -> None:
    (tmp_path / "one.txt").write_text(text)
    prepare(tmp_path / "one.txt", tokenizer_dir, tmp_path / "out")
    parts = [texts_of(tmp_path / "out" / name, tokenizer) for name in ("train", "val")]
    assert "".join(parts[0] + parts[1]) == text
    assert all(parts[0]) and all(parts[1])


@pytest.mark.parametrize("count", [1, 2, 60])
def test_a_tokenizer_can_be_trained_without_the_validation_text(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer, count: int
) -> None:
    write_texts(tmp_path / "text", count)
    write_texts(tmp_path / "text/again", count)  # duplicates, under names of other splits
    documents = list(training_documents(tmp_path / "text", 0.3))
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out", 0.3)
    assert [d.text for d in documents] == texts_of(tmp_path / "out/train", tokenizer)


# Faults


def refused(match: str, out: Path, *arguments: object, **options: object) -> str:
    """Run a ``prepare`` that fails; nothing but a lock file may be left."""
    before = files_of(out.parent)
    with pytest.raises((DataError, ConfigError), match=match) as caught:
        prepare(*arguments, **options)  # type: ignore[arg-type]
    after = files_of(out.parent)
    assert after == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_is_left_of_a_failed_run(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text")
    (tmp_path / "text/z.txt").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "x.txt").write_text("x")
    out = tmp_path / "out"
    refused("z.txt: .*not UTF-8", out, tmp_path / "text", tokenizer_dir, out)
    refused("got no text", out, tmp_path / "empty.txt", tokenizer_dir, out)
    refused("expected text for two splits", out, tmp_path / "x.txt", tokenizer_dir, out)
    refused("got no file that matches", out, tmp_path / "no/*.txt", tokenizer_dir, out)
    refused("No such file", out, tmp_path / "x.txt", tmp_path / "no tokenizer", out)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        refused("val_fraction", out, tmp_path / "text", tokenizer_dir, out, fraction)
    refused("workers", out, tmp_path / "text", tokenizer_dir, out, workers=0)
    corpus = Corpus(tmp_path / "text", max_bad=1)
    done = prepare(corpus, tokenizer_dir, out)
    assert done.skipped == 1


def test_what_stands_there_is_left_alone(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text")
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    refused("holds something", out, tmp_path / "text", tokenizer_dir, out)
    assert files_of(out) == {"precious.txt": b"mine"}
    (out / "precious.txt").unlink()
    prepare(tmp_path / "text", tokenizer_dir, out)  # an empty folder is fine
    refused("holds something", out, tmp_path / "text", tokenizer_dir, out)


def test_progress_counts_documents_and_bytes(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "text")
    monkeypatch.setattr("gla.data.prepare._REPORT_BYTES", 300)
    seen: list[tuple[int, int]] = []
    done = prepare(
        tmp_path / "text",
        tokenizer_dir,
        tmp_path / "out",
        on_progress=lambda documents, size: seen.append((documents, size)),
    )
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (60, done.train.num_bytes + done.val.num_bytes)


DIE = """
import os, signal, sys
import gla.data.prepare as module

module._SAVE_BYTES = module._REPORT_BYTES = 1500

def die(documents, size):
    if documents >= int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

print(module.prepare(sys.argv[1], sys.argv[2], sys.argv[3], on_progress=die).resumed_bytes)
"""


def prepare_and_die(tmp_path: Path, tokenizer_dir: Path, after: int) -> subprocess.CompletedProcess:
    """Prepare in a process that kills itself after so many documents."""
    arguments = [tmp_path / "text", tokenizer_dir, tmp_path / "out", str(after)]
    return subprocess.run(
        [sys.executable, "-c", DIE, *arguments],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("changed", [False, True])
def test_a_killed_prepare_goes_on_where_it_was(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    texts = write_texts(tmp_path / "text", 300)
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "whole")
    for after in (60, 150, 280):  # each goes on from the one before
        assert prepare_and_die(tmp_path, tokenizer_dir, after).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    encoded: list[str] = []
    if changed:  # a text that was written already is another one now
        first = next(iter(texts))
        (tmp_path / "text" / first).write_text("something else")
    else:
        original = Tokenizer.encode
        monkeypatch.setattr(
            Tokenizer, "encode", lambda self, text: encoded.append(text) or original(self, text)
        )
    done = prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out")
    if changed:
        shutil.rmtree(tmp_path / "whole")
        prepare(tmp_path / "text", tokenizer_dir, tmp_path / "whole")
    else:
        assert done.resumed_bytes > 5000 and len(encoded) < 100
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_weighted_mixture_with_duplicates_goes_on_where_it_was(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gla.data.prepare._SAVE_BYTES", 1500)
    monkeypatch.setattr("gla.data.prepare._REPORT_BYTES", 1500)
    for source, copies in (("a", 4), ("b", 1)):
        rows = [f"{source}{i:03} " * 10 for i in range(120) for _ in range(copies)]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (tmp_path / f"{source}.jsonl").write_text(lines)
    corpus = Corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], weights=[3, 1])

    def interrupt(documents: int, size: int) -> None:
        if documents > 80:
            raise KeyboardInterrupt

    whole = prepare(corpus, tokenizer_dir, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tokenizer_dir, tmp_path / "out", on_progress=interrupt)
    done = prepare(corpus, tokenizer_dir, tmp_path / "out")
    assert done.resumed_bytes > 1500
    assert done == whole._replace(resumed_bytes=done.resumed_bytes)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    names = [
        n for s in ("train", "val") for n in TokenDataset.open(tmp_path / "out" / s).document_names
    ]
    assert [sum(n.startswith(source) for n in names) for source in "ab"] == [120, 40]
    assert done.duplicates == 3 * 120


def test_another_tokenizer_or_fraction_starts_anew(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text", 300)
    assert prepare_and_die(tmp_path, tokenizer_dir, 150).returncode == -signal.SIGKILL
    done = prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out", 0.3)
    assert done.resumed_bytes == 0
    assert done.train.num_documents + done.val.num_documents == 300


def test_a_folder_says_what_it_was_made_from(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text")
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out", 0.1)
    made = made_from(tmp_path / "out")
    assert made == recorded([str(tmp_path / "text")], [], "text", 0.1)
    assert made_from(tmp_path) is None


SLOW = """
import sys, time
from pathlib import Path
from gla.data.prepare import prepare

def wait(documents, size):
    Path(sys.argv[4]).touch()
    time.sleep(60)

prepare(sys.argv[1], sys.argv[2], sys.argv[3], on_progress=wait)
"""


def start_slow(tmp_path: Path, tokenizer_dir: Path) -> subprocess.Popen[bytes]:
    """Start a ``prepare`` in another process that stops while it holds everything."""
    marker = tmp_path / "running"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, tmp_path / "text", tokenizer_dir, tmp_path / "out", marker],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    for _ in range(1200):
        if marker.exists():
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the other process did not start")


def test_a_second_writer_is_refused_and_a_killed_one_is_redone(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    write_texts(tmp_path / "text")
    process = start_slow(tmp_path, tokenizer_dir)
    try:
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out")
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-out-")]
    (tmp_path / ".tmp-out-x-1").mkdir()  # of another folder, "out-x": not ours to remove
    done = prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out")
    assert isinstance(done, Prepared)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp-")] == [".tmp-out-x-1"]
    assert TokenDataset.open(tmp_path / "out/val").num_documents == done.val.num_documents


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(DataError, match="expected a place that can be written"):
        prepare(tmp_path / "text", tokenizer_dir, tmp_path / "closed/out")


def test_out_below_a_file(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text")
    with pytest.raises(DataError, match="expected a place that can be written"):
        prepare(tmp_path / "text", tokenizer_dir, tmp_path / "text/f00.txt/out")


def test_a_dead_worker_is_an_error(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "text")
    monkeypatch.setattr("gla.data.encode._BATCH_CHARACTERS", 100)
    monkeypatch.setattr("gla.data.prepare._REPORT_BYTES", 1)

    def kill(documents: int, size: int) -> None:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    with pytest.raises(DataError, match="a tokenizing process died"):
        prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out", workers=2, on_progress=kill)
    assert not (tmp_path / "out").exists()


def test_the_index_is_plain_json(tmp_path: Path, tokenizer_dir: Path) -> None:
    write_texts(tmp_path / "text")
    prepare(tmp_path / "text", tokenizer_dir, tmp_path / "out")
    index = json.loads((tmp_path / "out/train/index.json").read_text())
    stored = np.fromfile(tmp_path / "out/train/tokens-00000.bin", "<u2")
    assert index["num_tokens"] == len(stored)
