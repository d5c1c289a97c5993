"""Processes that assemble batches ahead of the training process.

A batch depends on its place in the data and nothing else, so it does not matter which process makes
it: with any number of workers training is the same.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import torch

from gla.data.children import STOPS, exit_with_parent, started_deaf
from gla.errors import DataError

_AHEAD = 2  # steps for each worker

Request = tuple[int, ...]


class Source(Protocol):
    """Makes batches; it can be sent to another process."""

    @property
    def batch(self) -> Callable[..., Any]:
        """From a place to the batch there: a NamedTuple of tensors."""
        ...


class Reader:
    """Reads the batches of each step, itself or through workers. Close it, or use ``with``."""

    def __init__(self, source: Source, plan: Callable[[int], Sequence[Request]], workers: int):
        """Start the workers; they begin to read with the first call.

        Args:
            source: Makes the batches.
            plan: step -> the arguments of ``source.batch`` for each batch of the step.
            workers: How many processes; 0 reads where it is called. More need a main module that
                can be imported.
        """
        self._source, self._plan, self._workers = source, plan, workers
        self._waiting: deque[tuple[int, list[Future[Any]]]] = deque()
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[Any] = set()  # of the pool
        if workers:
            context = multiprocessing.get_context("spawn")  # forking a process with threads hangs
            self._pool = ProcessPoolExecutor(workers, context, _start, (source,))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, step: int) -> list[Any]:
        """Return the batches of a step.

        Raises:
            DataError: The data are damaged, or a worker died.
        """
        if self._pool is None:
            return [self._source.batch(*place) for place in self._plan(step)]
        if self._waiting and self._waiting[0][0] != step:
            self._waiting.clear()
        begin = self._waiting[-1][0] + 1 if self._waiting else step
        try:
            for ahead in range(begin, step + _AHEAD * self._workers + 1):
                futures = self._submit(self._pool, self._plan(ahead))
                self._waiting.append((ahead, futures))
            _, futures = self._waiting.popleft()
            return [_as_tensors(future.result()) for future in futures]
        except BrokenProcessPool as reason:
            raise DataError(
                "train.loader_workers: a process that reads data died; fix by going on with "
                "gla resume, with fewer workers if memory ran out"
            ) from reason

    def _submit(self, pool: ProcessPoolExecutor, places: Sequence[Request]) -> list[Future[Any]]:
        """Ask for batches; this starts workers until there are enough."""
        if len(self._processes) == self._workers:
            return [pool.submit(_read, place) for place in places]
        others = set(multiprocessing.active_children()) - self._processes
        with started_deaf(*STOPS):  # the last steps before a stop need batches too
            futures = [pool.submit(_read, place) for place in places]
        self._processes = set(multiprocessing.active_children()) - others
        return futures

    def close(self) -> None:
        """End the workers."""
        for process in self._processes:  # they are deaf to the SIGTERM of a pool that broke
            process.kill()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


_source: list[Source] = []  # of a worker


def _start(source: Source) -> None:
    exit_with_parent()
    torch.set_num_threads(1)
    _source.append(source)


def _read(place: Request) -> tuple[type, list[Any]]:
    """Return a batch as arrays: tensors would travel through files in shared memory."""
    batch = _source[0].batch(*place)
    return type(batch), [tensor.numpy() for tensor in batch]


def _as_tensors(batch: tuple[type, list[Any]]) -> Any:
    kind, arrays = batch
    return kind(*map(torch.from_numpy, arrays))
