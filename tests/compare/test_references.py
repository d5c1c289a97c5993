"""The n-gram references against brute-force dictionaries; xz against the program of that name."""

import math
import random
import shutil
import subprocess
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from gla.compare import references as refs
from gla.data.prepare import prepare
from gla.data.shards import TokenDataset
from gla.data.tokenizer import Tokenizer
from gla.errors import DataError

VOCAB = 11
BOS, EOS = 0, 1


def documents(seed, count, longest=30):
    """Seeded documents over part of the vocabulary: some tokens never occur."""
    rng = random.Random(seed)
    return [
        [BOS, *(rng.choice([3, 3, 3, 4, 5, 6, 9]) for _ in range(rng.randrange(longest))), EOS]
        for _ in range(count)
    ]


def counts(docs):
    return refs.count_pairs((np.array(doc, np.uint16) for doc in docs), VOCAB)


def pair_dictionary(docs):
    return Counter(pair for doc in docs for pair in pairwise(doc))


def discounted(table, discount):
    """p(w) for every w: absolute discounting with the uniform distribution below."""
    total, kinds = sum(table.values()), sum(c > 0 for c in table.values())
    return [
        max(table.get(w, 0) - discount, 0) / total + discount * kinds / total / VOCAB
        for w in range(VOCAB)
    ]


def plain_unigram(docs, discount):
    table = Counter(token for doc in docs for token in doc[1:])
    return lambda u, w: discounted(table, discount)[w]


def plain_bigram(docs, discount):
    pairs = pair_dictionary(docs)
    lower = discounted(Counter(w for _, w in pairs), discount)

    def prob(u, w):
        after = {b: c for (a, b), c in pairs.items() if a == u}
        if not after:
            return lower[w]
        total = sum(after.values())
        freed = discount * len(after) / total
        return max(after.get(w, 0) - discount, 0) / total + freed * lower[w]

    return prob


def every_pair():
    return refs.PairCounts(np.arange(VOCAB**2), np.ones(VOCAB**2, np.int64), VOCAB)


KINDS = [(refs.UnigramModel, plain_unigram), (refs.BigramModel, plain_bigram)]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_counts_equal_a_dictionary(chunk, monkeypatch):
    monkeypatch.setattr(refs, "TOKENS_AT_ONCE", chunk)
    docs = documents(0, 20)
    got = counts(docs)
    want = pair_dictionary(docs)
    keys = zip(got.previous.tolist(), got.next.tolist(), strict=True)
    assert dict(zip(keys, got.counts.tolist(), strict=True)) == dict(want)
    assert got.total == sum(len(doc) - 1 for doc in docs)
    assert got.codes.tolist() == sorted(got.codes.tolist())


def test_large_vocabularies_do_not_wrap():
    vocab = 1 << 17
    doc = np.array([vocab - 1, vocab - 2, vocab - 1], np.uint32)
    got = refs.count_pairs([doc], vocab)
    assert got.previous.tolist() == [vocab - 2, vocab - 1]
    assert got.next.tolist() == [vocab - 1, vocab - 2]


@pytest.mark.parametrize(("kind", "plain"), KINDS)
@pytest.mark.parametrize("discount", [0.05, 0.5, 0.95])
def test_probabilities_equal_the_brute_force_and_sum_to_one(kind, plain, discount):
    docs = documents(1, 8)
    got = np.exp(kind(counts(docs), discount).log_probs(every_pair())).reshape(VOCAB, VOCAB)
    prob = plain(docs, discount)
    want = [[prob(u, w) for w in range(VOCAB)] for u in range(VOCAB)]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(got.sum(1), 1, rtol=1e-12)


@pytest.mark.parametrize("kind", [refs.UnigramModel, refs.BigramModel])
def test_a_model_of_nothing_is_uniform(kind):
    probs = np.exp(kind(counts([]), 0.5).log_probs(every_pair()))
    np.testing.assert_allclose(probs, 1 / VOCAB, rtol=1e-12)


@pytest.mark.parametrize(("kind", "plain"), KINDS)
def test_loss_is_the_mean_over_every_target(kind, plain):
    train, val = documents(2, 10), documents(3, 4)
    prob = plain(train, 0.4)
    targets = [(u, w) for doc in val for u, w in pairwise(doc)]
    want = -sum(math.log(prob(u, w)) for u, w in targets) / len(targets)
    assert math.isclose(refs.loss(kind(counts(train), 0.4), counts(val)), want, rel_tol=1e-12)


@pytest.mark.parametrize("kind", [refs.UnigramModel, refs.BigramModel])
def test_the_discount_is_the_best_on_the_tuning_part_and_all_documents_count(kind):
    docs = documents(4, 40, longest=12)
    tuning, others = counts(docs[::10]), counts([d for i, d in enumerate(docs) if i % 10])
    model = refs.fit(kind, tuning, others)
    tried = {d: refs.loss(kind(others, d), tuning) for d in refs.DISCOUNTS}
    assert tried[model.discount] == min(tried.values()) < max(tried.values())
    want = kind(counts(docs), model.discount).log_probs(every_pair())
    np.testing.assert_array_equal(model.log_probs(every_pair()), want)


