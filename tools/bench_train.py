"""What checkpoints cost: seconds a step with them and without, in turn, on one prepared data set.

python tools/bench_train.py --data data/stdlib-2048 --interval 20 --steps 60 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from gla.cli import recipes
from gla.train.config import load_recipe
from gla.train.loop import train


def seconds_a_step(recipe: str, data: str, steps: int, interval: int) -> float:
    """Train and return the wall time of a step, from the first one to the last checkpoint."""
    overrides = {
        "data.path": data,
        "train.steps": str(steps),
        "checkpoint.interval": str(interval),
        "eval.interval": str(10**9),
        "eval.batches": "1",
        "metrics.interval": "1",
    }
    config = load_recipe(recipes.find(recipe), overrides.items())
    times: list[float] = []
    from gla.train.monitor import Monitor

    original = Monitor.advance

    def advance(self: Monitor, step: int) -> None:
        times.append(time.perf_counter())
        original(self, step)

    Monitor.advance = advance
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(config, Path(folder) / "run", device="cpu")
    finally:
        Monitor.advance = original
    # The first interval sets up the disk and the memory, the last step evaluates.
    first = min(interval, steps // 3)
    return (times[-1] - times[first]) / (len(times) - 1 - first)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--data", required=True, help="a folder of gla data prepare")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    plain, saving = [], []
    for _ in range(options.rounds):
        plain.append(seconds_a_step(options.recipe, options.data, options.steps, 10**9))
        saving.append(seconds_a_step(options.recipe, options.data, options.steps, options.interval))
    a, b = statistics.median(plain), statistics.median(saving)
    print(f"without checkpoints     {a * 1e3:.1f} ms a step  {[round(x * 1e3) for x in plain]}")
    print(f"every {options.interval} steps          {b * 1e3:.1f} ms a step  "
          f"{[round(x * 1e3) for x in saving]}")  # fmt: skip
    print(f"overhead                {b / a - 1:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
