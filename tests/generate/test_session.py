"""Sessions against whole forward passes: reading in any pieces, writing, forks, bad input."""

from __future__ import annotations

import codecs
import math
from itertools import islice, zip_longest
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gla.generate.session as session_module
import gla.generate.writer as writer_module
from gla import state
from gla.errors import ConfigError, DataError, NumericsError
from gla.generate.sampling import Sampling, sample, seeded_generator
from gla.generate.session import Session

from .conftest import CONFIG, make_model

PROMPT = "abc de\n    fgh ((a, b)) 123456 Grüße 漢字 😀!!  \n\n x"
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def model():
    return make_model().double()


@pytest.fixture
def session(model, tokenizer):
    return Session(model, tokenizer)


@pytest.fixture
def script(monkeypatch):
    """Return a function that makes the sampler give these tokens, one after another."""

    def install(tokens):
        tokens = iter(tokens)
        monkeypatch.setattr(writer_module, "sample", lambda *_: torch.tensor([next(tokens)]))

    return install


@pytest.fixture
def read_tokens(monkeypatch, model):
    """Every token that the model reads from now on, in order."""
    tokens = []
    prefill = model.prefill

    def spy(ids, *rest):
        tokens.extend(ids[0].tolist())
        return prefill(ids, *rest)

    monkeypatch.setattr(model, "prefill", spy)
    return tokens


