"""Small models of every preset and hybrids, with weights large enough that all parts matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel

MIXERS = {
    "conv": {"kind": "linear_attention", "num_heads": 2, "conv_width": 4},
    "kernel": {
        "kind": "linear_attention",
        "gate": "head",
        "num_heads": 2,
        "feature_map": "elu",
        "normalize": True,
    },
    "ring": {"kind": "softmax_attention", "num_heads": 2, "window": 5},
    "full": {"kind": "softmax_attention", "num_heads": 2},
}
PATTERNS = {
    "gla": ["gla*2"],
    "linear": ["linear*2"],
    "softmax": ["softmax*2"],
    "window": ["window", "ring"],
    "hybrid": ["full", "conv", "ring", "kernel"],
}


def make_model(
    layers: list[str], dtype: torch.dtype = torch.float64, gain: float = 10.0, **options: Any
) -> LanguageModel:
    """A model of width 16 over 32 tokens; ``gain`` multiplies the weights of its linear maps."""
    torch.manual_seed(0)
    used = {name.split("*")[0] for name in layers}
    mixers = {name: table for name, table in MIXERS.items() if name in used}
    config = ModelConfig(d_model=16, vocab_size=32, layers=layers, mixers=mixers, **options)
    model = LanguageModel(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p *= gain
    return model


@pytest.fixture
def make() -> Callable[..., LanguageModel]:
    return make_model


@pytest.fixture(params=PATTERNS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return make_model(PATTERNS[request.param])


@pytest.fixture
def hybrid() -> LanguageModel:
    return make_model(PATTERNS["hybrid"])
