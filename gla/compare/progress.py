"""What a comparison shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gla.compare import plan as plans
from gla.compare.statistics import estimate
from gla.train.monitor import say

_TAIL_BYTES = 4096


class Progress:
    """Use as a context manager.

    Args:
        made: The plan.
        out: Folder of the comparison.
    """

    def __init__(self, made: plans.Plan, out: Path) -> None:
        self._made, self._out = made, out
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False)
        self._total = plans.number_of_cells(made)
        self._finished = 0
        self._testing: set[str] = set()
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def testing(self, folder: str) -> None:
        """Say that a cell is trained and its tests have begun."""
        self._testing.add(folder)
        if not self._console.is_terminal:  # there the table says so
            say(f"{_short(folder)}: trained, the tests have begun")

    def done(self, folder: str, result: dict[str, Any]) -> None:
        """Say that a cell is finished."""
        self._finished += 1
        name, _ = plans.measure_of({folder: result})
        value = plans.value_of(result, name)
        figure = result["status"] if value is None else f"{name} {value:.4f}"
        times = "".join(
            f", {word} {result[key]:.0f} s"
            for word, key in (("trained", "train_seconds"), ("tested", "test_seconds"))
            if key in result
        )
        self._say(f"{_short(folder)}: {figure}{times} ({self._finished} new)")

    def failed(self, folder: str, error: str) -> None:
        """Say that a cell failed."""
        self._say(f"{_short(folder)}: failed: {error}")

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def show(self, results: plans.Results, running: list[str]) -> None:
        """Draw the table anew."""
        if self._console.is_terminal:
            self._live.update(self._table(results, running), refresh=True)

    def _table(self, results: plans.Results, running: list[str]) -> Table:
        minutes = (time.monotonic() - self._began) / 60
        title = f"{len(results)} of {self._total} cells finished, {minutes:.0f} min"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        tasks = list(self._made.suite.tasks)
        for heading in ("", *tasks):
            table.add_column(heading, justify="right" if heading else "left")
        entries = {(e.task, e.variant): e for e in self._made.entries}
        for variant in self._made.suite.variants:
            cells = (self._text(entries[task, variant], results, running) for task in tasks)
            table.add_row(variant, *cells)
        return table

    def _text(self, entry: plans.Entry, results: plans.Results, running: list[str]) -> str:
        chosen = plans.chosen_cells(self._made, entry, results)
        done = [results[c.folder] for c in chosen if c.folder in results]
        name, _ = plans.measure_of({str(i): result for i, result in enumerate(done)})
        values = [v for result in done if (v := plans.value_of(result, name)) is not None]
        text = f"{estimate(values).mean:.3f} ({len(values)})" if values else "–"
        prefix = f"cells/{entry.task}/{entry.variant}/"
        steps = entry.recipe["train"].get("steps", 1)
        for folder in running:
            if folder.startswith(prefix):
                share = f"{last_step(self._out / folder) / steps:.0%}"
                text += f" · {'tests' if folder in self._testing else share}"
        return text


def last_step(folder: Path) -> int:
    """Return the last step in a cell's metrics.jsonl; 0 where there is none."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
        return next((int(step) for line in reversed(lines) if (step := _step(line))), 0)
    except OSError:
        return 0


def _step(line: bytes) -> int | None:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def _short(folder: str) -> str:
    """cells/TASK/VARIANT/lr-…-seed-…-digest -> TASK VARIANT lr-…-seed-…."""
    _, task, variant, rest = folder.split("/")
    return f"{task} {variant} {rest.rpartition('-')[0]}"
