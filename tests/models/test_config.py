"""Model configs: patterns, presets, messages, and the round trip through TOML."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import tomli_w

import gla
from gla.errors import ConfigError
from gla.models.config import ModelConfig, presets
from gla.models.language_model import LanguageModel


def test_patterns_are_expanded_in_order():
    config = ModelConfig(
        d_model=16,
        vocab_size=8,
        layers=["local*2", "gla", " gated * 3 "],
        mixers={
            "local": {"kind": "softmax_attention", "window": 4},
            "gated": {"kind": "linear_attention", "gate": "head"},
        },
    )
    assert config.layer_names == ["local"] * 2 + ["gla"] + ["gated"] * 3
    blocks: Any = LanguageModel(config).blocks
    windows = [getattr(b.mixer.config, "window", None) for b in blocks]
    assert windows == [4, 4, None, None, None, None]
    assert [getattr(b.mixer.config, "gate", None) for b in blocks[2:4]] == ["channel", "head"]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (["(gla*3, softmax)*2"], "gggsggg" + "s"),
        (["softmax*2", "gla*3"], "ssggg"),
        (["gla,softmax , gla"], "gsg"),
        (["((gla, softmax)*2, gla)*2", "softmax"], "gsgsggsgsgs"),
        (["(gla)"], "g"),
    ],
)
def test_patterns_nest(layers, names):
    config = ModelConfig(d_model=16, vocab_size=8, layers=layers)
    assert "".join(name[0] for name in config.layer_names) == names
    assert set(config.mixers) == set(config.layer_names)


def test_presets_are_tables_that_build():
    wanted = "linear performer based retnet lightning gla hgrn2 mamba2 softmax window"
    assert set(wanted.split()) <= set(presets())
    for name, table in presets().items():
        config = ModelConfig(d_model=48, vocab_size=64, layers=[name] * 2)
        mixer: Any = config.mixers[name]
        assert mixer.kind == table["kind"]
        if name in ("linformer", "nystrom"):
            with pytest.raises(ConfigError, match=f"mixers.{name}: got a mixer that reads later"):
                LanguageModel(config)
        else:
            LanguageModel(config)
    presets()["gla"]["gate"] = "none"
    assert presets()["gla"]["gate"] == "channel"
    assert gla.presets() == presets()


def test_a_mixer_of_the_same_name_replaces_a_preset():
    mixers = {"gla": {"kind": "linear_attention", "gate": "head"}}
    config = ModelConfig(d_model=16, vocab_size=8, layers=["gla"], mixers=mixers)
    mixer: Any = config.mixers["gla"]
    assert mixer.gate == "head"


def test_a_written_config_reads_back_equal_and_says_all_of_it(tmp_path):
    config = ModelConfig(d_model=64, vocab_size=8, layers=["gla*2", "window"], tie_embeddings=False)
    table = config.model_dump(mode="json", exclude_none=True)
    assert table["mixers"]["window"]["window"] == 256
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps({"model": table, "train": {"steps": 3}}))
    assert ModelConfig.from_toml(path) == config
    assert ModelConfig(**tomllib.loads(path.read_text())["model"]) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [("", r"got no table \[model\]"), ("[model", "expected a TOML recipe"), (None, "No such file")],
)
def test_a_recipe_without_a_model_says_so(tmp_path, text, message):
    path = tmp_path / "recipe.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_toml(path)


def test_width_of_the_feed_forward_layer():
    assert ModelConfig(d_model=256, vocab_size=8, layers=["gla"]).mlp_hidden == 704
    assert ModelConfig(d_model=48, vocab_size=8, layers=["gla"]).mlp_hidden == 128
    assert ModelConfig(d_model=64, vocab_size=8, layers=["gla"], mlp_ratio=4).mlp_hidden == 256


GOOD = {"d_model": 16, "vocab_size": 8, "layers": ["gla"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_modl": 3}, r"d_modl: got an unknown key, .*; fix by writing 'd_model'"),
        ({"d_model": 0}, "d_model: got 0, expected greater than or equal to 1"),
        ({"d_model": "16"}, "d_model: got '16', expected a valid integer"),
        ({"layers": []}, "layers: got .*at least 1"),
        ({"layers": "gla*2"}, "layers: got 'gla\\*2', expected a valid list"),
        ({"layers": ["glaa*2"]}, r"layers\[0\]: got 'glaa\*2', .*; fix by writing 'gla'"),
        (
            {"layers": ["gla", "gla*0"]},
            r"layers\[1\]: got 'gla\*0', .* in it: got '0', expected a count of at least 1",
        ),
        ({"layers": ["gla*-1"]}, r"layers\[0\]: got 'gla\*-1'"),
        ({"layers": ["(gla, softmax*2"]}, r"in it: got 'the end', expected '\)', '\*' or ','"),
        ({"layers": ["gla softmax"]}, r"in it: got 'softmax', expected '\*', ',' or the end"),
        ({"layers": ["gla, *2"]}, r"in it: got '\*', expected a name or '\('"),
        ({"layers": ["gla**2"]}, r"in it: got '\*', expected a count"),
        ({"layers": [""]}, r"in it: got 'the end', expected a name"),
        ({"layers": ["gla; softmax"]}, r"in it: got ';', expected a name, a count or"),
        ({"layers": ["(gla*9999)*9999"]}, r"expected at most 10000 blocks"),
        ({"layers": ["(gla, sofmax)*2"]}, r"layers\[0\]: .*; fix by writing 'softmax'"),
        (
            {"layers": ["zzzz"]},
            r"one of linear, .*; fix the name, or .* table mixers\.zzzz beside layers",
        ),
        ({"mixers": {"a": {}}}, "mixers.a.kind: got nothing, expected one of .*linear_attention"),
        ({"mixers": {"a": {"kind": "softmax"}}}, "mixers.a.kind: .*'softmax_attention'"),
        ({"mixers": {"a": 3}}, "mixers.a: got 3, expected a table"),
        ({"mixers": [1]}, "mixers: got "),
        (
            {"mixers": {"a": {"kind": "linear_attention", "gaet": "none"}}},
            "mixers.a.gaet: got an unknown key, .*; fix by writing 'gate'",
        ),
        ({"norm_eps": float("nan")}, "norm_eps: got nan"),
    ],
)
def test_faults_are_named(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig(**GOOD | change)
    assert all(": got " in line for line in str(error.value).splitlines())


def test_every_fault_is_listed_at_once():
    with pytest.raises(ConfigError) as error:
        ModelConfig(d_model=-1, vocab=3, layers=["gla"])
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "d_model",
        "vocab_size",
        "vocab",
    ]


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValueError):
        ModelConfig(**GOOD).d_model = 3