def test_a_bigram_model_finds_what_a_unigram_model_cannot():
    docs = [[BOS, *([4, 5] * 50), EOS]] * 10
    unigram, bigram = (
        refs.loss(refs.fit(kind, counts(docs[:1]), counts(docs[1:])), counts(docs))
        for kind in (refs.UnigramModel, refs.BigramModel)
    )
    assert bigram < 0.1 < 0.6 < unigram


@pytest.mark.skipif(not shutil.which("xz"), reason="no xz program here")
@pytest.mark.parametrize("size", [0, 1, 50_000])
def test_xz_size_is_that_of_the_program(size):
    text = random.Random(5).choices(b"abcdef \n", k=size)
    data = bytes(text)
    program = subprocess.run(["xz", "-9e", "-c"], input=data, capture_output=True, check=True)  # noqa: S607
    pieces = [data[i : i + 777] for i in range(0, size, 777)]
    assert refs.xz_size(pieces) == len(program.stdout)


@pytest.fixture
def data(tmp_path):
    """A prepared folder with documents that a bigram model can learn something from."""
    rng = random.Random(6)
    texts = [
        "".join(
            rng.choice(["def f(x):\n", "    return x\n", "y = f(1)\n", "é 漢\n"]) for _ in range(40)
        )
        for _ in range(60)
    ]
    files = tmp_path / "text"
    files.mkdir()
    for i, text in enumerate(texts):
        (files / f"{i}.txt").write_text(text, encoding="utf-8")
    Tokenizer.train(files, 300, tmp_path / "tokenizer")
    prepare(files, tmp_path / "tokenizer", tmp_path / "data", val_fraction=0.2)
    return tmp_path / "data"


def test_references_of_prepared_data(data):
    rows = refs.references(data, xz_after_train=True)
    val = TokenDataset.open(data / "val")
    starts = val.document_starts
    docs = [val.tokens(a, b).tolist() for a, b in pairwise(starts)]
    train = TokenDataset.open(data / "train")
    train_docs = [train.tokens(a, b).tolist() for a, b in pairwise(train.document_starts)]
    raw = [Tokenizer.load(data / "tokenizer").decode_bytes(doc) for doc in docs]
    assert list(rows) == ["unigram", "bigram", "xz -9e", "xz -9e after train"]
    assert {row["bytes"] for row in rows.values()} == {sum(map(len, raw))} == {val.num_bytes}
    table = Counter(token for doc in train_docs for token in doc[1:])
    total, kinds = sum(table.values()), len(table)
    nats = min(
        -sum(
            math.log((max(table[w] - d, 0) + d * kinds / val.vocab_size) / total)
            for doc in docs
            for w in doc[1:]
        )
        for d in refs.DISCOUNTS
    )
    targets = sum(len(doc) - 1 for doc in docs)
    assert rows["unigram"]["tokens"] == targets
    assert rows["unigram"]["bpb"] == pytest.approx(nats / math.log(2) / val.num_bytes, rel=1e-3)
    assert rows["unigram"]["loss"] == pytest.approx(nats / targets, rel=1e-3)
    for name in ("unigram", "bigram"):
        assert rows[name]["ppl"] == pytest.approx(math.exp(rows[name]["loss"]))
    assert rows["xz -9e"]["bpb"] == 8 * refs.xz_size([b"".join(raw)]) / val.num_bytes
    assert rows["bigram"]["bpb"] < rows["unigram"]["bpb"]
    tokenizer = Tokenizer.load(data / "tokenizer")
    before = [tokenizer.decode_bytes(doc) for doc in train_docs]
    added = refs.xz_size(before + raw) - refs.xz_size(before)
    assert rows["xz -9e after train"]["bpb"] == 8 * added / val.num_bytes
    assert rows["xz -9e after train"]["bpb"] < rows["xz -9e"]["bpb"]


def test_xz_is_given_no_more_text_than_it_looks_back(data, monkeypatch):
    train = TokenDataset.open(data / "train")
    sizes = train.document_bytes.tolist()
    for size in (0, sizes[-1] - 1, sizes[-1], sizes[-1] + sizes[-2], sum(sizes) - 1, sum(sizes)):
        first = refs.first_of_last(train, size)
        assert sum(sizes[first:]) <= size
        assert first == 0 or sum(sizes[first - 1 :]) > size
    seen = []
    monkeypatch.setattr(refs, "XZ_BYTES", sum(sizes[-3:]))
    monkeypatch.setattr(refs, "xz_size", lambda text: seen.append(sum(map(len, text))) or 1)
    refs.references(data, xz_after_train=True)
    val = TokenDataset.open(data / "val").num_bytes
    assert sorted(seen) == sorted([val, sum(sizes[-3:]), sum(sizes[-3:]) + val])


def test_missing_data_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="train"):
        refs.references(tmp_path)
