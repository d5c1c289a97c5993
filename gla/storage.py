"""Folders and files that are either whole or absent, and known to be unchanged when read.

A folder is written beside its final place, described by ``manifest.json`` (size and SHA-256 of
every file, and a digest of the manifest itself), synced to the disk and renamed, so a kill at any
moment leaves no half-written folder under a final name. ``verify_folder`` notices any later change.

This module knows nothing of tensors, checkpoints or tokens.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gla.errors import CheckpointError, ConfigError, GlaError

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock there
    fcntl = None

MANIFEST = "manifest.json"
FORMAT = 1
TEMPORARY = ".tmp-"  # prefix of everything unfinished; such names never match "step-*"
_MAX_MANIFEST_BYTES = 16 << 20  # a longer one is damage, and would be parsed for nothing


def write_folder(
    path: str | Path,
    writer: Callable[[Path], None],
    *,
    replace: bool = False,
    error: type[GlaError] = CheckpointError,
) -> None:
    """Write a folder that appears at ``path`` complete, with a manifest, or not at all.

    Args:
        path: The final place; its parents are created.
        writer: Called once with an empty folder to put files (or sub-folders) into.
        replace: Whether an existing folder at ``path`` may be replaced. (Between the two renames
            that this takes there is a moment with neither.)
        error: The class of the errors raised.

    Raises:
        error: ``path`` exists and ``replace`` is false, or the disk refuses a write (full,
            read-only, failing). What stood at ``path`` is still there; nothing temporary is left.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise error(f"{path}: got an existing path, expected none; fix by choosing another name")
    temporary = path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}"
    try:
        with refused_writes(path, error):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove(temporary)
            temporary.mkdir()
            writer(temporary)
        seal(temporary, path, error=error)
    finally:
        remove(temporary)


def seal(folder: Path, path: Path, *, error: type[GlaError] = CheckpointError) -> None:
    """Give a folder that is complete its manifest, bring it to the disk and move it to ``path``.

    Raises:
        error: The disk refuses a write.
    """
    with refused_writes(path, error):
        write_manifest(folder)
        _sync_tree(folder)
        _move_into_place(folder, path)


def write_manifest(folder: Path) -> None:
    """Describe the files of a folder, without the manifest that it may hold already."""
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / MANIFEST).write_bytes(_manifest_bytes(folder))


def make_folder(folder: Path, option: str) -> None:
    """Make a folder that a user named, with its parents, where it is not there yet.

    Args:
        folder: The folder.
        option: With which it was named, for the message.

    Raises:
        ConfigError: A file is in the way, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (FileExistsError, NotADirectoryError):
        what = "a file" if folder.is_file() else "a path below a file"
        raise ConfigError(
            f"{folder}: got {what}, expected a folder; fix with another {option}"
        ) from None
    except OSError as reason:
        raise ConfigError(
            f"{folder}: got {reason.strerror}, expected a folder that can be written; fix its "
            f"permissions or choose another {option}"
        ) from reason


@contextlib.contextmanager
def refused_writes(path: Path, error: type[GlaError]) -> Iterator[None]:
    """Turn an OSError into ``error``, which names ``path``."""
    try:
        yield
    except OSError as reason:
        raise error(
            f"{path}: got {reason.strerror or reason} while writing, expected a writable place "
            "with free space; fix by freeing space, or the path or its permissions"
        ) from reason


@contextlib.contextmanager
def locked(file: Path, busy: Callable[[str], GlaError]) -> Iterator[None]:
    """Hold a lock file, whose parent exists, against other processes; it is removed at the end.

    The system lets go of it when a process dies, however it dies.

    Args:
        file: The lock file.
        busy: Makes the error raised where another process, given by its id, holds it.

    Raises:
        OSError: The file cannot be written.
    """
    while True:
        handle = open(file, "a+", encoding="utf-8")
        with handle:
            if fcntl is not None:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as reason:
                    handle.seek(0)
                    raise busy(handle.read().strip() or "?") from reason
                if not _is_at(handle.fileno(), file):
                    continue  # its owner removed it between our open and our lock
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def _is_at(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Replace the file at ``path`` by ``data`` in one step (temporary file, sync, rename).

    Raises:
        OSError: The disk refuses; the old file is untouched.
    """
    path = Path(path)
    temporary = path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def verify_folder(
    path: str | Path,
    *,
    error: type[GlaError] = CheckpointError,
    contents: bool = True,
    fix: str = "by restoring it from a copy",
) -> dict[str, Any]:
    """Check every byte of a folder against its manifest.

    Files that the manifest does not name are ignored: nothing reads them.

    Args:
        path: The folder.
        error: The class of the errors raised.
        contents: False checks the manifest, and names and sizes of the files, but not their bytes.
        fix: What the messages say is to be done.

    Returns:
        ``{file name: {"size": bytes, "sha256": hex}}``.

    Raises:
        error: The manifest is missing, damaged or of a newer format, or a file is missing, cut,
            changed or outside the folder. The message names the file.
    """
    path = Path(path)
    files = _read_manifest(path / MANIFEST, error, fix)
    for name, facts in files.items():
        file = path / name
        if ".." in Path(name).parts or Path(name).is_absolute() or file.is_symlink():
            raise error(
                f"{path / MANIFEST}: got the name {name!r}, expected a file of this folder; "
                f"fix {fix}"
            )
        if not file.is_file():
            raise error(f"{file}: got no file, expected {facts['size']} bytes; fix {fix}")
        if (size := file.stat().st_size) != facts["size"]:
            raise error(f"{file}: got {size} bytes, expected {facts['size']}; fix {fix}")
        if contents and (digest := sha256_of_file(file)) != facts["sha256"]:
            raise error(
                f"{file}: got SHA-256 {digest[:12]}…, expected {facts['sha256'][:12]}… (its bytes "
                f"have changed since it was written); fix {fix}"
            )
    return files


