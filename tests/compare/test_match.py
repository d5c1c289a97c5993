"""Widths for equal parameters."""

from __future__ import annotations

import pytest

from gla.compare.match import TOLERANCE, count_on_meta, match_widths
from gla.errors import ConfigError
from gla.models.config import ModelConfig, presets
from gla.models.language_model import LanguageModel


def count(table: dict) -> int:
    return count_on_meta(lambda: LanguageModel(ModelConfig(**table)))


def table(name: str, **changes) -> dict:
    return {"d_model": 128, "vocab_size": 500, "layers": [f"{name}*2"], **changes}


def causal() -> list[str]:
    names = []
    for name in presets():
        try:
            count(table(name))
            names.append(name)
        except ConfigError:
            continue
    return names


def test_models_without_memory_have_as_many_parameters() -> None:
    for name in causal():
        made = LanguageModel(ModelConfig(**table(name)))
        assert count(table(name)) == made.num_parameters(), name


@pytest.mark.parametrize("name", causal())
def test_every_preset_gets_the_parameters_of_softmax(name: str) -> None:
    target = count(table("softmax"))
    found = match_widths(table(name), target, count)
    widths = {"d_model": found.d_model, "mlp_ratio": found.mlp_ratio}
    real = LanguageModel(ModelConfig(**table(name, **widths))).num_parameters()
    assert real == found.parameters
    assert abs(real - target) <= TOLERANCE * target
    assert abs(found.d_model - 128) <= 8  # for nearly all the feed-forward layers suffice


def test_the_width_of_the_model_changes_where_it_must() -> None:
    small = {"d_model": 32, "vocab_size": 64, "layers": ["gla*2"]}
    target = count({**small, "layers": ["softmax*2"]})
    found = match_widths(small, target, count)
    assert found.d_model != 32 and abs(found.d_model - 32) <= 8
    assert abs(found.parameters - target) <= TOLERANCE * target


def test_without_feed_forward_layers_only_the_width_is_left() -> None:
    bare = {"d_model": 128, "vocab_size": 64, "layers": ["softmax*2"], "mlp_ratio": 0.0}
    model = LanguageModel(ModelConfig(**bare))
    assert not [name for name, _ in model.named_parameters() if "mlp" in name]
    target = count({**bare, "d_model": 144})
    assert match_widths(bare, target, count) == (144, 0.0, target)


def test_what_no_width_reaches() -> None:
    with pytest.raises(ConfigError, match=r"model\.d_model: got [\d,]+ at \d+ as the nearest to"):
        match_widths(table("softmax"), 1000, count)
    with pytest.raises(ConfigError, match="got no width that works"):
        heads = {"bad": {"kind": "softmax_attention", "num_heads": 7, "num_kv_heads": 3}}
        match_widths(table("bad", mixers=heads), 10**6, count)
