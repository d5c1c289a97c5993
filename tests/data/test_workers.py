"""Batches from other processes: the same ones, in order; a dead worker is an error, not a hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gla.data.loader import Loader
from gla.data.shards import TokenDataset
from gla.data.streams import Streams
from gla.data.tokenizer import Tokenizer
from gla.data.workers import Reader
from gla.errors import DataError

Split = Callable[..., TokenDataset]
DOCUMENTS = [[i] * (i % 13 + 3) for i in range(1, 60)]


def plan(step: int) -> list[tuple[int, int]]:
    return [(4 * step, 2), (4 * step + 2, 2)]


def test_workers_read_what_the_process_itself_reads(make_split: Split) -> None:
    dataset = make_split(DOCUMENTS)
    loader = Loader(dataset, 16, seed=5)
    with Reader(loader, plan, 0) as alone, Reader(loader, plan, 2) as shared:
        for step in (0, 1, 2, 7, 8, 3):  # it may be asked to jump
            for one, other in zip(alone(step), shared(step), strict=True):
                assert type(one) is type(other)
                assert all(map(torch.equal, one, other))
        for process in multiprocessing.active_children():
            for number in (signal.SIGINT, signal.SIGTERM):  # as their group gets them
                os.kill(process.pid or 0, number)
        for step in range(10, 30):
            assert len(shared(step)) == 2
        assert len(multiprocessing.active_children()) == 2
        worker = next(iter(multiprocessing.active_children()))
        began = time.perf_counter()
        os.kill(worker.pid or 0, signal.SIGKILL)  # the other one lives on until it is closed
        with pytest.raises(DataError, match=r"train\.loader_workers: a process .* died"):
            for step in range(30, 1000):
                shared(step)
                time.sleep(0.01)
        assert time.perf_counter() - began < 10
    assert not multiprocessing.active_children()
    assert time.perf_counter() - began < 20


def test_streams_are_the_same_where_they_are_sent(make_split: Split) -> None:
    streams = Streams(make_split(DOCUMENTS), 8, 4, seed=5)
    build, arguments = streams.__reduce__()
    assert all(map(torch.equal, build(*arguments).batch(3, 0, 4), streams.batch(3, 0, 4)))


ORPHAN = """
import sys, os, time
from gla.data.loader import Loader
from gla.data.shards import TokenDataset
from gla.data.workers import Reader
import multiprocessing
reader = Reader(Loader(TokenDataset.open(sys.argv[1]), 16), lambda s: [(s, 1)], 1)
reader(0)
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(60)
"""


def test_workers_do_not_outlive_a_killed_process(make_split: Split) -> None:
    dataset = make_split(DOCUMENTS)
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(dataset.path)],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    for _ in range(500):
        status = Path(f"/proc/{worker}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    raise AssertionError("the worker lives on")


# The handler is set, as a process begun in the background of a script has SIGINT ignored.
SLOW = """
import signal, sys, time
from pathlib import Path
from gla.data import encode
from gla.data.corpus import Document
def documents():
    for i in range(6):
        yield "train", Document(str(i), "a b c d")
    time.sleep(1)
    print("the workers wait", flush=True)
    time.sleep(60)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encode._BATCH_CHARACTERS = 1
    try:
        for _ in encode.encode(documents(), Path(sys.argv[1]), 2):
            pass
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_ends_tokenizing_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c d e f\n" * 50)
    Tokenizer.train(tmp_path / "text.txt", 270, tmp_path / "tokenizer")
    (tmp_path / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py"), str(tmp_path / "tokenizer")],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "the workers wait\n"
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "")
