"""What the commands share: reading arguments, printing figures.

Arguments are read by tyro from a function's signature and docstring. A wrong argument is explained
on stderr with exit code 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from gla.errors import ConfigError

Options = TypeVar("Options")
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]

_SWITCHES = (tyro.conf.FlagCreatePairsOff,)  # --json, without a --no-json


def call(function: Callable[..., int], prog: str, argv: Sequence[str]) -> int:
    """Call ``function`` with the arguments that ``argv`` holds, and return what it returns."""
    return tyro.cli(function, prog=prog, args=argv, config=_SWITCHES)


def call_one_of(functions: Mapping[str, Callable[..., int]], prog: str, argv: Sequence[str]) -> int:
    """Call the function that the first of ``argv`` names with the arguments after it."""
    return tyro.extras.subcommand_cli_from_dict(
        dict(functions), prog=prog, args=argv, config=_SWITCHES
    )


def read_with_overrides(
    kind: type[Options], prog: str, argv: Sequence[str]
) -> tuple[Options, list[tuple[str, str]]]:
    """Read the options of a command that takes overrides of recipe keys too.

    An override is ``--section.key VALUE`` or ``--section.key=VALUE``. An unknown option without a
    dot counts as one, so that the recipe's check can name the key that was meant.

    Returns:
        An instance of the dataclass ``kind``, and pairs of dotted key and value in their order.

    Raises:
        ConfigError: An override has no value, or an argument belongs to nothing.
    """
    rest, overrides = _take_overrides(argv, lambda option: "." in option)
    options, unknown = tyro.cli(
        kind, prog=prog, args=rest, config=_SWITCHES, return_unknown_args=True
    )
    rest, unsectioned = _take_overrides(unknown, lambda option: True)
    if rest:
        raise ConfigError(f"{prog}: got the extra argument {rest[0]!r}, expected none; remove it")
    return options, overrides + unsectioned


def _take_overrides(
    argv: Sequence[str], is_override: Callable[[str], bool]
) -> tuple[list[str], list[tuple[str, str]]]:
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    waiting = iter(argv)
    for argument in waiting:
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or not is_override(option):
            rest.append(argument)
            continue
        if not equals:
            value = next(waiting, "--")
            if value.startswith("--"):
                raise ConfigError(f"{option}: got no value, expected one; fix with {option} VALUE")
        overrides.append((option.removeprefix("--"), value))
    return rest, overrides


def print_json(figures: Mapping[str, Any]) -> None:
    """Print one JSON object. Strict: a NaN or infinity becomes null."""
    print(json.dumps(_finite(figures), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float) and value - value != 0:  # NaN and both infinities
        return None
    return value
