"""Rows of a batch against sessions alone: prompts of any lengths, comings and goings, beams."""

from __future__ import annotations

import random

import pytest
import torch

from gla import state
from gla.errors import ConfigError, NumericsError
from gla.generate.batch import Batch, read_together, write_together
from gla.generate.sampling import Sampling
from gla.generate.session import Session
from gla.generate.writer import Request

from .conftest import make_model

PROMPTS = ["abc de\n    fgh ((a, b)) 123456 Grüße 漢字 😀!!", "", "a", "ab " * 40, "b\n\n\n", "😀"]
SAMPLED = Sampling(0.8, top_k=40, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1)


@pytest.fixture(scope="module")
def root(tokenizer):
    session = Session(make_model().double(), tokenizer)
    session.read("de fgh ")
    return session


def text_of(token):
    assert token is not None
    return token.text


def alone(root, prompt, request):
    session = root.fork()
    session.read(prompt)
    text = "".join(token.text for token in session.generate_tokens(request))
    return text, session


@pytest.mark.parametrize("sampling", [Sampling(0), SAMPLED])
def test_many_prompts_equal_each_alone(root, sampling):
    request = Request(25, sampling)
    seeds = range(10, 10 + len(PROMPTS))
    got = write_together(root, PROMPTS, request, seeds)
    want = [
        alone(root, prompt, Request(25, sampling, seed=seed))[0]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert got == want
    assert len(set(want)) == len(PROMPTS)


def test_reading_together_gives_the_states_of_reading_alone(root):
    for session, prompt in zip(read_together(root, PROMPTS), PROMPTS, strict=True):
        want = root.fork()
        want.read(prompt)
        assert session.position == want.position
        assert session._waiting == want._waiting
        # Caches may have spare room of different sizes: what they hold shows in what comes next.
        torch.testing.assert_close(session._state.logits, want._state.logits)
        for twin in (session, want):
            twin.read(" abc de fgh ")
        torch.testing.assert_close(session._state.logits, want._state.logits)


def test_rows_come_and_go_and_equal_each_alone(root):
    rng = random.Random(0)
    batch, texts, jobs = Batch(), {}, {}
    waiting = [(i, PROMPTS[i % len(PROMPTS)], rng.randrange(1, 20)) for i in range(14)]
    while waiting or batch.rows:
        while waiting and rng.random() < 0.4:
            i, prompt, count = waiting.pop()
            session = root.fork()
            session.read(prompt)
            request = Request(count, SAMPLED if i % 2 else Sampling(0), ("漢",), seed=i)
            row = batch.join(session, request)
            jobs[row], texts[row] = (prompt, request), ""
        for row, token in batch.step():
            texts[row] += text_of(token)
    assert len(jobs) == 14
    for row, (prompt, request) in jobs.items():
        text, session = alone(root, prompt, request)
        assert texts[row] == text
        assert row.session.position == session.position
        torch.testing.assert_close(row.session._state.logits, session._state.logits)
        assert list(row.session.generate(3, seed=0)) == list(session.generate(3, seed=0))


def test_a_row_that_leaves_early_goes_on_alone(root):
    request = Request(20, Sampling(0))
    batch = Batch()
    rows = [batch.join(session, request) for session in read_together(root, PROMPTS[:3])]
    text = "".join(
        text_of(token) for _ in range(6) for row, token in batch.step() if row is rows[1]
    )
    batch.leave([rows[1]])
    assert batch.rows == [rows[0], rows[2]]
    text += "".join(rows[1].session.generate(14, temperature=0))
    assert text == alone(root, PROMPTS[1], request)[0]


def test_selected_rows_equal_reading_them_again(root):
    batch = Batch()
    request = Request(30, SAMPLED, seed=4)
    for session in read_together(root, PROMPTS[:3]):
        batch.join(session, request)
    first = [batch.step() for _ in range(5)]
    texts = ["".join(text_of(step[i].token) for step in first) for i in range(3)]
    rows = list(batch.rows)
    batch.select([2, 0, 2])
    assert batch.rows[:2] == [rows[2], rows[0]] and batch.rows[2] not in rows
    assert rows[1].session.position > root.position
    written = {row: "" for row in batch.rows}
    while batch.rows:
        for row, token in batch.step():
            written[row] += text_of(token)
    got = [texts[i] + text for i, text in zip((2, 0, 2), written.values(), strict=True)]
    want = [alone(root, PROMPTS[i], request)[0] for i in (2, 0, 2)]
    assert got == want


def test_a_row_without_a_distribution_ends_alone(root):
    batch = Batch()
    rows = [batch.join(s, Request(5, Sampling(0))) for s in read_together(root, PROMPTS[:3])]
    batch.step()
    batch._state.logits[1, 3] = float("nan")  # pyright: ignore[reportOptionalMemberAccess]
    events = batch.step()
    assert [token is None for _, token in events] == [False, True, False]
    assert isinstance(rows[1].error, NumericsError) and batch.rows == [rows[0], rows[2]]


def test_concatenated_states_give_room_to_small_caches(root):
    sessions = [root.fork() for _ in PROMPTS]
    for session, prompt in zip(sessions, PROMPTS, strict=True):
        session.read(prompt * 5)
    joined = state.concatenate([session._state.model for session in sessions])
    tokens = torch.arange(5, 5 + len(PROMPTS))
    logits, _ = root._decoder.model.decode_step(tokens, joined)
    for i, session in enumerate(sessions):
        want, _ = root._decoder.model.decode_step(tokens[i : i + 1], session._state.model)
        torch.testing.assert_close(logits[i : i + 1], want)


def test_a_session_of_another_model_is_refused(root, tokenizer):
    batch = Batch()
    batch.join(root.fork(), Request(3))
    with pytest.raises(ConfigError, match=r"^session: got one of another model"):
        batch.join(Session(make_model(), tokenizer), Request(3))


def test_nothing_asked_for_joins_nothing(root):
    batch = Batch()
    row = batch.join(root.fork(), Request(0))
    assert row.writer.finish == "length" and not batch.rows and batch.step() == []
    assert write_together(root, [], Request(3)) == []
