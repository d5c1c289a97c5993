"""SIGINT and SIGTERM end training after the current update; a second one ends it at once."""

from __future__ import annotations

import signal
from typing import Any


class StopSignals:
    """Notes SIGINT and SIGTERM instead of dying of the first; a second one kills at once."""

    def __init__(self) -> None:
        self.received = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread, where Python delivers signals: nothing to note
            pass
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def leave(self, number: int) -> None:
        """End as a signal would have."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _handle(self, number: int, _: object) -> None:
        if self.received:
            self.leave(number)
        self.received = number
