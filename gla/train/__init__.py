"""Training: recipes, the loop, checkpoints, what is measured on the way.

``gla.train(config, run="runs/name")`` trains: the package itself is callable, so that this reads
in Python as on the command line. Sub-modules are imported on first use.
"""

from __future__ import annotations

import importlib
import sys
import types
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
    def __call__(self, config: Any, run: Any, **options: Any) -> Any:
        """See ``gla.train.loop.train``."""
        from gla.train.loop import train

        return train(config, run, **options)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"gla.train.{name}")
    raise AttributeError(f"module 'gla.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _TrainPackage
