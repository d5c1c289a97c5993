"""One cell: a training of ``gla.train``, its tests, and ``result.json``.

The folder of a cell is that of a run (config.toml, env.json, log.txt, metrics.jsonl, tb/,
checkpoints/), with ``cell.json``, which says what it is, and ``result.json``, which is written
last: a cell is finished if, and only if, that is there. One that was killed goes on from its newest
checkpoint. Checkpoints go when it is finished.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gla import storage
from gla.compare.examples import Solved, TaskLearning
from gla.compare.suite import ENCODER, TEXT
from gla.compare.tasks import build_task
from gla.compare.text import TextOptions, by_length
from gla.errors import DataError, NumericsError
from gla.models.language_model import LanguageModel
from gla.state import nbytes
from gla.train import run_folder
from gla.train.config import RunConfig, build
from gla.train.device import resolve_device, resolve_precision
from gla.train.distributed import Ranks, code_digest
from gla.train.encoder_objective import start_from_pretrained
from gla.train.loop import open_objective
from gla.train.monitor import note
from gla.train.objective import LanguageModeling, Objective
from gla.train.trainer import Trainer

SPEC, ENVIRONMENT, RESULT = "cell.json", "env.json", "result.json"


class Opened(NamedTuple):
    """A cell's objective, and its recipe with all that is settled."""

    objective: Objective
    config: RunConfig


def write_spec(folder: Path, facts: Mapping[str, Any]) -> None:
    """Make a cell's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_bytes_atomic(folder / SPEC, json.dumps(facts, indent=1).encode())


def read_result(folder: Path, digest: str) -> dict[str, Any] | None:
    """Return a finished cell's result, or None where it is not finished.

    Raises:
        DataError: It is damaged, or that of another cell.
    """
    file = folder / RESULT
    try:
        result = json.loads(file.read_bytes())
        if result["digest"] != digest:
            raise ValueError("that of another cell")
        return result
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as reason:
        raise DataError(
            f"{file}: got a result that cannot be used ({reason}), expected that of the cell; "
            "fix by removing it, and the cell is computed again"
        ) from reason


def data_of(folder: Path) -> dict[str, str] | None:
    """Return the fingerprints of the data that a cell was trained on, where they are known."""
    try:
        return json.loads((folder / ENVIRONMENT).read_bytes())["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_cell(
    folder: Path, device: str, on_tests: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Train and test the cell that ``folder/cell.json`` describes; write and return its result.

    A loss that is not finite is a result too: ``status`` is then "diverged".

    Args:
        folder: Of the cell.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        on_tests: Called when training is over and the tests begin.

    Raises:
        ConfigError: The validation text is shorter than a row of the tests.
        GlaError: As training; KeyboardInterrupt or SystemExit after a signal, with a checkpoint.
    """
    spec = json.loads((folder / SPEC).read_bytes())
    place = resolve_device(device)
    config = build(spec["recipe"])
    precision = resolve_precision(config.train.precision, place)
    with run_folder.locked(folder):
        objective, config = _open(config, spec["options"], place, precision)
        with contextlib.closing(objective):
            trainer = _begin(folder, objective, config, place, precision)
            facts = _train(folder, trainer)
            if facts["status"] != "diverged":
                began = time.perf_counter()
                if _has_tests(objective, spec["options"]):
                    note(folder, f"trained {facts['train_seconds']:.0f} s; the tests begin")
                    on_tests()
                with trainer.updater.averaged():
                    facts |= _test(objective, config, spec["options"], precision)
                facts["test_seconds"] = time.perf_counter() - began
    model = objective.model
    result = {
        **{name: spec[name] for name in ("task", "variant", "lr", "seed", "digest")},
        **facts,
        "parameters": sum(p.numel() for p in model.parameters()),
        "d_model": config.model.d_model,
        "mlp_ratio": config.model.mlp_ratio,
        "state_bytes": _state_bytes(model, config.train.seq_len),
        "config": config.model_dump(mode="json", exclude_none=True),
        "options": spec["options"],
        "device": str(place),
        "precision": precision,
        "code": code_digest(),
        **run_folder.environment(),
    }
    storage.write_bytes_atomic(folder / RESULT, json.dumps(_plain(result), indent=1).encode())
    storage.remove(folder / "checkpoints")
    return _plain(result)


def _open(
    config: RunConfig, options: Mapping[str, Any], place: torch.device, precision: str
) -> Opened:
    if options["kind"] not in (TEXT, ENCODER):
        torch.manual_seed(config.train.seed)
        return Opened(TaskLearning(config, build_task(options), place, precision), config)
    opened = Opened(*open_objective(config, place, precision, Ranks(), None))
    if isinstance(opened.objective, LanguageModeling):
        there = opened.objective.inputs.val.num_tokens
        TextOptions.read(options).require(config.train.seq_len, there)
    return opened


def _begin(
    folder: Path, objective: Objective, config: RunConfig, place: torch.device, precision: str
) -> Trainer:
    """Return a trainer at the newest checkpoint, or at step 0 where none was written yet."""
    if not any((folder / "checkpoints").glob("step-*")):
        start_from_pretrained(objective.model, config)
    trainer = Trainer(config, objective, place, precision)
    if (folder / run_folder.CONFIG).exists():
        trainer.restore(folder)
    else:
        facts = {"seed": config.train.seed, "device": str(place), "precision": precision}
        facts |= {"data": objective.fingerprints, **run_folder.environment()}
        storage.write_bytes_atomic(folder / ENVIRONMENT, json.dumps(facts, indent=1).encode())
        storage.write_bytes_atomic(folder / run_folder.CONFIG, config.to_toml().encode())
    return trainer


def _train(folder: Path, trainer: Trainer) -> dict[str, Any]:
    status = "done"
    try:
        trainer.rehearse()
        trainer.fit(folder)
    except Solved:
        status = "solved"
        with trainer.updater.averaged():
            trainer.validation = trainer.objective.evaluate(True)
    except NumericsError as reason:
        return {"status": "diverged", "reason": str(reason), "steps": trainer.step, "metrics": {}}
    return {
        "status": status,
        "steps": trainer.step,
        "metrics": dict(trainer.validation),
        "train_seconds": trainer.clock["all_seconds"],
    }


def _has_tests(objective: Objective, options: Mapping[str, Any]) -> bool:
    if isinstance(objective, TaskLearning):
        return bool(objective.task.cases())
    return isinstance(objective, LanguageModeling) and bool(TextOptions.read(options).lengths)


def _test(
    objective: Objective, config: RunConfig, options: Mapping[str, Any], precision: str
) -> dict[str, Any]:
    if isinstance(objective, TaskLearning):
        return {"cases": objective.cases()}
    if not isinstance(objective, LanguageModeling):
        return {}
    read = TextOptions.read(options)
    cases, positions = by_length(
        objective.model, objective.inputs, config.train.seq_len, read, precision
    )
    return {"cases": cases, "positions": positions}


@torch.no_grad()
def _state_bytes(model: torch.nn.Module, length: int) -> int | None:
    """Bytes of the state of one sequence of the training length; None without a state."""
    if not isinstance(model, LanguageModel) or type(model) is not LanguageModel:
        return None
    tokens = torch.zeros(1, length, dtype=torch.int64, device=model.embed.weight.device)
    return nbytes(model.prefill(tokens)[1])


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
