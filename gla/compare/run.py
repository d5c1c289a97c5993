"""``gla compare``: run what is missing of a suite, show it, and write the report."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gla import storage
from gla.compare import plan as plans
from gla.compare.cell import data_of, write_spec
from gla.compare.progress import Progress
from gla.compare.report import write_report
from gla.compare.suite import ENCODER, TEXT, Suite, recipe_of
from gla.compare.workers import Workers
from gla.errors import ConfigError, DataError, GlaError
from gla.train.config import DataConfig, build
from gla.train.device import resolve_device
from gla.train.inputs import fingerprints_of, is_prepared, make_ready
from gla.train.monitor import say

_TICK_S = 0.5
_MOST_FAILURES = 3


class ComparisonError(GlaError):
    """Cells that could not be trained; what is finished stays."""


def compare(
    suite: Suite, out: str | Path, *, jobs: int | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Run the cells of a suite that are not finished, and write the report.

    Args:
        suite: See ``gla.compare.suite.load_suite``.
        out: Folder of the comparison; finished cells in it are used again.
        jobs: Processes at a time; None: one for each core of the CPU, or for each GPU.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".

    Returns:
        What report.json says.

    Raises:
        ConfigError: The suite is wrong, or another process works in ``out``.
        DataError: The data are missing, or a result is damaged.
        ComparisonError: Cells failed.
        KeyboardInterrupt, SystemExit: After a signal; the cells in work are saved.
    """
    out = Path(out)
    devices, threads = share(resolve_device(device), jobs)
    with _locked(out):
        _prepare(suite)
        made = plans.plan(suite)
        results = _finished(made, out)
        with _ending_on_sigterm(), Progress(made, out) as progress:
            _run(made, out, results, devices, threads, progress)
        return write_report(made, results, out)


def share(device: torch.device, jobs: int | None) -> tuple[list[str], int]:
    """Return a device for each worker, and the threads of each: at most those of this process.

    Raises:
        ConfigError: Fewer than one job.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs: got {jobs}, expected at least 1; fix jobs")
    affinity = getattr(os, "sched_getaffinity", None)  # where the system has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    gpus = [str(device)]
    if device.type == "cuda" and device.index is None:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    jobs = jobs or (cores if device.type == "cpu" else len(gpus))
    threads = min(cores // jobs, torch.get_num_threads())  # so OMP_NUM_THREADS counts
    return [gpus[i % len(gpus)] for i in range(jobs)], max(1, threads)


def _prepare(suite: Suite) -> None:
    """Prepare the data of text tasks, before anything needs their vocabulary."""
    for task, table in suite.tasks.items():
        if table.get("kind") in (TEXT, ENCODER):
            _, recipe = recipe_of(suite, task, suite.baseline)
            make_ready(build(recipe).data, say)


def _run(
    made: plans.Plan,
    out: Path,
    results: plans.Results,
    devices: list[str],
    threads: int,
    progress: Progress,
) -> None:
    waiting = [c for c in plans.known_cells(made, results) if c.folder not in results]
    if not waiting:
        return
    failed: dict[str, str] = {}
    with Workers(
        out, devices[: max(1, plans.number_of_cells(made) - len(results))], threads
    ) as pool:
        while True:
            waiting = [
                cell
                for cell in plans.known_cells(made, results)
                if cell.folder not in results and cell.folder not in failed
                if cell.folder not in pool.running
            ]
            for cell in waiting[: pool.idle]:
                write_spec(out / cell.folder, cell.facts())
                pool.give(cell.folder)
            if not pool.running:
                break
            for outcome in pool.poll(_TICK_S):
                if outcome.testing:
                    progress.testing(outcome.folder)
                    continue
                if outcome.result is not None:
                    results[outcome.folder] = outcome.result
                    progress.done(outcome.folder, outcome.result)
                    continue
                failed[outcome.folder] = outcome.error
                progress.failed(outcome.folder, outcome.error)
                if outcome.by_user or len(failed) >= _MOST_FAILURES:
                    raise ComparisonError(_describe(failed))
            progress.show(results, pool.running)
    if failed:
        raise ComparisonError(_describe(failed))


def _describe(failed: dict[str, str]) -> str:
    return "\n".join(
        f"{folder}: got {error}, expected a finished cell; fix it and run the command again"
        for folder, error in failed.items()
    )


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    def busy(process: str) -> ConfigError:
        return ConfigError(
            f"{out}: got a comparison that process {process} runs, expected no other one there; "
            "fix by waiting for it or with another --out"
        )

    storage.make_folder(out, "--out")
    with storage.locked(out / ".lock", busy):
        yield


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process in order, as Ctrl-C does."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    try:
        old = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def report_only(suite: Suite, out: str | Path) -> dict[str, Any]:
    """Write the report of what is finished, and return what report.json says.

    Raises:
        ConfigError: The suite is wrong, or no cell of it is finished in ``out``.
        DataError: A result is damaged, or of other data than those that stand there now.
    """
    out = Path(out)
    made = plans.plan(suite)
    if not out.is_dir():
        raise ConfigError(f"{out}: got no folder, expected that of a comparison; fix --out")
    results = _finished(made, out)
    if not results:
        raise ConfigError(
            f"{out}: got no finished cell of this suite, expected some; fix --out, or give the "
            "--size and the overrides with which it was run"
        )
    return write_report(made, results, out)


def describe(suite: Suite) -> dict[str, Any]:
    """Return what would be run: entries with parameters and widths, and the number of cells."""
    made = plans.plan(suite)
    entries = []
    for entry in made.entries:
        config = build(entry.recipe)
        entries.append(
            {
                "task": entry.task,
                "variant": entry.variant,
                "parameters": entry.parameters,
                "d_model": config.model.d_model,
                "mlp_ratio": config.model.mlp_ratio,
                "steps": config.train.steps,
                "batch": config.train.global_batch_size,
                "seq_len": config.train.seq_len,
                "rates": entry.rates,
            }
        )
    return {"entries": entries, "cells": plans.number_of_cells(made)}


def _finished(made: plans.Plan, out: Path) -> plans.Results:
    """Results that are there: first those of the sweeps, then those that follow from them.

    Raises:
        DataError: One is damaged, or of other data than those that stand there now.
    """
    results = plans.finished(out, plans.known_cells(made, {}))
    cells = plans.known_cells(made, results)
    results |= plans.finished(out, cells)
    now: dict[str, dict[str, str]] = {}
    for cell in cells:
        if cell.folder in results and cell.options["kind"] in (TEXT, ENCODER):
            _check_data(out / cell.folder, build(cell.recipe).data, now)
    return results


def _check_data(folder: Path, data: DataConfig, now: dict[str, dict[str, str]]) -> None:
    """Compare a cell's data with what stands at their path; ``now`` keeps what was read there."""
    if not is_prepared(data):
        return  # a report is written where there are no data
    if data.path not in now:
        now[data.path] = fingerprints_of(data)
    if data_of(folder) not in (None, now[data.path]):
        raise DataError(
            f"{folder}: got a result on other data than {data.path} holds now, expected the same; "
            "fix with another --out, or by removing that folder: the cell is computed again"
        )