def newest_verified(parent: str | Path, pattern: str = "step-*") -> tuple[Path | None, list[str]]:
    """Find the newest folder that verifies.

    "Newest" is by number in the zero-padded name, not by modification time.

    Returns:
        The folder, or None where none verifies, and one line for each newer folder that was
        skipped, with the reason.
    """
    skipped: list[str] = []
    found = [p for p in Path(parent).glob(pattern) if p.is_dir()]
    for folder in sorted(found, key=lambda p: (len(p.name), p.name), reverse=True):
        try:
            verify_folder(folder)
        except CheckpointError as reason:
            skipped.append(str(reason))
        else:
            return folder, skipped
    return None, skipped


def sha256_of_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes in hex, reading it in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a folder tree if it is there."""
    if path.exists():
        shutil.rmtree(path)


def remove_leftovers(parent: str | Path) -> None:
    """Remove what killed writers left in ``parent``. Only where no writer can be at work."""
    for path in Path(parent).glob(f"{TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            remove(path)
        else:
            path.unlink()


def _digest(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([FORMAT, files], sort_keys=True).encode()).hexdigest()


def _manifest_bytes(folder: Path) -> bytes:
    files = {
        file.relative_to(folder).as_posix(): {
            "size": file.stat().st_size,
            "sha256": sha256_of_file(file),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = {"format": FORMAT, "files": files, "digest": _digest(files)}
    return json.dumps(manifest, indent=1, sort_keys=True).encode()


def _read_manifest(file: Path, error: type[GlaError], fix: str) -> dict[str, Any]:
    """Return the ``files`` table of a manifest whose own digest is right."""
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError("is too long")
        text = file.read_bytes()
        manifest = json.loads(text)
        version, files, digest = manifest["format"], manifest["files"], manifest["digest"]
    except FileNotFoundError as reason:
        raise error(f"{file}: got no manifest, expected a finished folder; fix {fix}") from reason
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as reason:
        raise error(
            f"{file}: got a manifest that cannot be read ({reason}), expected one; fix {fix}"
        ) from reason
    if isinstance(version, int) and version > FORMAT:
        raise error(f"{file}: got format {version}, expected at most {FORMAT}; fix by updating gla")
    # Compared as bytes: an equal JSON value in other bytes is a change too.
    canonical = {"format": FORMAT, "files": files, "digest": digest}
    if json.dumps(canonical, indent=1, sort_keys=True).encode() != text or digest != _digest(files):
        raise error(
            f"{file}: got a manifest that differs from its own digest (it has been changed), "
            f"expected the one that was written; fix {fix}"
        )
    return files


def _move_into_place(temporary: Path, path: Path) -> None:
    """Rename; where something stands at ``path``, put it aside first and remove it last."""
    aside = path.parent / f"{TEMPORARY}old-{path.name}-{os.getpid()}"
    if path.exists():
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if aside.exists():
            os.rename(aside, path)
        raise
    _sync_folder(path.parent)
    remove(aside)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
        else:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened; the rename is still atomic
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
