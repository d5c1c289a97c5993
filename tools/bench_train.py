"""What checkpoints cost: seconds a step with them and without, in turn, on one prepared data set.

python tools/bench_train.py --data data/stdlib-2048 --interval 20 --steps 60 --rounds 3

Two runs differ by some per cent for reasons of their own, more than checkpoints cost. So the time
that one checkpoint adds is also taken from within a run: the steps during which it is copied and
written, against the median of the steps during which none is.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from gla.cli import recipes
from gla.train.config import load_recipe
from gla.train.loop import train
from gla.train.monitor import Monitor
from gla.train.trainer import Trainer
from gla.train.writer import CheckpointWriter


class Times(NamedTuple):
    """A run by the clock, in seconds.

    Attributes:
        steps: When each step ended.
        saves: When each checkpoint was begun (with its copy), and was whole on the disk.
    """

    steps: list[float]
    saves: list[tuple[float, float]]


class Cost(NamedTuple):
    """What a checkpoint adds.

    Attributes:
        seconds: Sum over the steps that a checkpoint touches of their time less the median one.
        median: Seconds of a step that none touches.
        checkpoints: How many were looked at.
        steps: How many steps one touches.
    """

    seconds: float
    median: float
    checkpoints: int
    steps: float


def times_of(recipe: str, data: str, steps: int, interval: int) -> Times:
    """Train, and return when steps and checkpoints ended."""
    overrides = {
        "data.path": data,
        "train.steps": str(steps),
        "checkpoint.interval": str(interval),
        "eval.interval": str(10**9),
        "eval.batches": "1",
        "metrics.interval": "1",
    }
    config = load_recipe(recipes.find(recipe), overrides.items())
    ends: list[float] = []
    begun: list[float] = []
    written: list[float] = []
    advance, save, write = Monitor.advance, Trainer._save, CheckpointWriter._write

    def timed_advance(self: Monitor, step: int) -> None:
        ends.append(time.perf_counter())
        advance(self, step)

    def timed_save(self: Trainer, *arguments: Any) -> None:
        begun.append(time.perf_counter())
        save(self, *arguments)

    def timed_write(self: CheckpointWriter, *arguments: Any) -> None:
        write(self, *arguments)
        written.append(time.perf_counter())

    with (
        mock.patch.object(Monitor, "advance", timed_advance),
        mock.patch.object(Trainer, "_save", timed_save),
        mock.patch.object(CheckpointWriter, "_write", timed_write),
        tempfile.TemporaryDirectory() as folder,
    ):
        train(config, Path(folder) / "run", device="cpu")
    return Times(ends, list(zip(begun, written, strict=True)))


def seconds_a_step(times: Times, interval: int) -> float:
    """Return the mean time of a step, from the end of the first interval to the last step."""
    # The first interval sets up the disk and the memory; the last step evaluates after its end.
    ends = times.steps
    first = min(interval, len(ends) // 3)
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


def cost_of_a_checkpoint(runs: Sequence[Times]) -> Cost | None:
    """Return what a checkpoint adds to its run, or None where no checkpoint was whole in time.

    The first step of a run, and its first checkpoint, set up memory and disk: they are left out.
    """
    added, touched, medians, count = 0.0, 0, [], 0
    for ends, saves in runs:
        spans = list(itertools.pairwise(ends))
        within = [[begin < b and a < end for a, b in spans] for begin, end in saves]
        still = [b - a for i, (a, b) in enumerate(spans) if not any(row[i] for row in within)]
        if not still:
            continue
        median = statistics.median(still)
        for (_, end), row in list(zip(saves, within, strict=True))[1:]:
            if end > ends[-1]:
                continue
            during = [b - a for (a, b), inside in zip(spans, row, strict=True) if inside]
            added += sum(during) - len(during) * median
            touched += len(during)
            count += 1
        medians.append(median)
    if not count:
        return None
    return Cost(added / count, statistics.median(medians), count, touched / count)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--data", required=True, help="a folder of gla data prepare")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    plain, saving = [], []
    for _ in range(options.rounds):
        plain.append(times_of(options.recipe, options.data, options.steps, 10**9))
        saving.append(times_of(options.recipe, options.data, options.steps, options.interval))
    without, with_them = (
        [seconds_a_step(times, options.interval) for times in runs] for runs in (plain, saving)
    )
    a, b = statistics.median(without), statistics.median(with_them)
    print(f"without checkpoints     {a * 1e3:.1f} ms a step  {[round(x * 1e3) for x in without]}")
    print(f"every {options.interval} steps          {b * 1e3:.1f} ms a step  "
          f"{[round(x * 1e3) for x in with_them]}")  # fmt: skip
    print(f"overhead                {b / a - 1:+.1%}")
    cost = cost_of_a_checkpoint(saving)
    if cost is None:
        print("one checkpoint adds     n/a: none was whole before the last step; more --steps")
        return 0
    own = load_recipe(recipes.find(options.recipe)).checkpoint.interval
    print(f"one checkpoint adds     {cost.seconds * 1e3:.1f} ms, over {cost.steps:.1f} steps "
          f"(of {cost.checkpoints} checkpoints; a step without takes "
          f"{cost.median * 1e3:.1f} ms)")  # fmt: skip
    print(f"every {own} steps, as the recipe says: {cost.seconds / (own * cost.median):+.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
