"""What the commands share: reading arguments, printing figures.

Arguments are read by tyro from a function's signature and docstring. A wrong argument is explained
on stderr with exit code 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from gla.errors import ConfigError

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]

_SWITCHES = (tyro.conf.FlagCreatePairsOff,)  # --json, without a --no-json


def call(function: Callable[..., int], prog: str, argv: Sequence[str]) -> int:
    """Call ``function`` with the arguments that ``argv`` holds, and return what it returns."""
    return tyro.cli(function, prog=prog, args=argv, config=_SWITCHES)


def call_one_of(
    functions: Mapping[str, Callable[..., int]], prog: str, argv: Sequence[str]
) -> int:
    """Call the function that the first of ``argv`` names with the arguments after it."""
    return tyro.extras.subcommand_cli_from_dict(
        dict(functions), prog=prog, args=argv, config=_SWITCHES
    )


def take_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split ``argv`` into what is not an override and the overrides, in order.

    An override is ``--section.key VALUE`` or ``--section.key=VALUE``.

    Raises:
        ConfigError: An override without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    waiting = iter(argv)
    for argument in waiting:
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or "." not in option:
            rest.append(argument)
            continue
        if not equals:
            value = next(waiting, "--")
            if value.startswith("--"):
                raise ConfigError(f"{option}: got no value, expected one; fix with {option} VALUE")
        overrides.append((option.removeprefix("--"), value))
    return rest, overrides


def print_json(figures: Mapping[str, Any]) -> None:
    """Print one JSON object. Strict: a NaN or infinity is an error of ours, not a figure."""
    print(json.dumps(figures, indent=2, allow_nan=False, default=str))
