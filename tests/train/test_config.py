"""Recipes: what is accepted, and that all faults are listed with the field's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gla.errors import ConfigError
from gla.layers.mixer import mixer_fields
from gla.models.config import presets
from gla.train.config import (
    GroupConfig,
    RecipeModel,
    RunConfig,
    _all_keys,
    apply_overrides,
    build,
    load_recipe,
)

RECIPES = Path(__file__).parents[2] / "recipes"

SMALL = """
[model]
d_model = 32
layers = ["gla*2"]

[data]
path = "data/x"

[train]
steps = 10
seq_len = 64
global_batch_size = 4

[optim]
lr = 1e-3
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def load(tmp_path: Path, text: str = SMALL, **overrides: str) -> RunConfig:
    pairs = [(key.replace("__", "."), value) for key, value in overrides.items()]
    return load_recipe(write(tmp_path, text), pairs)


def tables(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"d_model": 32, "layers": ["gla"]},
        "data": {"path": "x"},
        "train": {"steps": 10},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        base.setdefault(section, {})[name] = value
    return base


def test_the_merged_recipe_reads_back_equal(tmp_path: Path) -> None:
    text = SMALL + '[[optim.groups]]\npattern = "conv"\nlr_factor = 0.5\n'
    config = load(tmp_path, text, train__seed="7")
    assert load_recipe(write(tmp_path, config.to_toml())) == config


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(recipe: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe)
    assert load_recipe(write(tmp_path, config.to_toml())) == config


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "100", 100),
        ("train.compile", "true", True),
        ("train.compile", "True", True),
        ("train.precision", "bf16", "bf16"),
        ("optim.lr", "3e-4", 3e-4),
        ("optim.lr", "1", 1.0),
        ("optim.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("optim.betas", "0.8,0.9", (0.8, 0.9)),
        ("data.path", "123", "123"),
        ("data.path", "true", "true"),
        ("data.sources", "a.txt, 7", ["a.txt", "7"]),
        ("data.sources", '["a b"]', ["a b"]),
        ("data.sources", "stdlib", ["stdlib"]),
        ("train.micro_batch_size", "2", 2),
    ],
)
def test_an_override_has_the_type_of_its_key(
    tmp_path: Path, key: str, text: str, value: object
) -> None:
    config = load_recipe(write(tmp_path, SMALL), [(key, text)])
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value


def test_an_override_can_set_groups(tmp_path: Path) -> None:
    config = load(tmp_path, optim__groups='[{pattern = "a", lr_factor = 0.1}]')
    assert config.optim.groups[0].lr_factor == 0.1


def test_the_last_override_wins_and_the_recipe_is_not_changed() -> None:
    base = tables()
    merged = apply_overrides(base, [("train.steps", "1"), ("train.steps", "2")])
    assert merged["train"]["steps"] == 2
    assert base["train"]["steps"] == 10


