"""Options, overrides, recipe names, strict JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from gla.cli import recipes
from gla.cli.arguments import print_json, read_with_overrides
from gla.errors import ConfigError


@dataclass
class Options:
    """Options of a command."""

    name: str
    switch: bool = False


def read(*argv: str) -> tuple[Options, list[tuple[str, str]]]:
    return read_with_overrides(Options, "gla x", argv)


def test_overrides_stand_anywhere_and_keep_their_order() -> None:
    options, overrides = read(
        "--a.b", "1", "--name", "x", "--c.d=-2", "--switch", "--a.b", "-3", "--e.f", ""
    )
    assert options == Options("x", switch=True)
    assert overrides == [("a.b", "1"), ("c.d", "-2"), ("a.b", "-3"), ("e.f", "")]


def test_a_key_without_its_section_is_left_to_the_recipes_check() -> None:
    assert read("--name", "x", "--steps", "5")[1] == [("steps", "5")]


@pytest.mark.parametrize("argv", [["--a.b"], ["--a.b", "--switch"], ["--steps"]])
def test_an_override_needs_a_value(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="got no value"):
        read("--name", "x", *argv)


def test_an_extra_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="extra argument 'y'"):
        read("--name", "x", "y")


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}, "e": None, "f": 2})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None},
        "e": None,
        "f": 2,
    }


def test_recipes_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("")
    assert recipes.find(str(own)) == own
    assert recipes.find("demo") == recipes.shipped()["demo"]
    assert {"demo", "stdlib", "tinystories-15m", "fineweb-60m"} <= set(recipes.shipped())


@pytest.mark.parametrize("name", ["demmo", "recipes/demmo.toml", "../../etc/passwd2", ""])
def test_an_unknown_recipe_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a TOML file or"):
        recipes.find(name)
