"""Named states on the disk: read a long text once, ask many times.

The name of a file is a hash of the state's name, so that nothing a client sends is ever used as a
path. A state is in memory before it is on the disk; one thread writes, and ``close`` waits for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from gla import storage
from gla.errors import ConfigError, StateError
from gla.generate.session import Session
from gla.serve.limits import STOPS, Limits, Refusal

_log = logging.getLogger("gla.serve")


class Kept(NamedTuple):
    """What is known of a state without reading it.

    Attributes:
        name: given by a client.
        position: tokens read.
    """

    name: str
    position: int


class StateStore:
    """States of one model by name. Its methods may be called from any thread.

    Args:
        folder: where the files are; made if it is missing.
        root: a session of the model, whose forks load the files.
        limits: how many states there may be.

    Raises:
        ConfigError: another process keeps its states there.
    """

    def __init__(self, folder: Path, root: Session, limits: Limits) -> None:
        storage.make_folder(folder, "--states")
        self._alone = contextlib.ExitStack()
        self._alone.enter_context(storage.locked(folder / ".lock", lambda pid: _busy(folder, pid)))
        storage.remove_leftovers(folder)
        self._folder = folder
        self._root = root
        self._limits = limits
        self._lock = threading.Lock()
        self._memory: OrderedDict[str, Session] = OrderedDict()  # the last used at the end
        self._writer = ThreadPoolExecutor(1, "gla-states")
        self._unwritten: dict[str, Future[None]] = {}
        described = map(self._describe, folder.glob("*.json"))
        self._known = {kept.name: kept for kept in described if kept}

    def list(self) -> list[Kept]:
        """All states, by name."""
        with self._lock:
            return sorted(self._known.values())

    def check_room(self, name: str) -> None:
        """Refuse a new name where there is no room for it."""
        with self._lock:
            if name not in self._known and len(self._known) >= self._limits.max_states:
                raise Refusal(
                    409,
                    f"name: got a new state, expected at most {self._limits.max_states}; fix by "
                    "deleting one",
                )

    def get(self, name: str) -> Session:
        """A session that stands where the state of this name stands.

        Raises:
            Refusal: there is none, or its file is damaged or of another model.
        """
        with self._lock:
            if name not in self._known:
                raise _unknown(name)
            session = self._memory.get(name)
            if session is not None:
                self._memory.move_to_end(name)
                return session.fork()
        session = self._root.fork()
        try:
            session.restore(self._file(name, ".state"))
        except StateError as reason:
            raise Refusal(409, f"state: got {name!r}, which cannot be used: {reason}") from None
        with self._lock:
            if name in self._known:
                self._keep(name, session)
        return session.fork()

    def put(self, name: str, session: Session) -> Kept:
        """Keep a session's state under a name, in place of any other; it is written soon after.

        Raises:
            Refusal: there is no room for a new name.
        """
        self.check_room(name)
        session = session.fork()
        kept = Kept(name, session.position)
        with self._lock:
            future = self._submit(self._write, kept, session)
            self._known[name] = kept
            self._keep(name, session)
            self._unwritten[name] = future
        return kept

    def delete(self, name: str) -> None:
        """Forget a state and remove its file.

        Raises:
            Refusal: there is none.
        """
        with self._lock:
            if name not in self._known:
                raise _unknown(name)
            self._unwritten[name] = self._submit(self._remove, name)
            del self._known[name]
            self._memory.pop(name, None)

    def close(self) -> None:
        """Wait until all is on the disk; try once more what the disk has refused.

        Raises:
            StateError, OSError: it refuses still; the message is that of the first state.
        """
        self._writer.shutdown(wait=True)
        refused: list[Exception] = []
        for name, future in self._unwritten.items():
            if _written(future):
                continue
            try:
                if name in self._known:
                    self._write(self._known[name], self._memory[name])
                else:
                    self._remove(name)
            except (StateError, OSError) as reason:
                refused.append(reason)
        self._alone.close()
        if refused:
            raise refused[0]

    def _submit(self, work: Callable[..., None], *given: Any) -> Future[None]:
        try:
            future = self._writer.submit(work, *given)
        except RuntimeError:  # it was closed
            raise Refusal(503, STOPS) from None
        future.add_done_callback(_tell)
        return future

    def _keep(self, name: str, session: Session) -> None:
        """Keep in memory; what was not used for longest goes, unless it is still to be written."""
        self._memory[name] = session
        self._memory.move_to_end(name)
        self._unwritten = {n: f for n, f in self._unwritten.items() if not _written(f)}
        for other in list(self._memory):
            if len(self._memory) <= self._limits.states_in_memory:
                break
            if other != name and other not in self._unwritten:
                del self._memory[other]

    def _write(self, kept: Kept, session: Session) -> None:
        session.save(self._file(kept.name, ".state"))
        description = json.dumps(kept._asdict()).encode()  # last: a state without it is unknown
        storage.write_bytes_atomic(self._file(kept.name, ".json"), description)

    def _remove(self, name: str) -> None:
        for suffix in (".json", ".state"):
            self._file(name, suffix).unlink(missing_ok=True)

    def _describe(self, file: Path) -> Kept | None:
        """What a description says; None if it is damaged: its state is not offered."""
        try:
            kept = Kept(**json.loads(file.read_bytes()))
            right = isinstance(kept.position, int) and self._file(kept.name, ".json") == file
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None
        return kept if right else None

    def _file(self, name: str, suffix: str) -> Path:
        return self._folder / (hashlib.sha256(name.encode()).hexdigest()[:40] + suffix)


def _written(future: Future[None]) -> bool:
    return future.done() and future.exception() is None


def _tell(future: Future[None]) -> None:
    if (reason := future.exception()) is not None:
        _log.error("a state is in memory only, and is written again at the end: %s", reason)


def _unknown(name: str) -> Refusal:
    wanted = "a name that GET /v1/states lists; fix the name"
    return Refusal(404, f"state: got {name!r}, expected {wanted}")


def _busy(folder: Path, process: str) -> ConfigError:
    return ConfigError(
        f"states: got {folder}, where process {process} keeps its states, expected no other; fix "
        "with --states"
    )