def test_an_override_reaches_a_mixer_table(tmp_path: Path) -> None:
    pairs = [
        ("model.layers", '["mine*2"]'),
        ("model.mixers.mine.kind", "linear_attention"),
        ("model.mixers.mine.gate", "head"),
        ("model.mixers.mine.num_heads", "2"),
    ]
    config = load_recipe(write(tmp_path, SMALL), pairs)
    assert "gate" in config.to_toml()
    assert "head" in config.to_toml()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim__learing_rate": 1e-3}, ["optim.learing_rate", "unknown key"]),
        ({"optim__weight_deca": 0.1}, ["optim.weight_deca", "'weight_decay'"]),
        ({"optimizer__lr": 1e-3}, ["optimizer", "'optim'"]),
        ({"optim__lr": "1e-3"}, ["optim.lr", "'1e-3'", "number"]),
        ({"optim__lr": -1.0}, ["optim.lr", "-1.0", "greater than 0"]),
        ({"optim__lr": float("nan")}, ["optim.lr", "nan", "finite"]),
        ({"optim__lr": float("inf")}, ["optim.lr", "inf", "finite"]),
        ({"optim__lr": 0.0}, ["optim.lr", "0.0"]),
        ({"optim__kind": "sgd"}, ["optim.kind", "'sgd'", "'adamw'"]),
        ({"optim__betas": [0.9]}, ["optim.betas: got [0.9], expected two numbers"]),
        ({"optim__betas": []}, ["optim.betas: got [], expected two numbers"]),
        ({"optim__betas": 0.9}, ["optim.betas: got 0.9, expected two numbers"]),
        ({"optim__betas": [0.9, 0.9, 0.9]}, ["optim.betas", "expected two numbers"]),
        ({"model__layers": []}, ["model.layers: got [], expected at least 1 in the list"]),
        ({"train__compile": "yes"}, ["train.compile: got 'yes', expected true or false"]),
        ({"optim__groups": [3]}, ["optim.groups.0: got 3, expected a table"]),
        ({"optim__betas": [0.9, 1.0]}, ["optim.betas.1", "less than 1"]),
        ({"train__steps": 0}, ["train.steps", "0", "greater than or equal to 1"]),
        ({"train__steps": True}, ["train.steps", "True", "integer"]),
        ({"train__steps": 1.5}, ["train.steps", "1.5", "integer"]),
        ({"train__max_norm": 0.0}, ["train.max_norm"]),
        ({"train__seed": -1}, ["train.seed"]),
        ({"schedule__min_lr_ratio": 2.0}, ["schedule.min_lr_ratio", "2.0"]),
        ({"checkpoint__keep": 0}, ["checkpoint.keep"]),
        (
            {"train__global_batch_size": 6, "train__micro_batch_size": 4},
            ["train", "6 % 4 = 2", "expected 0"],
        ),
        ({"model__d_modl": 3}, ["model", "d_modl", "d_model"]),
    ],
)
def test_a_fault_names_the_field_what_it_got_and_what_is_expected(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        build(tables(**changes))
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


WRONG = [None, True, -1, 0, 1.5, 2**70, float("nan"), "", "x", [], [0.9], [1, 2, 3], {"a": 1}]


def test_no_fault_of_any_field_is_told_in_the_words_of_a_library() -> None:
    keys = [key for key in _all_keys() if not key.startswith("model.")]
    keys += [f"model.{name}" for name in RecipeModel.model_fields]
    tried: list[dict[str, Any]] = []
    for key in [*RunConfig.model_fields, *keys]:
        section, _, name = key.partition(".")
        for value in WRONG:
            changed = tables()
            if name:
                changed.setdefault(section, {})[name] = value
            else:
                changed[section] = value
            tried.append(changed)
    for name in GroupConfig.model_fields:
        tried += [tables(optim__groups=[{"pattern": "a", name: value}]) for value in WRONG]
    for preset in presets().values():
        for name in mixer_fields(preset["kind"]):
            for value in WRONG:
                changed = tables()
                changed["model"]["mixers"] = {"x": {**preset, name: value}}
                tried.append(changed)
    faulty = set()
    for changed in tried:
        try:
            build(changed)
        except ConfigError as reason:
            faulty |= set(str(reason).splitlines())
    assert len(faulty) > 300
    form = re.compile(r"[\w.\[\]]+: got .+, expected .+; fix .+")
    words = ("Input", "should", "validation", "dictionary", "instance", "uple", "boolean", "Value")
    assert not [line for line in faulty if not form.fullmatch(line)]
    assert not [line for line in faulty if any(word in line for word in words)]


def test_all_faults_are_listed_at_once() -> None:
    faulty = tables(optim__lr=-1.0, train__steps="many", checkpoint__kep=2)
    del faulty["data"]
    with pytest.raises(ConfigError) as error:
        build(faulty)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    for field in ("optim.lr", "train.steps", "checkpoint.kep", "data"):
        assert any(line.startswith(f"{field}: ") for line in lines)


def test_a_key_without_its_section_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps"):
        load(tmp_path, steps="3")


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps\.x"):
        load(tmp_path, train__steps__x="3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nsteps = 1\nsteps = 2\n", "line 3"),
        ("a: !!python/object:os.system x\n", "line 1"),
        ("x = &anchor 3\n", "line 1"),
        ("a = " + "[" * 100_000, "TOML"),
        ("\x00", "TOML"),
    ],
)
def test_what_is_no_toml_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text)


def test_a_missing_or_binary_recipe_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_recipe(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml"):
        load_recipe(tmp_path / "latin.toml")


@pytest.mark.parametrize("kind", ["next_token", "masked"])
def test_a_fault_in_a_mixer_names_its_field_once(kind: str) -> None:
    mixers = {"near": {"kind": "softmax_attention", "windw": 3}, "far": 7}
    model = {"d_model": 32, "layers": ["near"], "mixers": mixers}
    tables = {
        "objective": {"kind": kind},
        "model": model,
        "data": {"path": "x"},
        "train": {"steps": 1},
    }
    with pytest.raises(ConfigError) as caught:
        build(tables)
    first, second = str(caught.value).splitlines()
    assert first.startswith("model.mixers.near.windw: got an unknown key, expected one of kind")
    assert second.startswith("model.mixers.far: got 7, expected a table")
