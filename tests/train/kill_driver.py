"""Train, die, resume: run by test_resume.py in a process of its own; forks before torch works.

Usage: kill_driver.py RECIPE.toml FOLDER. Writes FOLDER/NAME (a run) for each scenario and prints
one line of JSON, {NAME: [exit code or minus the signal of each process]}.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard

from gla.train.config import load_recipe
from gla.train.loop import resume, train

# (where, the call in which the process dies): saves, logs, steps, prunes, evaluations.
DEATHS = {
    "after-model-file": ("gla.train.checkpoint:save_file", 4),
    "before-manifest": ("gla.storage:_manifest_bytes", 2),
    "before-sync": ("gla.storage:_sync_tree", 2),
    "before-rename": ("gla.storage:_move_into_place", 2),
    "before-prune": ("gla.train.checkpoint:prune", 3),
    "while-pruning": ("gla.train.checkpoint:shutil.rmtree", 1),
    "in-a-step": ("gla.train.objective:count_targets", 12),
    "between-update-and-log": ("gla.train.monitor:Monitor.record", 4),
    "in-evaluation": ("gla.train.objective:evaluate", 2),
    "before-the-first-checkpoint": ("gla.train.objective:count_targets", 3),
    "in-creation": ("gla.train.run_folder:storage.write_bytes_atomic", 2),
}


def die_in_call(where: str, number: int, signals: tuple[int, ...] = (signal.SIGKILL,)) -> None:
    """Make the process send itself signals when a function is called for the n-th time."""
    module, _, path = where.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = iter(range(1, sys.maxsize))

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            for one in signals:
                os.kill(os.getpid(), one)
        return original(*arguments, **options)

    setattr(owner, name, wrapper)


def in_child(action: Callable[[], object], kill_after: float | None = None) -> int:
    """Run in a forked process; return its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException as reason:
            print(repr(reason), file=sys.stderr)
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(recipe: str, folder: Path) -> dict[str, list[int]]:
    """Run every scenario."""
    torch.set_num_threads(1)
    codes: dict[str, list[int]] = {}

    def start(name: str) -> object:
        return train(load_recipe(recipe), folder / name, device="cpu")

    def go_on(name: str) -> object:
        return resume(folder / name, device="cpu")

    codes["straight"] = [in_child(lambda: start("straight"))]
    for name, death in DEATHS.items():
        again = start if name == "in-creation" else go_on
        codes[name] = [
            in_child(lambda n=name, d=death: (die_in_call(*d), start(n))),
            in_child(lambda n=name, a=again: a(n)),
        ]
    step = "gla.train.objective:count_targets"
    for name, signals in {
        "sigint": (signal.SIGINT,),
        "sigterm": (signal.SIGTERM,),
        "sigterm-twice": (signal.SIGTERM, signal.SIGTERM),
    }.items():
        codes[name] = [
            in_child(lambda n=name, s=signals: (die_in_call(step, 10, s), start(n))),
            in_child(lambda n=name: go_on(n)),
        ]
    rng = random.Random(0)
    codes["random"] = [in_child(lambda: (die_in_call(step, 3), start("random")))]
    for _ in range(12):
        codes["random"].append(in_child(lambda: go_on("random"), rng.uniform(0.1, 0.6)))
    codes["random"].append(in_child(lambda: go_on("random")))
    return codes


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
