"""Synthetic tasks: a solver written by hand answers every target, and a guess is at chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gla.compare.tasks import KINDS, Task, build_task
from gla.compare.tasks.base import draw_distinct
from gla.data.loader import IGNORE
from gla.errors import ConfigError

Row = np.ndarray
Solver = Callable[[Task, Row], dict[int, int]]  # a row of tokens -> the token asked for, by place


def last_value_of_keys(task: Task, row: Row) -> dict[int, int]:
    """MQAR: read pairs; a key that no value follows is a query."""
    half = task.vocab_size // 2
    known: dict[int, int] = {}
    answers: dict[int, int] = {}
    for place, token in enumerate(row[:-1]):
        if 0 < token < half:
            if row[place + 1] >= half:
                known[token] = row[place + 1]
            else:
                answers[place] = known[token]
    if 0 < row[-1] < half:
        answers[len(row) - 1] = known[row[-1]]
    return answers


def tokens_that_are_not_blank(task: Task, row: Row) -> dict[int, int]:
    first = int(np.argmax(row == 1))
    return dict(zip(range(first, len(row)), row[:first][row[:first] > 1], strict=True))


def what_followed_the_mark(task: Task, row: Row) -> dict[int, int]:
    return {len(row) - 1: row[int(np.argmax(row == 0)) + 1]}


def digits_of_the_text(task: Task, row: Row) -> dict[int, int]:
    text = bytes(row.astype(np.uint8)).decode()
    key = text.split("The pass key is ")[1].split(".")[0]
    asked = text.index("It is ") + len("It is ") - 1
    return {asked + i: ord(digit) for i, digit in enumerate(key)}


def value_of_a_known_key(task: Task, row: Row) -> dict[int, int]:
    real = task.vocab_size - getattr(task, "noise_tokens", 0)
    known, answers = {}, {}
    for place in range(0, len(row), 2):
        key = row[place]
        if key >= real:
            continue
        if key in known:
            answers[place] = known[key]
        if place + 1 < len(row):
            known[key] = row[place + 1]
    return answers


def value_of_a_known_motif(task: Task, row: Row) -> dict[int, int]:
    """Motifs are runs of one half of the vocabulary; keys in tests have three tokens."""
    half = (task.vocab_size - 1) // 2
    runs: list[list[int]] = []
    places = [p for p in range(len(row)) if row[p] < task.vocab_size - 1]
    for place in places:
        starts = row[place] < half and (not runs or row[runs[-1][-1]] >= half)
        ends = row[place] >= half and row[runs[-1][-1]] < half
        if starts or ends:
            runs.append([])
        runs[-1].append(place)
    known: dict[tuple[int, ...], list[int]] = {}
    answers = {}
    for key, value in zip(runs[::2], [*runs[1::2], []], strict=False):
        name = tuple(row[key])
        if name in known:
            answers |= {key[-1] + i: v for i, v in enumerate(known[name])}
        else:
            known[name] = list(row[value])
    return answers


def look_up(task: Task, row: Row) -> dict[int, int]:
    return {place: task.table[row[place - 1]] for place in range(1, len(row), 2)}  # type: ignore[attr-defined]


def the_token_itself(task: Task, row: Row) -> dict[int, int]:
    return {place: row[place] for place in range(len(row) - 1)}


TASKS: list[tuple[dict, Solver]] = [
    ({"kind": "mqar", "vocab_size": 64, "length": 64, "pairs": 8}, last_value_of_keys),
    (
        {"kind": "mqar", "vocab_size": 64, "length": 64, "pairs": 4, "assignments": 3},
        last_value_of_keys,
    ),
    ({"kind": "selective_copy"}, tokens_that_are_not_blank),
    ({"kind": "induction"}, what_followed_the_mark),
    ({"kind": "passkey", "length": 256}, digits_of_the_text),
    ({"kind": "in_context_recall"}, value_of_a_known_key),
    (
        {"kind": "in_context_recall", "vocab_size": 32, "noise_tokens": 16, "noise": 0.2},
        value_of_a_known_key,
    ),
    ({"kind": "fuzzy_recall"}, value_of_a_known_motif),
    ({"kind": "memorize"}, look_up),
    ({"kind": "compress"}, the_token_itself),
]
ids = [f"{table['kind']}-{i}" for i, (table, _) in enumerate(TASKS)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_every_task_has_a_solver() -> None:
    assert {table["kind"] for table, _ in TASKS} == set(KINDS)


@pytest.mark.parametrize(("table", "solve"), TASKS, ids=ids)
def test_a_solver_answers_every_target(table: dict, solve: Solver) -> None:
    task = build_task(table)
    tokens, targets = task.make(rng(), 40, False)
    assert tokens.shape == targets.shape and tokens.min() >= 0
    assert tokens.max() < task.vocab_size
    for row, asked in zip(tokens, targets, strict=True):
        answers = solve(task, row)
        wanted = {int(place): asked[place] for place in np.flatnonzero(asked != IGNORE)}
        assert wanted and {place: answers.get(place) for place in wanted} == wanted


@pytest.mark.parametrize(("table", "solve"), TASKS, ids=ids)
def test_a_guess_among_the_answers_is_at_chance(table: dict, solve: Solver) -> None:
    task = build_task(table)
    targets = np.concatenate([task.make(rng(s), 500, False).targets.ravel() for s in range(8)])
    targets = targets[targets != IGNORE]
    answers = np.unique(targets)
    if task.kind == "mqar":
        assert len(answers) == 32
    guesses = rng(99).choice(answers, size=len(targets))
    error = 4 * np.sqrt(task.chance / len(targets))
    assert abs(float((guesses == targets).mean()) - task.chance) < error
    # No single answer is much likelier than the others: always naming it would beat chance.
    often = np.unique(targets, return_counts=True)[1].max() / len(targets)
    assert often < task.chance * 1.3 + error


@pytest.mark.parametrize(("table", "solve"), TASKS, ids=ids)
def test_examples_follow_from_the_seed(table: dict, solve: Solver) -> None:
    task = build_task(table)
    first, again, other = (task.make(rng(seed), 5, True) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first.tokens != other.tokens).any()


@pytest.mark.parametrize(("table", "solve"), TASKS, ids=ids)
def test_a_target_of_training_is_never_below_the_test_s(table: dict, solve: Solver) -> None:
    task = build_task(table)
    training, testing = (task.make(rng(), 30, flag).targets != IGNORE for flag in (True, False))
    assert training.sum() >= testing.sum()


def test_published_sizes() -> None:
    assert build_task({"kind": "mqar"}).make(rng(), 2, True).tokens.shape == (2, 64)
    assert build_task({"kind": "mqar"}).chance == 1 / 4096
    assert build_task({"kind": "selective_copy"}).make(rng(), 2, True).tokens.shape == (2, 256)
    copied = build_task({"kind": "selective_copy"}).make(rng(), 9, True).targets
    assert ((copied != IGNORE).sum(1) == 16).all()
    lengths = [case.axes["length"] for case in build_task({"kind": "induction"}).cases()]
    assert lengths == [256 * 2**i for i in range(7)]
    memorize = build_task({"kind": "memorize"})
    assert memorize.make(rng(), 2, True).tokens.shape == (2, 32)
    assert sorted(memorize.table) == list(range(127, 254))  # type: ignore[attr-defined]


def test_mqar_keys_differ_and_near_places_are_likelier() -> None:
    table = {"kind": "mqar", "vocab_size": 128, "length": 256, "pairs": 8}
    tokens, targets = build_task(table).make(rng(), 2000, True)
    keys = tokens[:, 0:16:2]
    assert all(len(set(row)) == 8 for row in keys)
    places = np.nonzero(targets != IGNORE)[1]
    assert (places % 2 == 0).all() and places.min() == 16
    near, far = (places < 32).mean(), (places >= 240).mean()
    assert near > 4 * far  # 1/1 + … + 1/8 against 1/113 + … + 1/120, without replacement


def test_a_reassigned_key_has_different_values_and_the_last_counts() -> None:
    table = {"kind": "mqar", "vocab_size": 64, "length": 64, "pairs": 4, "assignments": 3}
    tokens, targets = build_task(table).make(rng(), 200, True)
    for row, asked in zip(tokens, targets, strict=True):
        pairs = list(zip(row[0:24:2], row[1:24:2], strict=True))
        for place in np.flatnonzero(asked != IGNORE):
            values = [value for key, value in pairs if key == row[place]]
            assert len(set(values)) == 3 and values[-1] == asked[place]


def test_a_passkey_stands_at_its_depth() -> None:
    for depth, where in ((0.0, 0), (1.0, None)):
        task = build_task({"kind": "passkey", "length": 600, "depth": depth})
        text = bytes(task.make(rng(), 1, False).tokens[0].astype(np.uint8)).decode()
        found = text.index("The pass key")
        assert found == where if where == 0 else found > 480
    grid = build_task({"kind": "passkey"}).cases()
    assert len(grid) == 20 and grid[0].axes == {"length": 512, "depth": 0.0}


def test_a_mixture_and_its_tests() -> None:
    table = {"kind": "mqar", "vocab_size": 64, "mixture": [[64, 4, 100], [128, 8, 50]]}
    task = build_task({**table, "tests": [[256, 16]]})
    assert [(p.length, p.pairs, n) for p, n in task.parts()] == [(64, 4, 100), (128, 8, 50)]  # type: ignore[attr-defined]
    (case,) = task.cases()
    assert case.axes == {"length": 256, "pairs": 16}
    assert case.task.make(rng(), 1, False).tokens.shape == (1, 256)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "mqar", "length": 8, "pairs": 4}, "length: got 8 for 4 pairs"),
        ({"kind": "mqar", "pair": 4}, "pair: got an unknown key, expected one of"),
        ({"kind": "selective_copy", "length": 20}, "expected at least 32 for 16 copies"),
        ({"kind": "passkey", "length": 40}, "expected at least"),
        ({"kind": "in_context_recall", "noise": 0.2}, "noise_tokens: got 0 of 16"),
        ({"kind": "fuzzy_recall", "length": 12}, "length: got 12, expected at least 18"),
    ],
)
def test_settings_that_cannot_be(table: dict, message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message.replace("(", r"\(")):
        build_task(table)


def test_distinct_draws_follow_their_weights() -> None:
    weights = np.array([6.0, 3.0, 1.0])
    drawn = draw_distinct(rng(), 20_000, 2, weights)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = np.bincount(drawn[:, 0]) / len(drawn)
    assert np.abs(first - [0.6, 0.3, 0.1]).max() < 0.015
    # After 0 was drawn, 1 has 3 of the remaining 4.
    second = drawn[drawn[:, 0] == 0, 1]
    assert abs((second == 1).mean() - 0.75) < 0.015
