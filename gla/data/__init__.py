"""From raw text to batches of token ids: tokenizer, corpus, prepare, packing, loader.

Sub-modules are imported on first use; only ``loader`` needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gla.data import corpus, loader, packing, prepare, shards, tokenizer, vocabulary

__all__ = ["corpus", "loader", "packing", "prepare", "shards", "tokenizer", "vocabulary"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"gla.data.{name}")
    raise AttributeError(f"module 'gla.data' has no attribute {name!r}")