def whole_characters(data):
    """The text of bytes but for a character that is unfinished at their end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def whole_forward(model, tokenizer, ids, count, sampling, seed=0):
    """Continue ids by a whole forward pass for each token: the text, and all ids."""
    generator, new, ids = seeded_generator(seed), [], list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1]
        token = int(sample(logits, sampling, [generator]))
        if token == tokenizer.eos_id:
            break
        new.append(token)
        ids.append(token)
    return tokenizer.decode_bytes(new), ids


@pytest.mark.parametrize("prompt", ["", "a", PROMPT, PROMPT * 5])
@pytest.mark.parametrize(
    ("options", "seed"),
    [(GREEDY, None), ({"temperature": 0.8, "top_k": 40, "top_p": 0.9}, 3), ({}, 4)],
)
def test_generation_equals_whole_forward_passes(model, tokenizer, session, prompt, options, seed):
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    sampling = Sampling(**options)
    want, ids = whole_forward(model, tokenizer, ids, 40, sampling, seed or 0)
    session.read(prompt)
    text = "".join(session.generate(40, seed=seed, **options))
    assert text == whole_characters(want)
    assert session.position == len(ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[:, -1]
    torch.testing.assert_close(session._state.logits, logits, rtol=1e-9, atol=1e-9)


def test_greedy_is_the_argmax_of_the_logits(model, tokenizer, session):
    ids = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokenizer.eos_id not in ids
    session.read(PROMPT)
    text = "".join(session.generate(12, **GREEDY))
    assert text == whole_characters(tokenizer.decode_bytes(ids[-12:]))
    assert session.position == len(ids)


def test_every_split_reads_the_same_tokens(model, tokenizer, read_tokens):
    want = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    whole = Session(model, tokenizer)
    whole.read(PROMPT)
    list(whole.generate(0))
    assert read_tokens == want
    for cut in range(len(PROMPT) + 1):
        read_tokens.clear()
        session = Session(model, tokenizer)
        session.read(PROMPT[:cut])
        assert session.position == 1 + len(tokenizer.encode(PROMPT[:cut]))
        session.read(PROMPT[cut:])
        assert session.position == len(want)
        list(session.generate(0))
        assert read_tokens == want
        torch.testing.assert_close(session._state.logits, whole._state.logits)


AWKWARD = st.text(st.sampled_from("ab é漢😀_12345  \n\t\r(),.'\u2581\u2028\x00\x01"), max_size=12)


@settings(max_examples=300, deadline=None)
@example(parts=[" ", " ", " ", "1"])  # two of the spaces are one word, but not without the third
@given(parts=st.lists(AWKWARD, max_size=8))
def test_reading_in_pieces_tokenizes_as_in_one_go(tokenizer, parts):
    ids, waiting = [], ""
    for part in parts:
        waiting += part
        settled = tokenizer.settled(waiting)
        ids += tokenizer.encode(waiting[:settled])
        waiting = waiting[settled:]
    assert ids + tokenizer.encode(waiting) == tokenizer.encode("".join(parts))


def test_little_text_waits(model, tokenizer):
    session = Session(model, tokenizer)
    longest = 0
    for char in PROMPT * 3:
        session.read(char)
        longest = max(longest, len(session._waiting))
    assert longest < 12


def test_long_text_is_read_in_pieces(monkeypatch, model, tokenizer, read_tokens):
    calls = []
    monkeypatch.setattr(session_module, "READ_CHARACTERS", 50)
    spied = model.prefill
    monkeypatch.setattr(model, "prefill", lambda ids, *rest: calls.append(ids) or spied(ids, *rest))
    session = Session(model, tokenizer)
    session.read(PROMPT * 20)
    list(session.generate(0))
    assert read_tokens == [tokenizer.bos_id, *tokenizer.encode(PROMPT * 20)]
    assert len(calls) > 15
    assert max(ids.shape[1] for ids in calls) <= 100


def test_the_state_has_a_constant_size(tokenizer):
    config = CONFIG.replace(', "softmax"', "")
    session = Session(make_model(config=config), tokenizer)
    sizes = set()
    for _ in range(5):
        sizes.add(state.nbytes(session._state))
        session.read(PROMPT * 10)
        list(session.generate(5, **GREEDY))
    assert len(sizes) == 1


def test_generation_goes_on_after_being_dropped(model, tokenizer, session):
    session.read(PROMPT)
    other = session.fork()
    whole = "".join(session.generate(20, **GREEDY))
    first = "".join(islice(other.generate(20, **GREEDY), 3))
    assert other.position < session.position
    rest = "".join(other.generate(session.position - other.position, **GREEDY))
    assert first + rest == whole
    assert len(first) < len(whole)


def test_reading_after_generation(model, tokenizer, session):
    session.read("abc ")
    _, ids = whole_forward(
        model, tokenizer, [tokenizer.bos_id, *tokenizer.encode("abc ")], 7, Sampling(0)
    )
    list(session.generate(7, **GREEDY))
    session.read("fgh de")
    want, ids = whole_forward(model, tokenizer, ids + tokenizer.encode("fgh de"), 9, Sampling(0))
    got = "".join(session.generate(9, **GREEDY))
    assert got == whole_characters(want)
    assert session.position == len(ids)


def test_forks_share_nothing_that_changes(model, tokenizer, session):
    session.read(PROMPT + " ab")
    frozen = state.map_tensors(session._state, torch.clone)
    forks = [session.fork() for _ in range(3)]
    running = [fork.generate(8, seed=i) for i, fork in enumerate(forks)]
    texts = ["".join(column) for column in zip(*zip_longest(*running, fillvalue=""), strict=True)]
    forks[0].read("more text, and more")
    for (name, now), (_, before) in zip(
        state.named_tensors(session._state), state.named_tensors(frozen), strict=True
    ):
        assert torch.equal(now, before), name
    for i, text in enumerate(texts):
        alone = Session(model, tokenizer)
        alone.read(PROMPT + " ab")
        assert text == "".join(alone.generate(8, seed=i))
    assert len(set(texts)) == 3
    pointers = {x.data_ptr() for _, x in state.named_tensors(session._state)}
    assert not pointers & {x.data_ptr() for _, x in state.named_tensors(session.fork()._state)}


def test_no_character_is_cut(tokenizer, session, script):
    data = "é漢😀".encode()
    ids = [tokenizer._byte_ids[byte] for byte in data]
    script(ids)
    pieces = list(session.generate(len(ids)))
    assert pieces == ["é", "漢", "😀"]


def test_a_character_is_finished_by_the_next_call(tokenizer, session, script):
    ids = [tokenizer._byte_ids[byte] for byte in "a😀b".encode()]
    for cut in range(len(ids) + 1):
        script(ids)
        twin = session.fork()
        first, second = list(twin.generate(cut)), list(twin.generate(len(ids) - cut))
        assert "".join(first + second) == "a😀b"
        assert all("\ufffd" not in piece and piece for piece in first + second)


def test_reading_drops_an_unfinished_character(tokenizer, session, script):
    emoji = [tokenizer._byte_ids[byte] for byte in "😀".encode()]
    script([*emoji[:2], *tokenizer.encode("b")])
    assert list(session.generate(2)) == []
    session.read("")
    assert session.fork()._unfinished
    session.read("a")
    assert list(session.generate(1)) == ["b"]


def test_bytes_that_are_no_character_are_replaced(tokenizer, session, script):
    script([tokenizer._byte_ids[byte] for byte in (0xFF, 0x80, 0xC3, 0x28)])
    assert "".join(session.generate(4)) == "\ufffd\ufffd\ufffd("


def test_a_mark_prints_as_one_short_line(session):
    session.read("abc de (fgh")
    mark = session.mark()
    assert (
        repr(mark) == f"Mark(tokens={int(mark.state.model.position[0])}, waiting={mark.waiting!r})"
    )
    assert mark.waiting == session._waiting != "" and len(repr(mark)) < 50


def test_the_end_mark_stops_and_stays_out_of_the_state(tokenizer, session, script):
    script([*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b")])
    assert list(session.generate(10)) == ["a"]
    assert session.position == 2
    assert list(session.generate(1)) == ["b"]


def test_control_marks_come_out_as_nothing(tokenizer, session, script):
    script([tokenizer.bos_id, *tokenizer.encode("a")])
    assert list(session.generate(2)) == ["a"]
    assert session.position == 3


def test_marks_in_the_text_are_text(tokenizer, session, read_tokens):
    session.read("<s></s>")
    list(session.generate(0))
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(read_tokens)


def test_nothing_read_and_nothing_asked_for(model, tokenizer, session):
    assert session.position == 1
    assert list(session.generate(0)) == []
    assert session.position == 1
    session.read("")
    logits = model(torch.tensor([[tokenizer.bos_id]])).logits[:, -1]
    torch.testing.assert_close(session._state.logits, logits)


def test_a_seed_repeats(session):
    session.read(PROMPT)
    texts = ["".join(session.fork().generate(30, seed=seed)) for seed in (5, 5, 6, None, None)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": -1},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_k": 0},
        {"top_k": 321},
        {"seed": -1},
    ],
)
def test_bad_values_are_refused_at_the_call(session, options):
    name = next(iter(options))
    with pytest.raises(ConfigError, match=rf"^{name}: got .*, expected .*; fix"):
        session.generate(**{"max_new_tokens": 1, **options})


def test_not_a_number_is_a_numerics_error(tokenizer):
    model = make_model()
    with torch.no_grad():
        model.embed.weight[7, 0] = math.nan
    session = Session(model, tokenizer)
    with pytest.raises(NumericsError, match=r"^logits: got"):
        list(session.generate(1))


def test_a_lone_surrogate_is_refused_and_nothing_read(session):
    session.read("ab")
    with pytest.raises(DataError, match=r"^text: got the lone surrogate U\+D800 at character 2"):
        session.read("cd\ud800")
    assert session._waiting == "ab"


def test_another_vocabulary_is_refused(tokenizer):
    model = make_model(config=CONFIG.replace("320", "300"))
    with pytest.raises(ConfigError, match=r"^model.vocab_size: got 300, expected .* 320"):
        Session(model, tokenizer)
