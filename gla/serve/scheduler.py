"""Continuous batching: one thread that reads and writes for all requests.

Jobs wait in a queue for a place. The thread goes round: each job that still reads gets one piece of
its text read, then every job that writes gets one token, all in one step of a batch. So a long text
never holds up those who are writing for more than a piece of each. No other thread touches the
model.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gla.errors import GlaError
from gla.generate.batch import Batch, Row
from gla.generate.reading import Reader
from gla.generate.session import Session
from gla.generate.writer import Request, Token
from gla.serve.limits import STOPS, Limits, Refusal

PIECE_CHARACTERS = 2048  # read at once while others write

_log = logging.getLogger("gla.serve")


@dataclass(eq=False)
class Job:
    """One text to read and continue.

    Attributes:
        open: called in the thread of the model for the session to go on from.
        text: read first.
        request: written then; None only reads.
        emit: called in the thread of the model with each token, and at the end with the job.
        done: called in the thread of the model with the session at the end, before ``emit``.
        session: once it was opened.
        finish: "length" or "stop"; "shutdown" if the server stopped; None before the end.
        error: why it failed.
        read: tokens read for this job, the begin mark included where it starts there.
        written: tokens written.
    """

    open: Callable[[], Session]
    text: str
    request: Request | None
    emit: Callable[[Token | Job], None]
    done: Callable[[Session], None] | None = None
    session: Session | None = None
    finish: str | None = None
    error: Refusal | None = None
    read: int = 0
    written: int = 0
    cancelled: bool = False
    pieces: Iterator[str] | None = field(default=None, repr=False)
    row: Row | None = None


class Scheduler:
    """The thread and its queue.

    Args:
        limits: ``concurrency`` and ``queue`` are used here.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._wake = threading.Condition()
        self._queue: deque[Job] = deque()
        self._reading: list[Job] = []
        self._writing: dict[Row, Job] = {}
        self._batch = Batch()
        self._closing = False
        self._cut = False
        self._thread = threading.Thread(target=self._run, name="gla-model", daemon=True)
        self._thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs, all or none.

        Raises:
            Refusal: the queue is full, or the server stops.
        """
        with self._wake:
            if self._closing:
                raise Refusal(503, STOPS)
            free = self._limits.concurrency - len(self._reading) - len(self._writing)
            waiting = len(self._queue) + len(jobs) - max(0, free)
            if waiting > self._limits.queue:
                raise Refusal(
                    429,
                    f"server: got more than {self._limits.concurrency} texts at work and "
                    f"{self._limits.queue} waiting, expected fewer; fix by asking again later",
                )
            self._queue.extend(jobs)
            self._wake.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Stop jobs whose answer nobody waits for; their ``done`` is not called."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._queue = deque(job for job in self._queue if not job.cancelled)

    def load(self) -> tuple[int, int]:
        """Texts at work and texts that wait."""
        with self._wake:
            return len(self._reading) + len(self._writing), len(self._queue)

    def close(self, grace: float) -> None:
        """Take no more jobs, let the others end, and cut those short that take longer than that.

        A job that is cut while it writes ends as if it had asked for no more; one that still reads
        or waits is refused.

        Args:
            grace: seconds.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(grace)
        self.cut()
        self._thread.join()

    def cut(self) -> None:
        """End the grace of ``close``."""
        self._cut = True

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._reading or self._writing or self._closing):
                    self._wake.wait()
                self._admit()
                if self._closing and not (self._reading or self._writing):
                    return
            self._guard(self._cut_short if self._cut else self._round)

    def _guard(self, work: Callable[[], None]) -> None:
        """A fault that no request can be blamed for ends all that are at work, not the server."""
        try:
            work()
        except Exception as reason:
            refusal = _refusal(reason)
            broken = [*self._reading, *self._writing.values()]
            self._reading, self._writing, self._batch = [], {}, Batch()
            for job in broken:
                self._end(job, error=refusal)

    def _admit(self) -> None:
        while self._queue and len(self._reading) + len(self._writing) < self._limits.concurrency:
            self._reading.append(self._queue.popleft())

    def _round(self) -> None:
        for job in list(self._reading):
            try:
                self._read(job)
            except Exception as reason:
                self._end(job, error=_refusal(reason))
        gone = [row for row, job in self._writing.items() if job.cancelled]
        self._batch.leave(gone)
        for row in gone:
            del self._writing[row]
        for row, token in self._batch.step():
            self._write(row, token)

    def _read(self, job: Job) -> None:
        """Open a job, or read its next piece; at the end of its text let it write."""
        if job.cancelled:
            self._reading.remove(job)
            return
        if job.session is None or job.pieces is None:
            job.session = job.open()
            job.pieces = Reader().pieces(job.text, PIECE_CHARACTERS)
            job.read = -job.session.position if job.session.position > 1 else 0
        piece = next(job.pieces, None)
        if piece is not None:
            job.session.read(piece)
            return
        job.read += job.session.position
        if job.request is None:
            self._end(job, finish="stop")
            return
        row = self._batch.join(job.session, job.request)
        if row.writer.finish is not None:  # nothing was asked for
            self._end(job, finish=row.writer.finish)
            return
        self._reading.remove(job)
        self._writing[row] = job

    def _write(self, row: Row, token: Token | None) -> None:
        job = self._writing[row]
        if token is not None:
            job.written += not row.writer.ended
            job.emit(token)
        if row.error is not None:
            self._end(job, error=Refusal(500, str(row.error)), row=row)
        elif row.writer.finish is not None:
            self._end(job, finish=row.writer.finish, row=row)

    def _cut_short(self) -> None:
        rows = list(self._writing)
        self._batch.leave(rows)
        for row in rows:
            self._end(self._writing[row], finish="shutdown", row=row)
        with self._wake:
            waiting = [*self._reading, *self._queue]
            self._queue.clear()
        for job in waiting:
            self._end(job, error=Refusal(503, STOPS))

    def _end(
        self,
        job: Job,
        *,
        finish: str | None = None,
        error: Refusal | None = None,
        row: Row | None = None,
    ) -> None:
        if row is not None:
            self._writing.pop(row, None)
        if job in self._reading:
            self._reading.remove(job)
        job.finish, job.error = finish, error
        if error is None and job.done and job.session and not job.cancelled:
            try:
                job.done(job.session)
            except Exception as reason:
                job.finish, job.error = None, _refusal(reason)
        job.emit(job)


def _refusal(reason: Exception) -> Refusal:
    """What a client is told; what it cannot have caused is told to the log."""
    if isinstance(reason, Refusal):
        return reason
    if isinstance(reason, GlaError):
        return Refusal(400, str(reason))
    _log.error("a request is refused for a fault of the server", exc_info=reason)
    return Refusal(500, "server: got an internal fault, expected none; fix what its log says")
