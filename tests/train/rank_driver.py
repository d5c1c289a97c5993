"""Two processes that train one model, in which something goes wrong: run by test_distributed.py.

Usage: rank_driver.py FOLDER. Reads FOLDER/recipe.toml, writes FOLDER/NAME (a run) for each scenario
and what each process said into FOLDER/NAME-RANK.txt, and prints one line of JSON: {NAME: {"codes":
[exit code, or minus the signal, of each rank], "seconds": from the first end to the last}}.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.tensorboard

from gla.errors import GlaError
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig, load_recipe
from gla.train.distributed import Ranks
from gla.train.loop import resume, train

Prepare = Callable[[int], object]  # called with the rank in its process


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(ranks: int, action: Callable[[int], object], out: Path, name: str) -> dict[str, Any]:
    """Fork one process a rank and wait for all; what is stopped for good is killed."""
    port = free_port()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            log = os.open(out / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 2)
            os._exit(run_to_exit_code(lambda r=rank: action(r)))
        pids.append(pid)
    codes: list[int | None] = [None] * ranks
    ends: list[float] = []
    deadline = time.monotonic() + 60
    while None in codes:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            time.sleep(0.01)
            if (ends and time.monotonic() > ends[0] + 12) or time.monotonic() > deadline:
                for rank, code in enumerate(codes):
                    if code is None:
                        os.kill(pids[rank], signal.SIGKILL)
            continue
        if os.WIFSTOPPED(status):
            ends.append(time.monotonic())
            continue
        codes[pids.index(pid)] = os.waitstatus_to_exitcode(status)
        ends.append(time.monotonic())
        stopped = [p for p, c in zip(pids, codes, strict=True) if c is None]
        if len(ends) == ranks and stopped:  # one is stopped, the other one has ended
            os.kill(stopped[0], signal.SIGKILL)
    return {"codes": codes, "seconds": ends[min(1, len(ends) - 1)] - ends[0]}


def run_to_exit_code(action: Callable[[], object]) -> int:
    try:
        action()
        return 0
    except GlaError as reason:
        print(f"{type(reason).__name__}: {reason}", file=sys.stderr, flush=True)
        return reason.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException as reason:
        print(repr(reason), file=sys.stderr, flush=True)
        return 99


def in_step(step: int, rank: int, action: Callable[[], object]) -> Prepare:
    """Do something in a rank as a step begins to compute."""

    def prepare(own: int) -> None:
        if own != rank:
            return
        original = Ranks.sum
        calls = [0]

        def wrapper(self: Ranks, values: Any) -> list[float]:
            calls[0] += 1
            if calls[0] == 2 * step - 1:  # two sums a step: of the targets, and of the loss
                action()
            return original(self, values)

        Ranks.sum = wrapper

    return prepare


def nan_loss(rank: int) -> None:
    """Make rank 1's loss NaN in step 3."""
    if rank == 0:
        return
    original = LanguageModel.loss
    calls = [0]

    def loss(self: LanguageModel, *arguments: Any, **options: Any) -> torch.Tensor:
        value = original(self, *arguments, **options)
        calls[0] += self.training
        return value * math.nan if calls[0] == 4 else value  # the first one is the rehearsal

    LanguageModel.loss = loss  # pyright: ignore[reportAttributeAccessIssue]


def other_collective_in_rank_1(rank: int) -> None:
    """What TORCH_DISTRIBUTED_DEBUG=DETAIL is for, which tests run with."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    in_step(3, 1, dist.barrier)(rank)


def terminate(*signals: int) -> Callable[[], None]:
    def send() -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    return send


def main(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = load_recipe(folder / "recipe.toml")
    train(config, folder / "one", device="cpu")  # in this process: what it sets up, no fork has to
    results: dict[str, Any] = {}

    def scenario(name: str, prepare: Prepare, change: Callable[[int], RunConfig] | None = None):
        def action(rank: int) -> None:
            prepare(rank)
            own = change(rank) if change else config
            train(own, folder / name, device="cpu")

        results[name] = start(2, action, folder, name)

    def other_lr(rank: int) -> RunConfig:
        optim = config.optim.model_copy(update={"lr": config.optim.lr * (1 + rank)})
        return config.model_copy(update={"optim": optim})

    def short(_: int) -> RunConfig:
        return config.model_copy(update={"train": config.train.model_copy(update={"timeout_s": 2})})

    scenario("two", lambda rank: None)
    scenario("nan", nan_loss)
    scenario("killed", in_step(3, 1, terminate(signal.SIGKILL)))
    scenario("stopped", in_step(3, 1, terminate(signal.SIGSTOP)), short)
    scenario("stopped-first", in_step(3, 0, terminate(signal.SIGSTOP)), short)
    scenario("differs", lambda rank: None, other_lr)
    scenario("sigterm", in_step(3, 1, terminate(signal.SIGTERM)))
    scenario("sigterm-twice", in_step(3, 1, terminate(signal.SIGTERM, signal.SIGTERM)))
    scenario("mismatched", other_collective_in_rank_1)
    for name, first, then in (("two-one", 2, 1), ("one-two", 1, 2)):
        stop = in_step(3, 0, terminate(signal.SIGTERM))

        def begin(rank: int, name: str = name, stop: Prepare = stop) -> None:
            stop(rank)
            train(config, folder / name, device="cpu")

        def go_on(rank: int, name: str = name) -> None:
            resume(folder / name, device="cpu")

        results[f"{name}-begin"] = start(first, begin, folder, f"{name}-begin")
        results[name] = start(then, go_on, folder, name)
    shutil.copytree(folder / "two", folder / "back")
    results["back"] = start(
        2, lambda rank: resume(folder / "back", step=2, device="cpu"), folder, "back"
    )
    return results


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
