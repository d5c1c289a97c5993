"""Mixers of every kind and option, with weights large enough that all of them matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gla.layers.cache import SoftmaxState
from gla.layers.mixer import Mixer, build_mixer, mixer_config
from gla.state import named_tensors

D_MODEL = 16

LINEAR: dict[str, dict[str, Any]] = {
    "ungated": {"gate": "none", "num_heads": 2},
    "normalized": {"gate": "none", "num_heads": 2, "feature_map": "elu", "normalize": True},
    "fixed": {"gate": "fixed", "num_heads": 4, "key_dim": 12, "feature_map": "silu"},
    "head": {"gate": "head", "num_heads": 4, "num_kv_heads": 2, "value_dim": 20},
    "channel": {"gate": "channel", "num_heads": 2, "conv_width": 4},
    "channel, all options": {
        "gate": "channel",
        "num_heads": 3,
        "num_kv_heads": 1,
        "key_dim": 9,
        "value_dim": 6,
        "feature_map": "relu",
        "normalize": True,
        "output_gate": False,
        "conv_width": 2,
    },
}
MAPS: dict[str, dict[str, Any]] = {
    "layered, silu": {"gate": "fixed_by_layer", "num_heads": 4, "feature_map": "silu"},
    "rotary": {"gate": "fixed", "num_heads": 2, "rotary": True},
    "exp": {"gate": "none", "num_heads": 2, "feature_map": "exp", "normalize": True},
    "favor": {
        "gate": "none",
        "num_heads": 2,
        "feature_map": "favor",
        "num_features": 11,
        "normalize": True,
        "rotary": True,
    },
    "favor pair, gated": {
        "gate": "head",
        "num_heads": 4,
        "num_kv_heads": 2,
        "expand_k": 1.0,
        "feature_map": "favor_pair",
        "normalize": True,
    },
    "taylor": {"gate": "none", "num_heads": 2, "feature_map": "taylor", "normalize": True},
    "hedgehog": {
        "gate": "none",
        "num_heads": 4,
        "num_kv_heads": 2,
        "feature_map": "hedgehog",
        "normalize": True,
    },
    "dpfp": {"gate": "none", "num_heads": 2, "feature_map": "dpfp", "num_features": 16},
    "taylor, rotary": {"gate": "none", "key_dim": 3, "feature_map": "taylor", "rotary": True},
}
LINEAR |= MAPS
OTHERS: dict[str, dict[str, Any]] = {
    "hgrn2": {"kind": "hgrn2", "num_heads": 2},
    "reformer": {"kind": "reformer", "num_heads": 2, "buckets": 4, "rounds": 2, "window": 2},
    "reformer, one round": {"kind": "reformer", "buckets": 2, "rounds": 1, "window": 3},
    "mamba2": {"kind": "mamba2", "num_heads": 4, "state_dim": 5, "conv_width": 3},
}
SOFTMAX: dict[str, dict[str, Any]] = {
    "softmax": {"num_heads": 2},
    "grouped, no rotary": {"num_heads": 4, "num_kv_heads": 2, "rotary": False},
    "window of 1": {"num_heads": 1, "window": 1},
    "window": {"num_heads": 2, "window": 5},
    "window and first tokens": {"num_heads": 2, "window": 5, "global_tokens": 3},
    "window, as many first tokens": {"num_heads": 2, "window": 3, "global_tokens": 3},
    "random blocks": {"num_heads": 2, "window": 3, "random_blocks": 2},
    "random blocks and first tokens": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "window": 2,
        "global_tokens": 1,
        "random_blocks": 3,
    },
    "window, grouped": {"num_heads": 4, "num_kv_heads": 1, "window": 8},
}
LINFORMER_CAUSAL: dict[str, dict[str, Any]] = {
    "block-causal": {"num_heads": 2, "k": 3, "block": 4},
    "block-causal, grouped": {"num_heads": 4, "num_kv_heads": 2, "k": 2, "block": 3},
    "block-causal, blocks of 1": {"num_heads": 1, "k": 4, "block": 1, "rotary": False},
}
TABLES = {name: {"kind": "linear_attention", **table} for name, table in LINEAR.items()}
TABLES |= {name: {"kind": "softmax_attention", **table} for name, table in SOFTMAX.items()}
TABLES |= OTHERS
TABLES |= {name: {"kind": "linformer_causal", **t} for name, t in LINFORMER_CAUSAL.items()}


def make_mixer(table: dict[str, Any], dtype: torch.dtype = torch.float64) -> Mixer:
    """A layer of width 16 with weights of unit gain."""
    layer = build_mixer(D_MODEL, mixer_config(table)).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0)
    return layer


@pytest.fixture(params=TABLES)
def mixer(request: pytest.FixtureRequest) -> Mixer:
    return make_mixer(TABLES[request.param])


@pytest.fixture
def make() -> Callable[..., Mixer]:
    return make_mixer


@pytest.fixture
def assert_same_state() -> Callable[[Any, Any], None]:
    """Compare what states mean: slots of a cache that were never written do not count."""

    def compare(a: Any, b: Any) -> None:
        a, b = _written(a), _written(b)
        tensors = dict(named_tensors(b))
        assert tensors.keys() == dict(named_tensors(a)).keys()
        for name, x in named_tensors(a):
            torch.testing.assert_close(x, tensors[name], rtol=1e-11, atol=1e-12, msg=name)

    return compare


def _written(state: Any) -> Any:
    if not isinstance(state, SoftmaxState) or state.filled is None:
        return state
    slot = torch.arange(int(state.position.max()))
    read: Tensor = (slot < state.position.unsqueeze(1))[..., None, None]
    k, v = (x[:, : len(slot)].where(read, 0) for x in (state.k, state.v))
    return SoftmaxState(k, v, state.position, None)
