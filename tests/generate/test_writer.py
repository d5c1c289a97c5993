"""Stop strings across pieces, penalties and min-p by hand, log-probabilities, marks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla.errors import ConfigError, StateError
from gla.generate.sampling import Sampling, probabilities
from gla.generate.session import Session
from gla.generate.writer import Request, Writer

from .conftest import make_model


def write(tokenizer, ids, stop=(), limit=None):
    """What comes out of a writer for given tokens, piece by piece, and the writer."""
    writer = Writer(Request(limit or len(ids), Sampling(0), tuple(stop)), tokenizer)
    pieces = []
    for token in ids:
        if writer.finish is not None:
            break
        pieces.append(writer.take(token, torch.zeros(tokenizer.vocab_size)).text)
    return pieces, writer


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab漢", min_size=1, max_size=14),
    stop=st.lists(st.text("ab漢", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(tokenizer, text, stop):
    ids = [tokenizer._byte_ids[byte] for byte in text.encode()]  # the smallest pieces
    pieces, writer = write(tokenizer, ids, stop)
    # The first to be complete; of those complete at once, the one that begins first.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    want = text[: min(ends)[1]] if ends else text
    assert "".join(pieces) == want
    assert writer.finish == ("stop" if ends else "length")


def test_a_piece_with_several_stop_strings_ends_as_its_characters_would(tokenizer):
    text = next(p.decode() for p in tokenizer._bytes if p.isascii() and len(p) > 3)
    piece, stops = tokenizer.encode(text), [text, text[1:3]]
    assert len(piece) == 1  # the shorter stop string is complete first, the longer one begins first
    letters = [tokenizer._byte_ids[byte] for byte in text.encode()]
    assert ["".join(write(tokenizer, ids, stops)[0]) for ids in (piece, letters)] == [text[0]] * 2


def test_text_is_held_back_only_while_it_may_become_a_stop_string(tokenizer):
    ids = [tokenizer._byte_ids[byte] for byte in b"aabaacx"]
    assert write(tokenizer, ids, ["aac"])[0] == ["", "", "aab", "", "", ""]
    assert write(tokenizer, ids, ["zz"])[0] == list("aabaacx")
    assert write(tokenizer, ids[:5], ["aac"])[0] == ["", "", "aab", "", "aa"]
    pieces, writer = write(tokenizer, [*ids[:5], tokenizer.eos_id], ["aac"], 9)
    assert pieces == ["", "", "aab", "", "", "aa"] and writer.ended


def test_a_stop_string_is_found_in_generated_text(tokenizer):
    session = Session(make_model().double(), tokenizer)
    whole = "".join(session.fork().generate(40, temperature=0))
    for start in range(3, 12):
        stop = whole[start : start + 4]
        got = "".join(session.fork().generate(40, temperature=0, stop=stop))
        assert got == whole[: whole.index(stop)]


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    counts = torch.tensor([[2, 1, 0, 0]])
    options = Sampling(repetition_penalty=2.0, frequency_penalty=0.5)
    want = torch.softmax(torch.tensor([[1.0 - 1.0, -2.0 - 0.5, 0.5, 3.0]]).double(), -1)
    torch.testing.assert_close(probabilities(logits, options, counts), want)


def test_penalties_are_computed_in_fp64():
    got = probabilities(torch.zeros(1, 2), Sampling(frequency_penalty=0.1), torch.tensor([[1, 0]]))[
        0
    ]
    assert float(got[0] / got[1]) == pytest.approx(math.exp(-0.1), rel=1e-14)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"frequency_penalty": 1e308}, 2),
        ({"frequency_penalty": -1e308}, 0),
        ({"repetition_penalty": 1e-308}, 0),
        ({"repetition_penalty": 1e-308, "frequency_penalty": 1e308}, 2),
        ({"repetition_penalty": 1e308}, 2),
    ],
)
def test_extreme_penalties_still_choose(options, want):
    logits, counts = torch.tensor([[5.0, -3, 1, -math.inf]]), torch.tensor([[3, 0, 0, 0]])
    got = probabilities(logits, Sampling(**options), counts)
    assert int(got.argmax()) == want and float(got.sum()) == pytest.approx(1)


def test_min_p_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).double()
    got = probabilities(probs.log(), Sampling(min_p=0.3))
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.3, 0.15, 0]]).double() / 0.95)
    assert probabilities(probs.log(), Sampling(min_p=1.0)).tolist() == [[1, 0, 0, 0]]


def test_penalties_make_repetition_rarer(tokenizer):
    session = Session(make_model(), tokenizer)
    plain = list(session.fork().generate_tokens(Request(120, Sampling(0))))
    penal = Sampling(0, repetition_penalty=1.5, frequency_penalty=2.0)
    varied = list(session.fork().generate_tokens(Request(120, penal)))
    assert len({t.id for t in varied}) / len(varied) > len({t.id for t in plain}) / len(plain)


def test_log_probabilities_are_those_of_the_model(tokenizer):
    model = make_model().double()
    session = Session(model, tokenizer)
    session.read("abc de ")
    ids = [tokenizer.bos_id, *tokenizer.encode("abc de ")]
    sampling = Sampling(0.7, top_k=5, repetition_penalty=1.3)
    for token in session.generate_tokens(Request(10, sampling, seed=1, top_logprobs=4)):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
        assert token.logprob == pytest.approx(float(logprobs[token.id]), abs=1e-9)
        values, best = logprobs.topk(4)
        assert [i for i, _ in token.top] == best.tolist()
        assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=1e-9)
        ids.append(token.id)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"stop": ["a", ""]}, "stop"),
    ],
)
def test_bad_values_are_refused_at_the_call(tokenizer, options, name):
    session = Session(make_model(), tokenizer)
    with pytest.raises(ConfigError, match=rf"^{name}: got .*, expected .*; fix"):
        session.generate(3, **options)


@pytest.mark.parametrize("top", [-1, 321])
def test_bad_numbers_of_log_probabilities_are_refused(tokenizer, top):
    with pytest.raises(ConfigError, match=r"^top_logprobs: got .*, expected .*; fix"):
        Writer(Request(1, top_logprobs=top), tokenizer)


def test_rewinding_goes_back_exactly_and_more_than_once(tokenizer):
    session = Session(make_model(), tokenizer)
    session.read("abc de (fgh")
    start = session.position
    mark = session.mark()
    texts = []
    for more in ("", "ab", " 123 漢字"):
        session.read(more)
        texts.append("".join(session.generate(20, seed=3)))
        session.rewind(mark)
        assert session.position == start
    twin = session.fork()
    twin.read("ab")
    assert texts[1] == "".join(twin.generate(20, seed=3))
    twin.rewind(mark)
    assert "".join(twin.generate(20, seed=3)) == texts[0]
    with pytest.raises(StateError, match=r"^mark: got Mark.*, expected one of this session"):
        Session(make_model(), tokenizer).rewind(mark)
