"""Training: recipes, the loop, checkpoints, what is measured on the way.

The package itself is callable, so that training reads in Python as on the command line::

    gla.train(config, run, device="auto", sampler=None)

    config   a recipe: the path of a TOML file, its tables as a dict, or a checked RunConfig
    run      the folder to write, which must hold no run yet
    device   "auto", "cpu", "cuda", "cuda:N" or "mps"
    sampler  called with the model and the tokenizer at each evaluation: text for samples/

It returns the run's folder, the last step and the figures of the last evaluation. Its errors, and
``resume``, are in ``gla.train.loop``. Sub-modules are imported on first use.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gla.train import (
        checkpoint,
        config,
        device,
        distributed,
        encoder_objective,
        evaluate,
        evaluate_encoder,
        flops,
        inputs,
        kept,
        loop,
        monitor,
        objective,
        objective_config,
        optim,
        plan,
        rehearsal,
        report,
        run_folder,
        schedule,
        section,
        signals,
        trainer,
        update,
        writer,
    )
    from gla.train.config import RunConfig
    from gla.train.loop import Result
    from gla.train.objective import Sampler

__all__ = [
    "checkpoint",
    "config",
    "device",
    "distributed",
    "encoder_objective",
    "evaluate",
    "evaluate_encoder",
    "flops",
    "inputs",
    "kept",
    "loop",
    "monitor",
    "objective",
    "objective_config",
    "optim",
    "plan",
    "rehearsal",
    "report",
    "run_folder",
    "schedule",
    "section",
    "signals",
    "trainer",
    "update",
    "writer",
]


class _TrainPackage(types.ModuleType):
    def __call__(
        self,
        config: RunConfig | Mapping[str, Any] | str | Path,
        run: str | Path,
        *,
        device: str = "auto",
        sampler: Sampler | None = None,
    ) -> Result:
        """See ``gla.train.loop.train``."""
        from gla.train.loop import train

        return train(config, run, device=device, sampler=sampler)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"gla.train.{name}")
    raise AttributeError(f"module 'gla.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _TrainPackage
