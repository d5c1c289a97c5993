"""Language models on a gated recurrence over a matrix state.

Names are resolved on first use, so that ``import gla`` and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gla.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DistributedError,
    GlaError,
    NumericsError,
    StateError,
)

if TYPE_CHECKING:
    from gla import compare, data, errors, generate, layers, models, ops, state, testing, train
    from gla.generate.session import Session
    from gla.layers.mixer import register_mixer
    from gla.models.config import ModelConfig, presets
    from gla.models.encoder import Encoder, EncoderConfig
    from gla.models.language_model import LanguageModel
    from gla.ops.gated_linear_attention import Output, checks, gated_linear_attention
    from gla.state import LayerState, LinearState, ModelState

__version__ = "0.1.0"

_NAMES = {
    "gated_linear_attention": "gla.ops.gated_linear_attention",
    "Output": "gla.ops.gated_linear_attention",
    "checks": "gla.ops.gated_linear_attention",
    "LinearState": "gla.state",
    "LayerState": "gla.state",
    "ModelState": "gla.state",
    "register_mixer": "gla.layers.mixer",
    "ModelConfig": "gla.models.config",
    "presets": "gla.models.config",
    "LanguageModel": "gla.models.language_model",
    "Encoder": "gla.models.encoder",
    "EncoderConfig": "gla.models.encoder",
    "Session": "gla.generate.session",
}
_MODULES = (
    "compare", "data", "errors", "generate", "layers", "models", "ops", "state", "testing", "train"
)  # fmt: skip

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "Encoder",
    "EncoderConfig",
    "GlaError",
    "LanguageModel",
    "LayerState",
    "LinearState",
    "ModelConfig",
    "ModelState",
    "NumericsError",
    "Output",
    "Session",
    "StateError",
    "__version__",
    "checks",
    "compare",
    "data",
    "errors",
    "gated_linear_attention",
    "generate",
    "layers",
    "models",
    "ops",
    "presets",
    "register_mixer",
    "state",
    "testing",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"gla.{name}")
    raise AttributeError(f"module 'gla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
