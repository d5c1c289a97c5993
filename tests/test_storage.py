"""Folders that are whole or absent, and verified when read."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gla import storage
from gla.errors import CheckpointError, ConfigError, DataError


def write_two(folder: Path) -> None:
    (folder / "a.bin").write_bytes(bytes(range(256)))
    (folder / "sub").mkdir()
    (folder / "sub" / "b.json").write_text('{"x": 1}')


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_written_folder_verifies_and_leaves_nothing_else(tmp_path: Path) -> None:
    storage.write_folder(tmp_path / "step-1", write_two)
    assert set(storage.verify_folder(tmp_path / "step-1")) == {"a.bin", "sub/b.json"}
    assert names(tmp_path) == ["step-1"]


def test_every_single_bit_flip_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    storage.write_folder(folder, write_two)
    rng = random.Random(0)
    files = [p for p in folder.rglob("*") if p.is_file()]
    for _ in range(200):
        file = rng.choice(files)
        good = file.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"step-1"):
            storage.verify_folder(folder)
        file.write_bytes(good)
    storage.verify_folder(folder)


@pytest.mark.parametrize("damage", ["missing", "truncated", "emptied", "zero tail", "no manifest"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "step-1"
    storage.write_folder(folder, write_two)
    file = folder / "a.bin"
    good = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(good[:-1])
    elif damage == "emptied":
        file.write_bytes(b"")
    elif damage == "zero tail":
        file.write_bytes(good[:-16] + bytes(16))
    else:
        file = folder / storage.MANIFEST
        file.unlink()
    with pytest.raises(CheckpointError, match=file.name):
        storage.verify_folder(folder)


def test_a_newer_format_names_both_versions(tmp_path: Path) -> None:
    storage.write_folder(tmp_path / "x", write_two)
    file = tmp_path / "x" / storage.MANIFEST
    manifest = json.loads(file.read_text())
    manifest["format"] = 7
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"format 7.*at most 1"):
        storage.verify_folder(tmp_path / "x")


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{}", b'{"format": 1}', b"[" * 100_000, b"\xff"]
)
def test_a_manifest_of_nonsense_is_our_error(tmp_path: Path, text: bytes) -> None:
    storage.write_folder(tmp_path / "x", write_two)
    (tmp_path / "x" / storage.MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest"):
        storage.verify_folder(tmp_path / "x")


def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    storage.write_folder(tmp_path / "x", write_two)
    facts = {"size": 6, "sha256": storage.sha256_of_file(tmp_path / "outside")}
    for name in ("../outside", str(tmp_path / "outside"), "link"):
        if name == "link":
            (tmp_path / "x" / "link").symlink_to(tmp_path / "outside")
        files = {name: facts}
        manifest = {"format": 1, "files": files, "digest": storage._digest(files)}
        text = json.dumps(manifest, indent=1, sort_keys=True)
        (tmp_path / "x" / storage.MANIFEST).write_text(text)
        with pytest.raises(CheckpointError, match=r"file of this folder"):
            storage.verify_folder(tmp_path / "x")


def test_an_existing_folder_is_kept_unless_replace(tmp_path: Path) -> None:
    storage.write_folder(tmp_path / "x", write_two)
    with pytest.raises(DataError, match=r"existing"):
        storage.write_folder(tmp_path / "x", write_two, error=DataError)

    def write_new(folder: Path) -> None:
        (folder / "new").write_text("n")

    storage.write_folder(tmp_path / "x", write_new, replace=True)
    assert set(storage.verify_folder(tmp_path / "x")) == {"new"}
    assert names(tmp_path) == ["x"]


def test_an_error_of_the_writer_leaves_no_trace(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("writer")

    with pytest.raises(RuntimeError, match=r"writer"):
        storage.write_folder(tmp_path / "x", fail)
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failing_sync_fails_the_save_and_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    storage.write_folder(tmp_path / "step-1", write_two)

    def fsync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=os.strerror(code)):
        storage.write_folder(tmp_path / "step-1", write_two, replace=True)
    with pytest.raises(CheckpointError, match=os.strerror(code)):
        storage.write_folder(tmp_path / "step-2", write_two)
    with pytest.raises(OSError, match=os.strerror(code)):
        storage.write_bytes_atomic(tmp_path / "step-1" / "a.bin", b"")
    storage.verify_folder(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]


def test_a_full_disk_is_a_checkpoint_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CheckpointError, match=r"free space"):
            storage.write_folder(tmp_path / "x", write_two)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert names(tmp_path) == []


def test_newest_verified_skips_and_says_why(tmp_path: Path) -> None:
    assert storage.newest_verified(tmp_path) == (None, [])
    for step in (1, 9, 10, 100_000_000):
        storage.write_folder(tmp_path / f"step-{step:08d}", write_two)
    (tmp_path / "step-100000000" / "a.bin").write_bytes(b"")
    (tmp_path / "step-00000010" / storage.MANIFEST).unlink()
    (tmp_path / "step-99999999").write_text("a file, not a folder")
    folder, skipped = storage.newest_verified(tmp_path)
    assert folder == tmp_path / "step-00000009"
    assert len(skipped) == 2
    assert "step-100000000" in skipped[0]
    assert "step-00000010" in skipped[1]


def test_write_bytes_atomic_replaces(tmp_path: Path) -> None:
    for data in (b"one", b"two"):
        storage.write_bytes_atomic(tmp_path / "f", data)
        assert (tmp_path / "f").read_bytes() == data
    assert names(tmp_path) == ["f"]


WRITER = """
import sys
from pathlib import Path
from gla import storage
parent = Path(sys.argv[1])
def write(folder):
    for i in range(20):
        (folder / f"{i}").write_bytes(bytes(20_000))
