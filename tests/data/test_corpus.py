"""Sources: what is read, under which name, and what is said of faulty ones."""

from __future__ import annotations

import codecs
import json
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gla.data.corpus import Corpus, Document
from gla.errors import ConfigError, DataError


def read(*sources: str | Path, **options: Any) -> list[Document]:
    return list(Corpus(sources, **options))


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# Files, folders, globs


def test_a_text_file_is_one_document_kept_as_it_is(tmp_path: Path) -> None:
    text = "  a\r\n\tb\n\n\x00漢 \r\n "
    assert read(write(tmp_path / "a.txt", text)) == [Document("a.txt", text)]


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.md", "c.py"):
        write(tmp_path / name, name)
    for name in (".hidden", ".git/x", "__pycache__/c.pyc", "site-packages/p.py"):
        write(tmp_path / name, b"\xff")
    write(tmp_path / "empty.txt", "")
    assert [d.name for d in read(tmp_path)] == ["a/y.md", "a/z.txt", "b.txt", "c.py"]
    assert all(name == text for name, text in read(tmp_path))


def test_names_do_not_depend_on_where_a_folder_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "one/x/a.txt", "A")
    write(tmp_path / "two/x/a.txt", "A")
    assert read(tmp_path / "one") == read(tmp_path / "two")
    assert read(f"{tmp_path}/one/**/*.txt") == read(f"{tmp_path}/two/**/*.txt")
    monkeypatch.chdir(tmp_path / "one")
    assert read("x/*.txt") == read(f"{tmp_path}/two/x/*.txt") == [Document("a.txt", "A")]


def test_globs_find_files_only(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "A")
    (tmp_path / "folder.txt").mkdir()
    assert read(f"{tmp_path}/*.txt") == [Document("a.txt", "A")]


@pytest.mark.parametrize("source", ["*.txt", "missing.txt", "no/such/**/*.py", "empty"])
def test_no_match_names_the_glob_and_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="got no file that matches") as caught:
        read(source)
    assert str(caught.value).startswith(f"{source}: ")
    assert str(tmp_path) in str(caught.value)


def test_one_source_and_many(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "A"), write(tmp_path / "b.txt", "B")
    assert [d.text for d in Corpus(a)] == [d.text for d in Corpus(str(a))] == ["A"]
    assert [d.text for d in Corpus([b, a])] == ["B", "A"]


def test_a_large_file_is_read_in_parts_that_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gla.data.corpus._BIG_FILE", 100)
    monkeypatch.setattr("gla.data.corpus._PART_BYTES", 10)
    for text in ("line 漢字\n" * 50, "漢字😀é" * 30, "\ufeff" + "word\n" * 40, "x" * 101):
        documents = read(write(tmp_path / "big.txt", text))
        assert "".join(d.text for d in documents) == text.removeprefix("\ufeff")
        assert len({d.name for d in documents}) == len(documents) > 4
        assert max(len(d.text.encode()) for d in documents) <= 24


# UTF-8


def test_a_byte_order_mark_is_stripped(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", codecs.BOM_UTF8 + b"a")) == [Document("a.txt", "a")]
    row = codecs.BOM_UTF8 + b'{"text": "a"}\n{"text": "\\ufeffb"}\n'
    assert [d.text for d in read(write(tmp_path / "a.jsonl", row))] == ["a", "\ufeffb"]


def test_bytes_that_are_not_utf8_name_file_and_offset(tmp_path: Path) -> None:
    file = write(tmp_path / "latin.txt", "größer".encode("latin1"))
    with pytest.raises(DataError, match="not UTF-8 at offset 2") as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{file}: ")
    write(tmp_path / "ok.txt", "ok")
    corpus = Corpus(tmp_path, max_bad=1)
    assert [d.text for d in corpus] == ["ok"]
    assert corpus.skipped == 1


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.txt: got No such file"):
        read(tmp_path)


# JSON lines


def test_jsonl_rows_are_documents(tmp_path: Path) -> None:
    rows = [{"text": "a\nb", "id": 1}, {"text": ""}, {"other": 2, "text": "▁"}]
    file = write(tmp_path / "r.jsonl", "\n\n".join(map(json.dumps, rows)) + "\n  \n")
    assert read(file) == [Document("r.jsonl:1", "a\nb"), Document("r.jsonl:5", "▁")]
    assert read(file.rename(tmp_path / "s.jsonl"), max_bad=9)[0].name == "s.jsonl:1"
    assert [d.text for d in read(tmp_path / "s.jsonl", text_field="other", max_bad=3)] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 'a'}", "no JSON"),
        ('{"text": "a"', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('["text"]', "got list, expected an object"),
        ('{"body": "a", "id": 1}', "got columns body, id, expected 'text'"),
        ("{}", "got columns none"),
        ('{"text": null, "id": 1}', r"got null in 'text', expected text \(columns: text, id\)"),
        ('{"text": 5}', "got int in 'text'"),
        ('{"text": ["a"]}', "got list in 'text'"),
        ('{"text": "ab\\ud800"}', "lone surrogate at character 2"),
        (b'{"text": "\xff"}', "not UTF-8 at offset 10"),
    ],
)
def test_a_bad_line_is_named_and_counted(tmp_path: Path, line: str | bytes, message: str) -> None:
    line = line if isinstance(line, bytes) else line.encode()
    good = b'{"text": "good"}\n'
    file = write(tmp_path / "r.jsonl", good + line + b"\n" + good + line + b"\n" + good)
    with pytest.raises(DataError, match=message) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}:2: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="2 faulty records, max_bad 1") as caught:
        read(file, max_bad=1)
    assert str(caught.value).startswith(f"{file}:4: ")
    corpus = Corpus(file, max_bad=2)
    for _ in range(2):  # the count starts afresh
        assert [d.text for d in corpus] == ["good"] * 3
        assert corpus.skipped == 2


