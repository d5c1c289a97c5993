"""Reading TOML tables, and telling what is wrong in them: one line a fault, with a near name."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gla.errors import ConfigError

# What pydantic says in words of Python or of its own, by the kind of the fault.
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "tuple_type": "a valid list",
    "too_short": "at least {min_length} in the list",
    "too_long": "at most {max_length} in the list",
}

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: No such file, not UTF-8, or not TOML (the message has the line).
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as reason:
        raise ConfigError(
            f"{path}: got {reason.strerror}, expected a TOML recipe; fix the path"
        ) from reason
    except (ValueError, RecursionError) as reason:
        raise ConfigError(
            f"{path}: got no TOML, {reason}; expected a TOML recipe; fix the file"
        ) from reason


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: what was meant, or all that there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    if near:
        return f"one of {', '.join(names)}; fix by writing {near[0]!r}"
    return f"one of {', '.join(names)}; fix the name"


def describe_faults(
    model: type[BaseModel],
    error: ValidationError,
    known: Callable[[tuple[int | str, ...]], Iterable[str]] | None = None,
) -> str:
    """Every fault that pydantic found, one line each: field, what it got, what was expected.

    Args:
        model: What was validated.
        error: The faults.
        known: The keys that are valid where a path ends; those of ``model`` by default.
    """
    keys = known or (lambda path: model.model_fields)
    return "\n".join(_describe(fault, keys) for fault in error.errors())


def _describe(fault: Any, known: Callable[[tuple[int | str, ...]], Iterable[str]]) -> str:
    path: tuple[int | str, ...] = fault["loc"]
    field = ".".join(str(part) for part in path)
    if fault["type"] == "extra_forbidden":
        return f"{field}: got an unknown key, expected {nearest(str(path[-1]), known(path))}"
    if fault["type"] == "missing":
        return f"{field}: got nothing, expected a value; fix by setting {field}"
    if fault["type"] == "value_error":
        reason = fault["ctx"]["error"]
        if not isinstance(reason, ConfigError):
            return f"{field}: {reason}" if field else str(reason)
        # Raised by a part that described its own faults: lines that begin with a field.
        return "\n".join(f"{field}.{line}" if field else line for line in str(reason).splitlines())
    wanted = fault["msg"].removeprefix("Input should be ")
    if kind := _WANTED.get(fault["type"]):
        wanted = kind.format(**fault.get("ctx", {}))
    return f"{field or 'recipe'}: got {fault['input']!r}, expected {wanted}; fix {field or 'it'}"
