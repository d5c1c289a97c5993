"""Time and peak memory of a call."""

from __future__ import annotations

import ctypes
import gc
import math
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def best_time(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest of the runs that fit into a time, after one to warm up.

    At least one run counts; where the first alone takes longer than ``seconds``, it is that.
    """
    before = time.perf_counter()
    _finish(run, device)
    first = time.perf_counter() - before
    if first > seconds:
        return first
    shortest, start = math.inf, time.perf_counter()
    while shortest == math.inf or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        _finish(run, device)
        shortest = min(shortest, time.perf_counter() - before)
    return shortest


def peak_memory_of(run: Callable[[], Any], device: torch.device) -> int | None:
    """Return the most bytes that a call needs at a time, beside what is there before.

    On a GPU what its allocator gave; on Linux the resident memory of this process; elsewhere, and
    where the kernel does not let the peak be reset, None.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _finish(run, device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or sys.platform != "linux":
        return None
    _give_back_free_memory()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again from here
    except OSError:
        return None
    before = _resident("VmRSS")
    _finish(run, device)
    return max(0, _resident("VmHWM") - before)


def available_memory(device: torch.device) -> int | None:
    """Return the bytes that can be had, or None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = re.search(r"MemAvailable:\s+(\d+)", file.read())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _finish(run: Callable[[], Any], device: torch.device) -> None:
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _give_back_free_memory() -> None:
    """Let the C library return what it holds, so that its use again shows."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        found = re.search(rf"{name}:\s+(\d+)", file.read())
    assert found is not None
    return int(found[1]) * 1024
