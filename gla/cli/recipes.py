"""Finding the recipes that ship with gla, in a checkout and in an installed wheel."""

from __future__ import annotations

import difflib
from importlib import metadata
from pathlib import Path

import gla
from gla.errors import ConfigError


def shipped() -> dict[str, Path]:
    """Return {name: path} of the recipes that came with this gla."""
    root = Path(gla.__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        found = list(root.glob("recipes/*.toml"))
    else:
        files = [f for f in metadata.files("gla") or [] if f.match("gla/recipes/*.toml")]
        found = [path for f in files if (path := Path(str(f.locate()))).is_file()]
        # "pip install --target" records another place than the one it copies to.
        found = found or list(root.glob("share/gla/recipes/*.toml"))
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
