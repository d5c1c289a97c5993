"""The tokenizer: nothing is lost, nothing crashes, the same text gives the same file."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gla.data.corpus import Corpus, Document
from gla.data.tokenizer import FACTS_FILE, MODEL_FILE, Tokenizer
from gla.data.vocabulary import MAX_WORD
from gla.errors import ConfigError, DataError

from .conftest import train_text

# What SentencePiece or our stand-ins treat in a special way, beside ordinary and rare characters.
AWKWARD = (
    "\x00\x01\x02\x03\u2581\u2585\u2047\ufeff\ufffd \t\n\r\v\f\x1c\x85\u2028\xa0<>s/_09aé漢😀'"
)
STRINGS = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    " leading and trailing ",
    "a  b   c    d",
    "\tif x:\n\t\treturn\n",
    "def f():\n    return 1\n",
    "<s>",
    "</s>",
    "<unk>",
    "<0x41>",
    " ⁇ ",
    "▁",
    "a▁b",
    "▅",
    "\x00",
    "a\x00b",
    "\x01\x02\x03",
    "\ufeffBOM",
    "e\u0301 é",
    "ﬁ \uff21 ①",
    "😀👩‍👩‍👧‍👦",
    "ꙮ𐍈\U0010ffff",
    "1234567890 3.14 0xFF",
]


@pytest.mark.parametrize("text", STRINGS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert_round_trip(tokenizer, text)


def assert_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.piece_bytes[ids].sum() == len(text.encode())


@given(st.text() | st.text(alphabet=AWKWARD) | st.lists(st.sampled_from(STRINGS)).map("".join))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert_round_trip(tokenizer, text)


@given(st.text(alphabet=AWKWARD), st.integers(0, 20))
def test_bytes_survive_a_cut(tokenizer: Tokenizer, text: str, at: int) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids[:at]) + tokenizer.decode_bytes(ids[at:]) == text.encode()


@given(st.text(alphabet=AWKWARD + "   ab"), st.text(alphabet=AWKWARD + "   ab"))
def test_settled_text_keeps_its_ids(tokenizer: Tokenizer, text: str, more: str) -> None:
    at = tokenizer.settled(text)
    head, tail = tokenizer.encode(text[:at]), tokenizer.encode(text[at:] + more)
    assert head + tail == tokenizer.encode(text + more)


@given(
    st.lists(
        st.tuples(st.sampled_from(" a1!\n\t漢"), st.integers(1, 3 * MAX_WORD)),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_long_runs_cut_anywhere_keep_their_ids(
    tokenizer: Tokenizer, runs: list[tuple[str, int]], data: st.DataObject
) -> None:
    text = "".join(char * count for char, count in runs)
    cut = data.draw(st.integers(0, len(text)))
    at = tokenizer.settled(text[:cut])
    assert tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) == tokenizer.encode(text)
    assert cut - at < 4 * MAX_WORD


def test_most_of_a_text_is_settled(tokenizer: Tokenizer) -> None:
    assert tokenizer.settled("") == tokenizer.settled("a") == 0
    assert tokenizer.settled("one two three ") == len("one two")
    assert tokenizer.settled(train_text()) > len(train_text()) - 20


def test_own_training_text_round_trips(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(train_text())) == train_text()


def test_pieces_span_line_end_and_indentation(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("):\n        ")) < len("):\n        ") / 2


def test_control_pieces_stand_for_nothing(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.bos_id, *tokenizer.encode("text"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "text"
    assert tokenizer.piece_bytes.dtype == np.int32
    assert tokenizer.piece_bytes.shape == (tokenizer.vocab_size,) == (512,)
    assert np.flatnonzero(tokenizer.piece_bytes == 0).tolist() == [
        0,
        tokenizer.bos_id,
        tokenizer.eos_id,
    ]


@pytest.mark.parametrize("word", ["a", "ab1", "\x00", " ", "é漢", "\n", "!", "_", "\U0001f600"])
def test_a_long_word_takes_bounded_time(tokenizer: Tokenizer, word: str) -> None:
    text = word * (200_000 // len(word))
    start = time.perf_counter()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "漢 \udc80 x" * 3])
def test_a_lone_surrogate_is_an_error(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(DataError, match=r"lone surrogate U\+D[8-F]") as caught:
        tokenizer.encode(text)
    at = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    assert f"character {at}," in str(caught.value)


@pytest.mark.parametrize("wrong", [-1, 512, 10**9, 10**30])
def test_decode_refuses_ids_out_of_range(tokenizer: Tokenizer, wrong: int) -> None:
    for ids in ([wrong], [5, wrong], iter([wrong, 5])):
        with pytest.raises(DataError, match="ids"):
            tokenizer.decode(ids)


def test_decode_takes_arrays_and_refuses_other_things(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("some text")
    assert tokenizer.decode(np.array(ids, np.uint16)) == "some text"
    assert tokenizer.decode(iter(ids)) == "some text"
    for wrong in ([1.5], np.array([[1, 2]]), np.array([True])):
        with pytest.raises(DataError, match="expected a row of integers"):
            tokenizer.decode(wrong)  # pyright: ignore[reportArgumentType]


def test_a_cut_character_is_shown_as_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ꙮ")
    assert len(ids) == 3
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    assert tokenizer.decode_bytes(ids[:2]) == "ꙮ".encode()[:2]


# Files


def test_load_gives_the_same_tokenizer(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    again = Tokenizer.load(tokenizer_dir)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode(train_text()) == tokenizer.encode(train_text())


@pytest.mark.parametrize("name", [MODEL_FILE, FACTS_FILE])
def test_a_missing_file_is_named(tokenizer_dir: Path, tmp_path: Path, name: str) -> None:
    for file in (MODEL_FILE, FACTS_FILE):
        if file != name:
            (tmp_path / file).write_bytes((tokenizer_dir / file).read_bytes())
    with pytest.raises(DataError, match="No such file") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", [MODEL_FILE, FACTS_FILE])
def test_mutants_never_load(
    tokenizer_dir: Path, tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    rng = np.random.default_rng(0)
    files = {file: (tokenizer_dir / file).read_bytes() for file in (MODEL_FILE, FACTS_FILE)}
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    refused = 0
    for i in range(400):
        data = bytearray(files[name])
        at = int(rng.integers(len(data)))
        if i % 4 == 0:
            del data[at:]
        elif i % 4 == 1:
            del data[at]
        elif i % 4 == 2:
            data.insert(at, int(rng.integers(256)))
        else:
            data[at] ^= 1 << int(rng.integers(8))
        (tmp_path / name).write_bytes(data)
        try:  # in the description, some changes are harmless: the model is still the same
            assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
        except DataError as reason:
            assert str(tmp_path) in str(reason)
            refused += 1
    assert refused == 400 if name == MODEL_FILE else refused > 200


def test_a_newer_format_is_refused(tokenizer_dir: Path, tmp_path: Path) -> None:
    facts = json.loads((tokenizer_dir / FACTS_FILE).read_bytes())
    (tmp_path / FACTS_FILE).write_text(json.dumps({**facts, "format": 2}))
    with pytest.raises(DataError, match="got format 2, expected 1"):
        Tokenizer.load(tmp_path)


def test_bytes_that_are_no_model() -> None:
    for data in (b"", b"not a model", b"\x0a\x05"):
        with pytest.raises(DataError, match="model"):
            Tokenizer(data)


# Training


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(train_text(), encoding="utf-8")
    code = (
        "import sys; from gla.data.tokenizer import Tokenizer;"
        "print(Tokenizer.train(sys.argv[1], 400, sys.argv[2]).fingerprint)"
    )
    prints = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "text.txt", tmp_path / seed],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        prints.add(done.stdout)
    assert len(prints) == 1


def test_text_too_small_for_the_vocabulary(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(10))
    with pytest.raises(ConfigError, match=r"got 8000, expected at most (\d+)") as caught:
        Tokenizer.train(iter([Document("text", text)]), 8000, tmp_path)
    assert list(tmp_path.iterdir()) == []
    largest = int(str(caught.value).split("at most ")[1].split()[0])
    tokenizer = Tokenizer.train(iter([Document("text", text)]), largest, tmp_path)
    assert tokenizer.vocab_size == largest
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("vocab_size", [-1, 0, 100, 259])
def test_vocabulary_below_the_bytes(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="expected at least 260"):
        Tokenizer.train(iter([Document("text", train_text())]), vocab_size, tmp_path)


def test_the_smallest_vocabulary_and_a_large_script(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 3000))) * 2
    for vocab_size in (260, 300):
        tokenizer = Tokenizer.train(
            iter([Document("text", text)]), vocab_size, tmp_path / str(vocab_size)
        )
        assert tokenizer.vocab_size == vocab_size
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_of_special_characters_only(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text to train on"):
        Tokenizer.train(iter([Document("text", "\x00▁\x01")]), 300, tmp_path)


def test_training_leaves_a_tokenizer_alone(tokenizer_dir: Path) -> None:
    before = (tokenizer_dir / MODEL_FILE).read_bytes()
    with pytest.raises(DataError, match="holds a tokenizer"):
        Tokenizer.train(iter([Document("text", train_text())]), 300, tokenizer_dir)
    assert (tokenizer_dir / MODEL_FILE).read_bytes() == before


def test_long_lines_are_learned_from(tmp_path: Path) -> None:
    line = "abcdefghij" * 24_000  # 240 kB without a space or line end
    tokenizer = Tokenizer.train(iter([Document("text", line)]), 275, tmp_path)
    assert len(tokenizer.encode(line)) < len(line) / 3


def test_a_large_corpus_is_sampled_evenly(tmp_path: Path) -> None:
    documents = [Document(str(i), f"word{i:04d} " * 100) for i in range(400)]
    tokenizer = Tokenizer.train(iter(documents), 280, tmp_path, sample_bytes=100_000)
    facts = json.loads((tmp_path / FACTS_FILE).read_bytes())["trained_on"]
    assert 90_000 < facts["bytes"] <= 100_000
    assert facts["documents"] == facts["bytes"] // 900
    assert tokenizer.decode(tokenizer.encode(documents[7].text)) == documents[7].text


def test_a_stream_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    read = itertools.count()
    stream = (Document(str(i), f"word{i:04d} " * 100) for i in read)
    tokenizer = Tokenizer.train(stream, 280, tmp_path, sample_bytes=20_000)
    assert tokenizer.vocab_size == 280
    assert 16 * 20_000 / 900 < next(read) < 16 * 20_000 / 900 + 3


def test_the_memory_of_words_is_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gla.data.tokenizer._REMEMBERED", 50)
    text = " ".join(f"w{i}x{i * i}" for i in range(500)) + " " + "q" * 1000
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer._words) <= 50
    assert max(map(len, tokenizer._words)) <= MAX_WORD + 1


def test_sources_may_be_named_in_any_shape(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(train_text(), encoding="utf-8")
    prints = {
        Tokenizer.train(source, 400, tmp_path / str(i)).fingerprint
        for i, source in enumerate([file, str(file), [file], (str(file),), Corpus([file])])
    }
    assert len(prints) == 1