def test_max_bad_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="max_bad"):
        Corpus("stdlib", max_bad=-1)


# Parquet


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "r.parquet"
    texts = [f"text {i} 漢" for i in range(3000)]
    parquet.write_table(pa.table({"id": range(3000), "text": texts}), file)
    assert read(file) == [Document(f"r.parquet:{i}", text) for i, text in enumerate(texts)]
    with pytest.raises(DataError, match="got columns id, text, expected 'body'") as caught:
        read(file, text_field="body")
    assert str(file) in str(caught.value)

    parquet.write_table(pa.table({"id": [1, 2, 3], "text": ["a", None, "b"]}), file)
    with pytest.raises(DataError, match=r"row 1: got null in 'text'.*columns: id, text"):
        read(file)
    assert [d.text for d in read(file, max_bad=1)] == ["a", "b"]

    parquet.write_table(pa.table({"text": [1, 2]}), file)
    with pytest.raises(DataError, match="row 0: got int in 'text'"):
        read(file)


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, cut: int) -> None:
    pa = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "r.parquet"
    parquet.write_table(pa.table({"text": ["a", "b"]}), file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match="no parquet") as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: ")


# The Hub, with a stand-in for the package (tests have no network)


class FakeHub(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def load_dataset(self, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        self.asked.append((path, options))
        if path == "org/missing":
            raise FileNotFoundError("Dataset 'org/missing' doesn't exist")
        return iter([{"text": "one", "body": "eins"}, {"text": None}, {"text": "three"}])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def test_hub_rows_are_streamed(hub: FakeHub) -> None:
    stream = iter(Corpus("hub:org/set?name=small&split=validation"))
    assert next(stream) == Document("hub:org/set?name=small&split=validation:0", "one")
    assert hub.asked == [
        ("org/set", {"streaming": True, "name": "small", "split": "validation"}),
    ]
    with pytest.raises(DataError, match=r"hub:org/set.* row 1: got null in 'text'"):
        next(stream)
    assert [d.text for d in read("hub:org/set", max_bad=1)] == ["one", "three"]
    assert hub.asked[-1][1]["split"] == "train"
    assert read("hub:org/set", text_field="body", max_bad=2)[0].text == "eins"


def test_hub_faults(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"hub:org/missing: .*doesn't exist"):
        read("hub:org/missing")
    with pytest.raises(ConfigError, match="got splt, expected hub:ORG/NAME"):
        read("hub:org/set?splt=train")
    with pytest.raises(ConfigError, match="got no name"):
        read("hub:")
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes its import fail
    with pytest.raises(DataError, match=r"needs the package datasets; .*gla\[hub\]"):
        read("hub:org/set")


def test_the_real_package_reads_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` takes a folder ORG/NAME of the working folder for a data set of that name."""
    pytest.importorskip("datasets", reason="needs the package datasets (extra hub)")
    write(tmp_path / "org/set/train.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    assert read("hub:org/set") == [
        Document("hub:org/set:0", "one"),
        Document("hub:org/set:1", "two"),
    ]
    with pytest.raises(DataError, match=r"row 0: got columns text, expected 'body'"):
        read("hub:org/set", text_field="body")
    with pytest.raises(
        DataError, match=r"hub:org/set\?split=test: got no rows from the Hub"
    ) as caught:
        read("hub:org/set?split=test")
    assert "\n" not in str(caught.value)


# The standard library


def test_stdlib_is_this_pythons_own_sources() -> None:
    corpus = Corpus("stdlib")
    documents = list(corpus)
    names = [d.name for d in documents]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert "stdlib/json/decoder.py" in names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    file = Path(sysconfig.get_path("stdlib")) / "json/decoder.py"
    text = documents[names.index("stdlib/json/decoder.py")].text
    assert text == file.read_text(encoding="utf-8")
    assert sum(len(d.text) for d in documents) > 8_000_000
    assert corpus.skipped < 20
