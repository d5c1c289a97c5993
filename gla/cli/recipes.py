"""Finding the recipes that ship with gla, in a checkout and in an installed wheel."""

from __future__ import annotations

import difflib
from importlib import metadata
from pathlib import Path

import gla
from gla.errors import ConfigError


def shipped() -> dict[str, Path]:
    """Return {name: path} of the recipes that came with this gla."""
    checkout = Path(gla.__file__).resolve().parents[1] / "recipes"
    if checkout.is_dir():
        found = list(checkout.glob("*.toml"))
    else:
        files = metadata.files("gla") or []
        found = [Path(str(f.locate())) for f in files if f.match("gla/recipes/*.toml")]
    return {path.stem: path.resolve() for path in sorted(found)}


def find(recipe: str) -> Path:
    """Return the file of ``recipe``: a path to a TOML file, or the name of one that ships with gla.

    Raises:
        ConfigError: Neither.
    """
    if Path(recipe).is_file():
        return Path(recipe)
    known = shipped()
    if recipe in known:
        return known[recipe]
    near = difflib.get_close_matches(Path(recipe).stem, known, n=1)
    wanted = repr(near[0]) if near else ", ".join(known)
    raise ConfigError(f"RECIPE: got {recipe!r}, expected a TOML file or {wanted}; fix the name")
