"""The checkpoints that a run keeps: where they stand, which to go on from, which go, the best one.

checkpoints/step-00001000/  best -> step-00000500
checkpoints/damaged-step-…  did not verify when a newer run went on from an older one
checkpoints/aside-step-…    newer than the one that a run was sent back to
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gla import storage
from gla.errors import CheckpointError

BEST = "best"


def folder_of(run: Path, step: int) -> Path:
    """Return where the checkpoint of a step stands."""
    return run / "checkpoints" / f"step-{step:08d}"


def verified(run: Path, step: int) -> Path:
    """Return the checkpoint of a step.

    Raises:
        CheckpointError: It is not there, or does not verify; the message has the steps that are.
    """
    folder = folder_of(run, step)
    names = [p.name.removeprefix("step-") for p in folder.parent.glob("step-*")]
    known = ", ".join(map(str, sorted(int(n) for n in names if n.isdecimal()))) or "none is there"
    if not folder.is_dir():
        raise CheckpointError(
            f"--step: got {step}, expected a step with a checkpoint in {folder.parent} ({known}); "
            "fix --step, and keep more of them with checkpoint.keep"
        )
    storage.verify_folder(folder, fix=f"with another --step ({known})")
    return folder


def put_aside_newer(parent: Path, folder: Path, prefix: str) -> list[str]:
    """Rename the checkpoints newer than ``folder``, so that nothing goes on from or counts them.

    The newest goes first: a kill midway leaves a run that goes on from those that are left.

    Args:
        parent: The folder of the checkpoints.
        folder: One of them.
        prefix: Of the new names. What has the new name already is removed.

    Returns:
        The new names.
    """
    names = []
    for other in sorted(parent.glob("step-*"), key=_by_step, reverse=True):
        if _by_step(other) > _by_step(folder):
            aside = parent / f"{prefix}{other.name}"
            storage.remove(aside)
            other.rename(aside)
            names.append(aside.name)
    return names


def _by_step(folder: Path) -> tuple[int, str]:
    return len(folder.name), folder.name


def prune(parent: Path, keep: int, best: Path | None = None) -> None:
    """Remove all but the newest ``keep`` checkpoints. A kill midway leaves the newest whole.

    Args:
        parent: The folder of the checkpoints.
        keep: How many stay.
        best: One that stays too.
    """
    folders = sorted(parent.glob("step-*"), key=_by_step)
    for folder in folders[:-keep]:
        if folder == best:
            continue
        doomed = parent / f"{storage.TEMPORARY}{folder.name}-pruned"
        storage.remove(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def point_to_best(run: Path, step: int | None) -> None:
    """Make ``checkpoints/best`` lead to the checkpoint of a step; None: to none."""
    link = run / "checkpoints" / BEST
    if step is None:
        link.unlink(missing_ok=True)
        return
    temporary = link.parent / f"{storage.TEMPORARY}{link.name}-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder_of(run, step).name)
    os.replace(temporary, link)
