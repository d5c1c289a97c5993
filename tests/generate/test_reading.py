"""Text from strings, bytes, files and streams, cut anywhere, and what is no text."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gla.generate.session as session_module
from gla.errors import DataError, StateError
from gla.generate.reading import Reader
from gla.generate.session import Score, Session

TEXT = "ab é漢😀 ((x, y))\n    12345  \n\n end"
DATA = TEXT.encode()


def text_of(*sources, size=7, pending=b""):
    reader = Reader(pending)
    return "".join(piece for source in sources for piece in reader.pieces(source, size))


def test_every_split_of_bytes_gives_the_same_text():
    for cut in range(len(DATA) + 1):
        for size in (1, 3, 100):
            assert text_of(DATA[:cut], DATA[cut:], size=size) == TEXT
            assert text_of(iter([DATA[:cut], DATA[cut:]]), size=size) == TEXT


def test_every_kind_of_source(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf" + DATA)
    sources = [TEXT, DATA, file, io.StringIO(TEXT), io.BytesIO(DATA), list(TEXT), TEXT.split("z")]
    sources += [(bytes([byte]) for byte in DATA), memoryview(DATA).tobytes()]
    assert {text_of(source) for source in sources} == {TEXT}


def test_pieces_are_bounded_and_small_ones_are_joined():
    reader = Reader()
    assert [len(p) for p in reader.pieces("x" * 25, 10)] == [10, 10, 5]
    assert [len(p) for p in reader.pieces(iter("x" * 25), 10)] == [10, 10, 5]
    assert [len(p) for p in reader.pieces(iter(["x" * 25]), 10)] == [10, 10, 5]


@pytest.mark.parametrize(
    ("data", "offset"),
    [(b"ab\xffcd", 2), (b"\x80", 0), (b"ab\xc3(", 2), (b"0123456789abc\xfe", 13)],
)
def test_bytes_that_are_no_text_are_named_by_their_offset(data, offset, tmp_path):
    with pytest.raises(DataError, match=rf"^text: got .* at offset {offset}, expected UTF-8"):
        text_of(data)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError, match=rf"x: got .* at offset {offset}, expected UTF-8"):
        text_of(Path(tmp_path / "x"))


def test_a_file_must_end_with_a_whole_character(tmp_path):
    (tmp_path / "x").write_bytes(DATA + "漢".encode()[:2])
    with pytest.raises(DataError, match=rf"cut short at its end at offset {len(DATA)}"):
        text_of(tmp_path / "x")


def test_text_inside_a_character_is_refused(model, tokenizer):
    session = Session(model, tokenizer)
    session.read("漢".encode()[:2])
    for act in (lambda: session.read("a"), lambda: session.generate(1), lambda: session.score("a")):
        with pytest.raises(DataError, match="the start of a character, expected its other bytes"):
            act()
    session.read("漢".encode()[2:])
    list(session.generate(0))
    assert session.position == 1 + len(tokenizer.encode("漢"))


def test_a_source_or_mark_of_another_kind_is_refused(model, tokenizer, tmp_path):
    session: Any = Session(model, tokenizer)
    with pytest.raises(DataError, match="got int, expected str or bytes"):
        session.read([1, 2])
    with pytest.raises(DataError, match="text: got int, expected str, bytes"):
        session.read(5)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match=f"^{path}: got .*, expected a file"):
            session.read(path)
    with pytest.raises(StateError, match="mark: got 3, expected one of this session"):
        session.rewind(3)


def test_sessions_read_any_split_of_bytes_with_the_same_tokens(model, tokenizer, monkeypatch):
    tokens: list[int] = []
    prefill = model.prefill
    monkeypatch.setattr(
        model, "prefill", lambda ids, *rest: tokens.extend(ids[0].tolist()) or prefill(ids, *rest)
    )
    want = tokenizer.encode(TEXT)
    root = Session(model, tokenizer)
    for cut in range(len(DATA) + 1):
        tokens.clear()
        session = root.fork()
        session.read(DATA[:cut])
        session.read(iter([DATA[cut:]]))
        list(session.generate(0))
        assert tokens == want


def test_a_fault_leaves_the_session_where_it_stood(model, tokenizer, monkeypatch):
    monkeypatch.setattr(session_module, "READ_CHARACTERS", 10)
    session, twin = Session(model, tokenizer), Session(model, tokenizer)
    session.read("abc de")
    twin.read("abc de")
    with pytest.raises(DataError):
        session.read(DATA * 3 + b"\xff")
    assert session.position == twin.position
    for each in (session, twin):
        each.read(" fgh")
    assert list(session.generate(9, seed=0)) == list(twin.generate(9, seed=0))


def test_progress_tells_every_token(model, tokenizer, monkeypatch):
    monkeypatch.setattr(session_module, "PREFILL_TOKENS", 16)
    session, told = Session(model, tokenizer), []
    session.read(TEXT * 20, told.append)
    assert max(map(len, told)) == 16
    ids = [i for piece in told for i in piece]
    assert ids == tokenizer.encode(TEXT * 20)[: len(ids)] and len(ids) > 200


@pytest.mark.parametrize("keep", [False, True])
def test_scores_are_those_of_a_whole_forward_pass(model, tokenizer, monkeypatch, keep):
    monkeypatch.setattr(session_module, "READ_CHARACTERS", 50)
    monkeypatch.setattr(session_module, "SCORE_TOKENS", 16)
    session = Session(model, tokenizer)
    session.read("abc ")
    score = session.score(TEXT * 6, logits=keep)
    before = [tokenizer.bos_id, *tokenizer.encode("abc ")]
    ids = tokenizer.encode(TEXT * 6)
    assert score.tokens.tolist() == ids
    with torch.no_grad():
        logits = model(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
    want = -torch.log_softmax(logits.double(), -1)[torch.arange(len(ids)), ids]
    torch.testing.assert_close(score.losses.double(), want, rtol=1e-4, atol=1e-4)
    assert score.loss == pytest.approx(float(want.mean()), rel=1e-5)
    assert score.perplexity == pytest.approx(float(want.mean().exp()), rel=1e-4)
    if keep:
        torch.testing.assert_close(score.logits, logits, rtol=1e-3, atol=1e-3)
    assert (score.logits is not None) == keep
    assert session.position == len(before) + len(ids)


def test_a_perplexity_beyond_floats_is_infinite():
    assert Score(torch.tensor([0]), torch.tensor([1e4]), None).perplexity == math.inf


def test_the_score_of_nothing_is_empty(model, tokenizer):
    score = Session(model, tokenizer).score("")
    assert score.tokens.shape == score.losses.shape == (0,)
    for figure in ("loss", "perplexity"):
        with pytest.raises(DataError, match="text: got an empty one, expected"):
            getattr(score, figure)


@pytest.mark.parametrize("char", ["a", " ", "-", "\n", "漢"])
def test_what_waits_of_a_text_without_words_is_bounded(model, tokenizer, char):
    session, waiting = Session(model, tokenizer), []
    for _ in range(20):
        session.read(char * 100)
        waiting.append(len(session._waiting))
    assert max(waiting) < 256
    assert session.position == 1 + len(tokenizer.encode(char * 2000))
