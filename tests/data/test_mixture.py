"""Shares of a mixture hold from the first item to the last."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gla.data.corpus import Corpus
from gla.data.mixture import mix
from gla.errors import ConfigError


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=40), min_size=1, max_size=4),
    st.data(),
)
def test_shares_hold_at_any_moment(sizes: list[list[int]], data: st.DataObject) -> None:
    n = len(sizes)
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=n, max_size=n))
    streams = [iter([(i, size) for size in part]) for i, part in enumerate(sizes)]
    taken = [0] * n
    count = [0] * n
    for i, size in mix(streams, weights, lambda item: item[1]):
        assert size == sizes[i][count[i]]  # each stream in its own order, nothing left out
        behind = min(t / w for t, w in zip(taken, weights, strict=True))
        assert taken[i] / weights[i] == pytest.approx(behind)
        taken[i] += size
        count[i] += 1
    ended = [i for i in range(n) if count[i] == len(sizes[i])]
    assert ended  # it goes on as long as the shares can be kept


def test_a_corpus_with_weights(tmp_path: Path) -> None:
    for name, count in (("a", 100), ("b", 100)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i:03}.txt").write_text(f"{name}{i:03} " * 10)
    corpus = Corpus([tmp_path / "a", tmp_path / "b"], weights=[3, 1])
    texts = [document.text for document in corpus]
    assert sum(text.startswith("a") for text in texts) == 100
    assert sum(text.startswith("b") for text in texts) in (33, 34)
    assert [text[0] for text in texts[:5]].count("a") >= 3
    assert [d.text for d in corpus] == texts
    used = sum(text.startswith("b") for text in texts)
    assert corpus.end_of_mixture() == (
        f"mixture: ended where {tmp_path / 'a'} ran out, with all of its 100 documents used; "
        f"{tmp_path / 'b'}: {used} documents used, the rest left out"
    )
    assert Corpus([tmp_path / "a"], weights=[1]).end_of_mixture() is None  # not read yet
    plain = Corpus([tmp_path / "a", tmp_path / "b"])
    assert len(list(plain)) == 200 and plain.end_of_mixture() is None


def test_shares_are_those_of_what_is_kept(tmp_path: Path) -> None:
    """One source holds each row four times, and some rows of the other one."""
    rows = [f"a{i:03} " * 10 for i in range(90)]
    others = [f"b{i:03} " * 10 for i in range(90)]
    a = [row for row in rows for _ in range(4)]
    for name, texts in (("a", a + others[::3]), ("b", others)):
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    corpus = Corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], weights=[3, 1])
    for _ in range(2):  # each iteration begins anew
        texts = [document.text for document in corpus.unique()]
        assert len(set(texts)) == len(texts)
        for n in range(1, 121):
            assert abs(sum(text[0] == "a" for text in texts[:n]) - 0.75 * n) <= 1, n
        assert [text for text in texts if text[0] == "a"] == rows
        assert corpus.duplicates >= 3 * 90
        said = corpus.end_of_mixture()
        assert said is not None and "a.jsonl ran out" in said
        assert sum(map(int, re.findall(r"(\d+) documents used", said))) == len(texts)
    assert [document.text for document in corpus].count(rows[0]) == 4


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_wrong_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        Corpus(["a", "b"], weights=weights)
