"""Finding the recipes that ship with gla, in a checkout and in an installed wheel."""

from __future__ import annotations

import difflib
from importlib import metadata
from pathlib import Path

import gla
from gla.errors import ConfigError


def shipped(folder: str = "recipes") -> dict[str, Path]:
    """Return {name: path} of what came with this gla: "recipes" or "recipes/suites"."""
    root = Path(gla.__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        found = list(root.glob(f"{folder}/*.toml"))
    else:
        files = [f for f in metadata.files("gla") or [] if f.match(f"gla/{folder}/*.toml")]
        found = [path for f in files if (path := Path(str(f.locate()))).is_file()]
        # "pip install --target" records another place than the one it copies to.
        found = found or list(root.glob(f"share/gla/{folder}/*.toml"))
    return {path.stem: path.resolve() for path in sorted(found)}


def find(recipe: str) -> Path:
    """Return the file of ``recipe``: a path to a TOML file, or the name of one that ships with gla.

    Raises:
        ConfigError: Neither.
    """
    return _find(recipe, "RECIPE", "recipes")


def find_suite(suite: str) -> Path:
    """Return the file of a suite for ``gla compare``, as ``find`` does for a recipe.

    Raises:
        ConfigError: Neither a file nor a name.
    """
    return _find(suite, "SUITE", "recipes/suites")


def _find(name: str, what: str, folder: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    known = shipped(folder)
    if name in known:
        return known[name]
    near = difflib.get_close_matches(Path(name).stem, known, n=1)
    wanted = repr(near[0]) if near else ", ".join(known)
    raise ConfigError(f"{what}: got {name!r}, expected a TOML file or {wanted}; fix the name")
