"""From raw text to batches of token ids: tokenizer, corpus, prepare, packing, loader.

Sub-modules are imported on first use; only ``chunks``, ``loader``, ``masking``, ``streams`` and
``workers`` need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gla.data import (
        chunks,
        corpus,
        encode,
        loader,
        masking,
        mixture,
        packing,
        prepare,
        shards,
        streams,
        tokenizer,
        vocabulary,
        workers,
    )

__all__ = [
    "chunks",
    "corpus",
    "encode",
    "loader",
    "masking",
    "mixture",
    "packing",
    "prepare",
    "shards",
    "streams",
    "tokenizer",
    "vocabulary",
    "workers",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"gla.data.{name}")
    raise AttributeError(f"module 'gla.data' has no attribute {name!r}")
