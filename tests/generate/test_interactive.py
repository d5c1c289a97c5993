"""Turns on a terminal: refused lines, the turns that are kept, readers that went away."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from gla.cli import interactive
from gla.cli.generate import generate
from gla.cli.interactive import converse
from gla.errors import ConfigError
from gla.generate.sampling import Sampling
from gla.generate.session import Session
from gla.generate.writer import Request

REQUEST = Request(3, Sampling(0))


@pytest.fixture
def session(model, tokenizer):
    return Session(model, tokenizer)


@pytest.fixture
def type_in(monkeypatch):
    """Return a function that puts bytes on standard input."""

    def put(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put


def test_a_line_that_is_no_text_is_refused_and_is_no_turn(session, type_in, capsys):
    type_in(b"abc\nde\xff\n/rewind\n/rewind\n")
    assert converse(session, REQUEST) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[0].startswith("text: got the lone surrogate U+DCFF at character 2")
    assert notes[1].startswith("rewound 1 turn, at token 1") and session.position == 1
    assert notes[2] == "/rewind: got 1, expected 1 to 0 turns of this branch"


def test_only_so_many_turns_are_kept(session, type_in, capsys, monkeypatch):
    monkeypatch.setattr(interactive, "_KEPT_TURNS", 2)
    type_in(b"a\nb\nc\nd\n/rewind 3\n/rewind 2\n")
    assert converse(session, REQUEST) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == "/rewind: got 3, expected 1 to 2 turns of this branch"
    assert notes[1].startswith("rewound 2 turns, at token")
    twin = Session(session._decoder.model, session.tokenizer)
    for line in ("a\n", "b\n"):
        twin.read(line)
        list(twin.generate_tokens(REQUEST))
    assert session.position == twin.position


def test_ctrl_c_while_a_line_is_read_ends_the_turn(session, type_in, monkeypatch):
    read = Session.read

    def interrupted(self, source, progress=None):
        os.kill(os.getpid(), signal.SIGINT)
        read(self, source, progress)

    monkeypatch.setattr(Session, "read", interrupted)
    type_in(b"abc\n")
    assert converse(session, Request(50, Sampling(0))) == 0
    assert 1 < session.position < 20


def test_a_reader_that_went_away_ends_the_conversation(session, type_in, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    type_in(b"a\nb\n")
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        converse(session, REQUEST)


@pytest.mark.parametrize(
    ("where", "said"),
    [("", "^--state-out: got .*, a folder, expected"), ("a/b/c", "got a path below a file")],
)
def test_a_state_that_cannot_be_written_is_refused_before_reading(
    make_run, model, tmp_path, monkeypatch, where, said
):
    monkeypatch.setattr(Session, "open", None)
    (tmp_path / "a").write_text("a file")
    with pytest.raises(ConfigError, match=said):
        generate(make_run(model), state_out=tmp_path / where)


def test_folders_of_a_state_are_made(make_run, model, tmp_path):
    state = tmp_path / "a" / "b" / "book.state"
    assert generate(make_run(model), state_out=state, max_new_tokens=0, device="cpu") == 0
    assert state.is_file()


def test_a_terminal_without_a_character_gets_its_number(make_run, model, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert generate(make_run(model), prompt="漢", max_new_tokens=0, device="cpu") == 0
    assert out.getvalue() == b"\\u6f22\n"
