"""Processes of ours that must not outlive the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def exit_with_parent() -> None:
    """Let this process end when its parent does, even by a SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
