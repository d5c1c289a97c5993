"""Train, die, resume: run by test_resume.py in a process of its own; forks before torch works.

Usage: kill_driver.py FOLDER [KILLS]. Reads the recipes FOLDER/RECIPE.toml: "plain", and others that
are killed at random moments, KILLS times. Writes FOLDER/NAME (a run) for each scenario, an unbroken
FOLDER/RECIPE, and prints one line of JSON, {NAME: [exit code or minus the signal of each process]}.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
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
    "before-prune": ("gla.train.kept:prune", 3),
    "while-pruning": ("gla.train.kept:shutil.rmtree", 1),
    "in-a-step": ("gla.train.objective:count_targets", 12),
    "between-update-and-log": ("gla.train.monitor:Monitor.record", 4),
    "in-evaluation": ("gla.train.objective:evaluate", 2),
    "before-the-first-checkpoint": ("gla.train.objective:count_targets", 3),
    "in-creation": ("gla.train.run_folder:storage.write_bytes_atomic", 2),
}


STEP = "gla.train.objective:count_targets"  # called for each micro-batch


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


def at_given_moments(folder: Path) -> dict[str, list[int]]:
    """Let the plain recipe die, and be stopped, in given calls."""
    codes: dict[str, list[int]] = {}

    def start(name: str) -> object:
        return train(load_recipe(folder / "plain.toml"), folder / name, device="cpu")

    for name, death in DEATHS.items():
        again = start if name == "in-creation" else lambda n: resume(folder / n, device="cpu")
        codes[name] = [
            in_child(lambda n=name, d=death: (die_in_call(*d), start(n))),
            in_child(lambda n=name, a=again: a(n)),
        ]
    for name, signals in {
        "sigint": (signal.SIGINT,),
        "sigterm": (signal.SIGTERM,),
        "sigterm-twice": (signal.SIGTERM, signal.SIGTERM),
    }.items():
        codes[name] = [
            in_child(lambda n=name, s=signals: (die_in_call(STEP, 10, s), start(n))),
            in_child(lambda n=name: resume(folder / n, device="cpu")),
        ]
    return codes


def at_random(folder: Path, recipe: str, kills: int, longest: float) -> list[int]:
    """Kill a run again and again, each time within ``longest`` seconds, then let it end."""
    run = folder / f"{recipe}-killed"
    rng = random.Random(0)
    config = load_recipe(folder / f"{recipe}.toml")
    codes = [in_child(lambda: (die_in_call(STEP, 4), train(config, run, device="cpu")))]
    while codes.count(-signal.SIGKILL) < kills:
        codes.append(in_child(lambda: resume(run, device="cpu"), rng.uniform(0, longest)))
        if codes[-1] == 0:  # it was quick: begin again
            shutil.rmtree(run)
            codes.append(in_child(lambda: (die_in_call(STEP, 4), train(config, run, device="cpu"))))
    codes.append(in_child(lambda: resume(run, device="cpu")))
    return codes


def main(folder: Path, kills: int) -> dict[str, list[int]]:
    """Run every scenario."""
    torch.set_num_threads(1)
    codes: dict[str, list[int]] = {}
    # Unbroken, in this process: what it loads and sets up once, no forked one has to.
    recipes = sorted(path.stem for path in folder.glob("*.toml"))
    for recipe in recipes:
        train(load_recipe(folder / f"{recipe}.toml"), folder / recipe, device="cpu")
    for recipe in recipes:
        if recipe == "plain":
            codes |= at_given_moments(folder)
        elif recipe == "workers":  # which take seconds to start
            codes[recipe] = at_random(folder, recipe, 1, 0.0)
        else:
            codes[recipe] = at_random(folder, recipe, kills, 0.6)
    return codes


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
