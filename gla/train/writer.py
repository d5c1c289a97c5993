"""Checkpoints written beside the training: a copy of everything first, then a thread.

Training goes on after the copy, which later updates do not touch. An error of the thread is raised
by the next call.
"""

from __future__ import annotations

import threading
from pathlib import Path

from gla import storage
from gla.errors import CheckpointError
from gla.train import checkpoint, kept


class CheckpointWriter:
    """Writes one checkpoint at a time, prunes old ones, and keeps the best reachable.

    Args:
        parent: The folder ``checkpoints`` of a run.
        keep: How many stay, beside the best.
    """

    def __init__(self, parent: Path, keep: int) -> None:
        self._parent, self._keep = parent, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:  # what went wrong first is what is said
            self._thread.join()

    def save(self, folder: Path, snapshot: checkpoint.Snapshot, best: int | None) -> None:
        """Begin to write a checkpoint; the one before is finished first.

        Args:
            folder: Its place.
            snapshot: What it holds; it belongs to the writer from now on.
            best: The step that was the best so far, whose checkpoint stays; None: none does.

        Raises:
            CheckpointError: The one before could not be written.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(folder, snapshot, best), name="gla-checkpoint"
        )
        self._thread.start()

    def _write(self, folder: Path, snapshot: checkpoint.Snapshot, best: int | None) -> None:
        try:
            checkpoint.write(folder, snapshot)
            run = self._parent.parent
            place = None if best is None else kept.folder_of(run, best)
            with storage.refused_writes(self._parent, CheckpointError):
                if best is not None and place is not None and place.is_dir():
                    kept.point_to_best(run, best)
                kept.prune(self._parent, self._keep, place)
        except BaseException as reason:  # raised again in the training thread
            self._error = reason

    def check(self) -> None:
        """Raise what went wrong in the thread, once."""
        if self._error is not None:
            reason, self._error = self._error, None
            raise reason

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
