"""The command ``gla``: finds the sub-command, and turns errors into one line and an exit code.

Imports the standard library, and of ours what imports no more: help and version answer at once.

Exit codes: 0 done, 1 unexpected, 2 usage or config, 3 data, 4 checkpoint or state, 5 numerics,
6 distributed, 130 interrupted (Ctrl-C), 141 the reader of our output went away.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from gla import __version__
from gla.errors import ConfigError, GlaError
from gla.process import keep_freed_memory

# name -> what it does; the module gla.cli.<name> has run(argv).
COMMANDS = {
    "demo": "raw text to generated text in minutes, offline, on a CPU",
    "doctor": "print versions, devices, and which form of the op runs where",
    "tokenizer": "tokenizer train: train a SentencePiece tokenizer on text files",
    "data": "data prepare: turn text into shards of tokens",
    "train": "train a model from a recipe",
    "warmup": "compile the GPU kernels of a recipe before its first step",
    "resume": "go on with a run from its newest checkpoint",
    "eval": "loss, bits per byte, accuracy of a run on its validation split",
    "report": "one page about a run: curves, figures, samples (HTML and PNG)",
    "inspect": "look into a run's model: gates, states, rank of attention; tables and plots",
    "compare": "variants x tasks x seeds from a suite, with intervals and a report",
    "bench": "time and memory over length; the tables of two articles, measured here",
    "generate": "continue a prompt with a run's model",
    "serve": "completions over HTTP, named states, and a page to try it",
}
INTERRUPTED = 130
READER_GONE = 141  # what a shell reports for a program ended by SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gla`` with ``argv`` (those of the process by default) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # a reader that went away shows here, not in the interpreter's exit
        return code
    except BrokenPipeError:
        # Later writes, the interpreter's own included, go nowhere instead of failing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        if debug:
            raise
        print("gla: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (GlaError, OSError) as reason:
        if debug:
            raise
        print(f"gla: {_of_rank()}{_one_line(reason)}", file=sys.stderr)
        return reason.exit_code if isinstance(reason, GlaError) else 1


def _of_rank() -> str:
    """Return "rank N: " where torchrun started several processes, whose errors meet on stderr."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"rank {os.environ.get('RANK', '?')}: " if several else ""


def _one_line(reason: GlaError | OSError) -> str:
    if isinstance(reason, OSError) and reason.filename is not None:
        return (
            f"{reason.filename}: got {reason.strerror}, expected a place to read or write; fix the "
            "path or its permissions"
        )
    return str(reason)


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(help_text(), file=sys.stderr)
        return ConfigError.exit_code
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"gla {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        wanted = f"{near[0]!r}" if near else f"one of {', '.join(COMMANDS)}"
        raise ConfigError(f"command: got {name!r}, expected {wanted}; fix with gla --help")
    keep_freed_memory()
    return importlib.import_module(f"gla.cli.{name}").run(rest)


def help_text() -> str:
    """Return what ``gla --help`` prints."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: gla COMMAND ...\n\n"
        "Language models on a gated recurrence over a matrix state.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  --help     this text; gla COMMAND --help tells about one command\n"
        "  --version  print the version\n"
        "  --debug    with any command: show the traceback of an error"
    )
