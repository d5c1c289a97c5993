"""What the commands share: reading arguments, printing figures.

Arguments are read by tyro from a function's signature and docstring. What tyro says of a wrong one,
in a box, becomes a ConfigError of one line.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from gla.errors import ConfigError
from gla.storage import make_folder

Options = TypeVar("Options")
Recipe = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]

_SWITCHES = (tyro.conf.FlagCreatePairsOff,)  # --json, without a --no-json


def call(function: Callable[..., int], prog: str, argv: Sequence[str]) -> int:
    """Call ``function`` with the arguments that ``argv`` holds, and return what it returns.

    Raises:
        ConfigError: The arguments are not those of the function.
    """
    with _in_one_line(prog):
        bound = tyro.cli(_binding(function), prog=prog, args=argv, config=_SWITCHES)
    return bound()


def call_one_of(functions: Mapping[str, Callable[..., int]], prog: str, argv: Sequence[str]) -> int:
    """Call the function that the first of ``argv`` names with the arguments after it.

    Raises:
        ConfigError: It names none, or the arguments are not those of the function.
    """
    bindings = {name: _binding(function) for name, function in functions.items()}
    with _in_one_line(f"{prog} {argv[0]}" if argv and argv[0] in functions else prog):
        bound = tyro.extras.subcommand_cli_from_dict(
            bindings, prog=prog, args=argv, config=_SWITCHES
        )
    return bound()


def _binding(function: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """Return a function of the same signature that only keeps its arguments for the call."""

    @functools.wraps(function)
    def bind(*arguments: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(function, *arguments, **options)

    return bind


@contextlib.contextmanager
def _in_one_line(prog: str) -> Iterator[None]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as reason:
        if not reason.code:  # --help
            raise
        raise ConfigError(f"{_gist(said.getvalue())}; see {prog} --help") from None


def _gist(box: str) -> str:
    """Return what a box of tyro's says, as "option: got X, expected Y"."""
    # A title, what is wrong, and help; between them lines of bars or dashes, as the terminal has.
    box = re.sub(r"\x1b\[[\d;]*m", "", box)  # colours of a terminal
    lines = [line.strip("│╰─╯ ") for line in box.splitlines()[1:]]
    lines = [line if line.strip("-") else "" for line in lines]
    lines = list(itertools.dropwhile(lambda line: not line, lines))
    text = " ".join(itertools.takewhile(bool, lines))
    rest = "\n".join(lines[1:])
    near = re.search(r"^(--\S+)|Available subcommands: (.+)", rest, re.MULTILINE)
    kind = re.search(r"^--\S+ (\S+)$", rest, re.MULTILINE)
    known = near[1] or near[2] if near else "one of its options"
    value = {"INT": "a whole number", "FLOAT": "a number"}.get(kind[1] if kind else "", "another")
    for pattern, gist in (
        (r"Unrecognized options: ([^,]+)", rf"\1: got an unknown option, expected {known}"),
        (r"Error parsing (\S+): .*?('[^']*')$", rf"\1: got \2, expected {value}"),
        (
            r"invalid choice (.+) for argument '(\S+)'\. Expected (.+)\.$",
            r"\2: got \1, expected \3",
        ),
        (r"Missing value for argument '(\S+)'", r"\1: got no value, expected one"),
        (
            r"Missing from [^:]+: (\S+) (?:[A-Z]{2,} )?(.+?)\.? \(required\)",
            r"\1: got none, expected: \2",
        ),
        (r"Expected (one of .+)\.$", r"command: got none, expected \1"),
    ):
        if found := re.match(pattern, text):
            return re.sub(r"one of [({](.+)[)}]$", _one_of, found.expand(gist))
    return text


def _one_of(choices: re.Match[str]) -> str:
    """Return "one of a, b" for choices that tyro gives in any order, None among them."""
    names = set(re.findall(r"[\w-]+", choices[1])) - {"None"}
    return "one of " + ", ".join(sorted(names))


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
    with _in_one_line(prog):
        options, unknown = tyro.cli(
            kind, prog=prog, args=rest, config=_SWITCHES, return_unknown_args=True
        )
    rest, unsectioned = _take_overrides(unknown, lambda option: True)
    if rest:
        raise ConfigError(
            f"{prog}: got the extra argument {rest[0]!r}, expected none; fix by removing it"
        )
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


def require(option: str, value: float | None, least: float, *, above: bool = False) -> None:
    """Check the number of an option; None, where it was not given, passes.

    Args:
        option: Its name, without dashes.
        value: What was given.
        least: The smallest number allowed; with ``above``, the largest one that is too small.
        above: Whether it must be more than ``least``.

    Raises:
        ConfigError: It is smaller, or NaN.
    """
    if value is None or (value > least if above else value >= least):
        return
    wanted = "more than" if above else "at least"
    raise ConfigError(
        f"--{option}: got {value:g}, expected {wanted} {least:g}; fix by giving more, or leave it "
        "out for the default"
    )


def make_room(file: Path, option: str) -> None:
    """Make the folders of a file that is to be written.

    Raises:
        ConfigError: It is a folder, or they cannot be made.
    """
    if file.is_dir():
        raise ConfigError(
            f"{option}: got {file}, a folder, expected a file; fix by naming a file in it"
        )
    make_folder(file.parent, option)


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
