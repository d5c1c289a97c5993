"""Processes of ours that must not outlive the one that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

STOPS = (signal.SIGINT, signal.SIGTERM)  # a terminal or a scheduler sends them to a whole group


@contextlib.contextmanager
def started_deaf(*numbers: signal.Signals) -> Iterator[None]:
    """Let processes started meanwhile never receive some signals: their parent decides.

    They inherit the blocked signals, and so are deaf while they still import modules; a handler
    that they set themselves would come too late. A signal for this process waits until the end.
    """
    resource_tracker.ensure_running()  # begun with the first child, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_with_parent() -> None:
    """Let this process end when its parent does, even by a SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
