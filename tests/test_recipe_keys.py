"""docs/recipes.md lists the keys of a recipe: all of them, with the defaults they have."""

from __future__ import annotations

import re
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from gla.layers import mixer
from gla.layers.linear_attention import RecurrenceConfig
from gla.train.config import GroupConfig, RunConfig
from gla.train.objective_config import EncoderRecipeModel

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "recipes.md").read_text()
REQUIRED = object()
ON_THE_OP = '`kind = "linear_attention"`, `"hgrn2"`, `"mamba2"`'


def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """Return {heading: {key: (default, what it does)}} of the page."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for part in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", text, flags=re.MULTILINE)
        assert len({key for key, _, _ in rows}) == len(rows), heading
        if rows:
            found[heading] = {key: (default, does) for key, default, does in rows}
    return found


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    return {
        name: REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
    }


def expected() -> dict[str, dict[str, Any]]:
    """Return {heading: {key: default}} as the models have them."""
    sections: dict[str, Any] = {n: f.annotation for n, f in RunConfig.model_fields.items()}
    wanted = {f"`[{name}]`": fields_of(model) for name, model in sections.items()}
    wanted["`[model]`"] |= fields_of(EncoderRecipeModel)  # which adds classes
    wanted["`[[optim.groups]]`"] = fields_of(GroupConfig)
    shared = fields_of(RecurrenceConfig)
    wanted[ON_THE_OP] = shared
    for kind, (config, _) in mixer._MIXERS.items():
        if config.__module__.startswith("gla."):  # other tests register mixers of their own
            own = fields_of(config)
            assert own.pop("kind") == kind
            if issubclass(config, RecurrenceConfig):
                assert f'"{kind}"' in ON_THE_OP
                assert all(own.pop(name) == default for name, default in shared.items())
            wanted[f'`kind = "{kind}"`'] = own
    return {name: keys for name, keys in wanted.items() if keys}


def read(default: str) -> Any:
    """Read the default that the page gives."""
    if default in ("required", "–"):
        return REQUIRED if default == "required" else None
    text = default.strip("`")
    if re.fullmatch(r"\d+/\d+", text):
        return float(Fraction(text))
    return tomllib.loads(f"value = {text}")["value"]


def test_every_section_and_every_kind_of_mixer_has_its_table() -> None:
    assert tables().keys() == expected().keys()


@pytest.mark.parametrize("heading", expected())
def test_the_keys_and_their_defaults_are_the_real_ones(heading: str) -> None:
    listed, wanted = tables()[heading], expected()[heading]
    assert listed.keys() == wanted.keys()
    for key, (default, does) in listed.items():
        real = wanted[key]
        real = list(real) if isinstance(real, tuple) else real
        assert read(default) == real, key
        assert type(read(default)) is type(real) and len(does) > 4, key


def test_the_documentation_leads_to_the_page() -> None:
    root = Path(__file__).resolve().parents[1]
    assert "(docs/recipes.md)" in (root / "README.md").read_text()
    assert "(recipes.md)" in (root / "docs" / "comparison.md").read_text()
