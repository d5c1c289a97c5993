"""Processes that train cells, one at a time each, and end when the comparison does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from gla.data.children import exit_with_parent, started_deaf
from gla.errors import GlaError
from gla.process import keep_freed_memory

_LEAVE_S = 60  # for a worker that was asked to end: it writes a checkpoint first


class Outcome(NamedTuple):
    """What a worker says of a cell.

    Attributes:
        folder: Of the cell.
        result: What it found; None where it failed.
        error: What went wrong: one line.
        by_user: Whether that is an error of the suite or the machine, so that others fail too.
        testing: It is not finished: training is over, and its tests begin.
    """

    folder: str
    result: dict[str, Any] | None
    error: str = ""
    by_user: bool = False
    testing: bool = False


class Workers:
    """Some processes. Use as a context manager: at its end the processes are asked to end.

    Args:
        root: Folder of the comparison.
        devices: One for each worker.
        threads: Of torch in each of them.
    """

    def __init__(self, root: Path, devices: list[str], threads: int) -> None:
        self._root, self._devices, self._threads = root, devices, threads
        self._pool: list[tuple[Any, Any]] = []  # process and our end of its pipe
        self._busy: dict[int, str] = {}

    def __enter__(self) -> Workers:
        self._pool = [self._start(device) for device in self._devices]
        return self

    def __exit__(self, *_: object) -> None:
        for number, (process, connection) in enumerate(self._pool):
            connection.close()
            if number in self._busy:  # one SIGTERM: it ends after the update, with a checkpoint
                process.terminate()
        for process, _ in self._pool:
            process.join(_LEAVE_S)
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def idle(self) -> int:
        """How many have nothing to do."""
        return len(self._pool) - len(self._busy)

    @property
    def running(self) -> list[str]:
        """Folders of the cells that are being trained."""
        return list(self._busy.values())

    def give(self, folder: str) -> None:
        """Let an idle worker train a cell. One that died meanwhile is noticed by ``poll``."""
        number = next(n for n in range(len(self._pool)) if n not in self._busy)
        self._busy[number] = folder
        with contextlib.suppress(OSError):
            self._pool[number][1].send_bytes(folder.encode())

    def poll(self, seconds: float) -> list[Outcome]:
        """Wait up to so many seconds for what workers say. One that died is replaced."""
        connections = {self._pool[n][1]: n for n in self._busy}
        outcomes = []
        for ready in wait(list(connections), seconds):
            number = connections[ready]  # pyright: ignore[reportArgumentType]
            try:
                outcome = Outcome(**json.loads(self._pool[number][1].recv_bytes()))
                outcomes.append(outcome)
                if not outcome.testing:
                    del self._busy[number]
            except (EOFError, OSError):  # OSError: it died before it read what it was sent
                folder = self._busy.pop(number)
                process = self._pool[number][0]
                process.join()
                why = f"its process ended with exit code {process.exitcode}"
                outcomes.append(Outcome(folder, None, why))
                self._pool[number] = self._start(self._devices[number])
        return outcomes

    def _start(self, device: str) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, str(self._root), device, self._threads)
        process = context.Process(target=_work, args=arguments, daemon=True)
        with started_deaf(signal.SIGINT):  # Ctrl-C is for the parent, which asks us to end
            process.start()
        theirs.close()
        return process, ours


def _work(connection: Any, root: str, device: str, threads: int) -> None:
    """Train the cells whose folders come in, until there are no more."""
    exit_with_parent()
    keep_freed_memory()
    with contextlib.suppress(OSError, AttributeError):
        # A SIGTERM for the group goes to the parent alone: a second one would end us at once. No
        # setsid: Linux gives each session a share of the CPU, whatever its "nice" says.
        os.setpgid(0, 0)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # log.txt of the cell has the notes
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            folder = connection.recv_bytes().decode()
        except (EOFError, OSError):
            return
        outcome = _train(Path(root), folder, device, partial(_say_testing, connection, folder))
        connection.send_bytes(json.dumps(outcome._asdict()).encode())


def _say_testing(connection: Any, folder: str) -> None:
    outcome = Outcome(folder, None, testing=True)
    with contextlib.suppress(OSError):  # without a listener, the result is written all the same
        connection.send_bytes(json.dumps(outcome._asdict()).encode())


def _train(root: Path, folder: str, device: str, testing: Callable[[], None]) -> Outcome:
    from gla.compare.cell import run_cell

    try:
        return Outcome(folder, run_cell(root / folder, device, testing))
    except GlaError as reason:
        return Outcome(folder, None, str(reason), by_user=True)
    except Exception as reason:
        (root / folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        what = f"{type(reason).__name__}: {reason}".splitlines()[0]
        return Outcome(folder, None, f"{what} (see {root / folder / 'error.txt'})")