print("up", flush=True)
step = 0
while True:
    step += 1
    storage.write_folder(parent / f"step-{step:08d}", write)
    storage.write_folder(parent / "same", write, replace=True)
"""


def test_a_kill_at_any_moment_leaves_whole_folders(tmp_path: Path) -> None:
    rng = random.Random(1)
    for cycle in range(6):
        parent = tmp_path / str(cycle)
        parent.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(parent)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 + rng.random() * 0.15)
        process.kill()
        process.wait()
        process.stdout.close()
        for folder in parent.glob("[!.]*"):
            storage.verify_folder(folder)
        storage.remove_leftovers(parent)
        assert all(not name.startswith(".") for name in names(parent))


def hold(file: Path, seconds: float) -> int:
    """Hold a lock file in another process; return its id once it does."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with storage.locked(file, CheckpointError):
            os.write(writer, b"x")
            time.sleep(seconds)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return pid


def test_a_lock_names_its_owner_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    pid = hold(file, 60)
    with pytest.raises(CheckpointError) as caught, storage.locked(file, CheckpointError):
        pass
    assert str(caught.value) == str(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert file.exists()  # a killed owner cannot remove it, and does not hold it
    with storage.locked(file, CheckpointError):
        assert file.read_text() == str(os.getpid())
    assert not file.exists()


@pytest.mark.parametrize(("name", "got"), [("f", "a file"), ("f/x/y", "a path below a file")])
def test_a_folder_cannot_be_made_where_a_file_is(tmp_path: Path, name: str, got: str) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(ConfigError) as caught:
        storage.make_folder(tmp_path / name, "--out")
    expected = f"{tmp_path / name}: got {got}, expected a folder; fix with another --out"
    assert str(caught.value) == expected
    for _ in range(2):
        storage.make_folder(tmp_path / "a" / "b", "--out")
    assert (tmp_path / "a" / "b").is_dir()


def test_one_lock_at_a_time_whoever_removes_the_file(tmp_path: Path) -> None:
    """Processes that take turns as fast as they can never hold it together."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            done = 0
            while done < 25:
                try:
                    with storage.locked(tmp_path / ".lock", CheckpointError):
                        number = int(counter.read_text())
                        time.sleep(0.0005)
                        counter.write_text(str(number + 1))
                    done += 1
                except CheckpointError:
                    pass
            os._exit(0)
        pids.append(pid)
    assert {os.waitpid(pid, 0)[1] for pid in pids} == {0}
    assert counter.read_text() == "100"
    assert not (tmp_path / ".lock").exists()
