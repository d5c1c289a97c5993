"""Turns on a terminal: a line is read, the model goes on, and so forth, with branches and undo."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gla.cli.arguments import make_room
from gla.cli.interrupt import interruptible
from gla.errors import GlaError

if TYPE_CHECKING:
    from gla.generate.session import Mark, Session
    from gla.generate.writer import Request

HELP = """\
A line is read, with its end, and continued. Ctrl-C ends a continuation; Ctrl-D leaves.
/fork NAME     go on in the branch NAME, made here if there is none; the first one is "main"
/save FILE     write the state of this branch
/rewind [N]    undo the last N turns of this branch (1); the last 100 are kept
/help          this text
/quit          leave"""

_KEPT_TURNS = 100  # each holds a copy of the state


class _Branch:
    """A session and the places before its turns."""

    def __init__(self, session: Session, marks: list[Mark]) -> None:
        self.session = session
        self.marks = marks


class _Talk:
    """The branches of one conversation."""

    def __init__(self, session: Session, request: Request) -> None:
        self.request = request
        self.branches = {"main": _Branch(session, [])}
        self.branch = self.branches["main"]
        self.commands: dict[str, Callable[[str], str]] = {
            "/fork": self.fork,
            "/save": self.save,
            "/rewind": self.rewind,
            "/help": lambda _: HELP,
        }

    def turn(self, line: str) -> None:
        """Read a line and print how it goes on."""
        session = self.branch.session
        mark = session.mark()
        with interruptible() as interrupted:
            session.read(line)
            self.branch.marks.append(mark)  # not of a line that was refused
            del self.branch.marks[:-_KEPT_TURNS]
            for token in session.generate_tokens(self.request):
                print(token.text, end="", flush=True)
                if interrupted():
                    break
        print(flush=True)

    def fork(self, name: str) -> str:
        """Go to a branch, and make it if there is none of this name."""
        if not name:
            return f"/fork: got no name, expected one; fix with /fork {' or '.join(self.branches)}"
        known = name in self.branches
        if not known:
            self.branches[name] = _Branch(self.branch.session.fork(), list(self.branch.marks))
        self.branch = self.branches[name]
        position = self.branch.session.position
        return f"{'in' if known else 'made'} branch {name}, at token {position}"

    def save(self, file: str) -> str:
        """Write the state of the branch."""
        if not file:
            return "/save: got no file, expected one; fix with /save FILE"
        make_room(Path(file), "/save")
        self.branch.session.save(file)
        return f"saved {file}, at token {self.branch.session.position}"

    def rewind(self, count: str) -> str:
        """Undo turns."""
        marks = self.branch.marks
        turns = int(count) if count.isdecimal() else 0 if count else 1
        if not 1 <= turns <= len(marks):
            return f"/rewind: got {count or 1}, expected 1 to {len(marks)} turns of this branch"
        self.branch.session.rewind(marks[-turns])
        del marks[-turns:]
        return f"rewound {turns} turn{'s' * (turns > 1)}, at token {self.branch.session.position}"


def converse(session: Session, request: Request) -> int:
    """Take turns until the input ends; notes go to stderr.

    Returns:
        The exit code: 0, or 130 after Ctrl-C at the prompt.
    """
    talk = _Talk(session, request)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is refused line by line
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 130
        command, _, argument = line.strip().partition(" ")
        if not line or command == "/quit":
            return 0
        try:
            if command in talk.commands:
                print(talk.commands[command](argument.strip()), file=sys.stderr)
            elif command.startswith("/"):
                print(f"{command}: got an unknown command; fix with /help", file=sys.stderr)
            else:
                talk.turn(line)
        except BrokenPipeError:  # nobody listens any more
            raise
        except (GlaError, OSError) as reason:  # the conversation goes on
            print(reason, file=sys.stderr)
