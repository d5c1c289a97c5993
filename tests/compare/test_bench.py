"""``gla bench``: crossovers by hand, memory of a known size, both commands at small sizes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from gla.cli.bench import article, article_tables, crossover_lines
from gla.cli.main import main
from gla.compare import articles
from gla.compare.articles import (
    PRINTED,
    PRINTED_MEMORY,
    StandardAttention,
    first_article,
    scores_bytes,
    second_article,
)
from gla.compare.cost import causal_presets, crossover, crossovers
from gla.compare.measure import available_memory, best_time, peak_memory_of

CPU = torch.device("cpu")


def test_the_memory_of_a_call() -> None:
    size = 64 << 20

    def run() -> None:
        first = torch.ones(size // 8)  # half of it
        second = first + 1
        del first, second

    found = [peak_memory_of(run, CPU) for _ in range(3)]
    assert all(f is not None and 0.95 * size < f < 1.2 * size for f in found), found


def test_the_time_of_a_call() -> None:
    calls = []
    assert best_time(lambda: calls.append(1), CPU, 0.01) < 0.01
    assert len(calls) > 2
    calls.clear()
    torch_work = best_time(lambda: calls.append(sum(range(300_000))), CPU, 1e-6)
    assert len(calls) == 1 and torch_work > 1e-4
    free = available_memory(CPU)
    assert free is None or free > 1 << 20


def test_crossovers_by_hand() -> None:
    lengths = [1024, 4096, 16384]
    # Ours grows with T, theirs with T²: equal at 2048, where both lines meet.
    ours = [2.0 * n for n in lengths]
    theirs = [n**2 / 1024 for n in lengths]
    assert crossover(lengths, ours, theirs) == pytest.approx(2048)
    assert crossover(lengths, theirs, ours) is None
    assert crossover(lengths, [1.0] * 3, [2.0] * 3) == 1024
    assert crossover(lengths, [1.0, 3.0, 1.0], [2.0] * 3) == pytest.approx(
        4096 * 4 ** (math.log(1.5) / math.log(3))
    )
    assert crossover(lengths, ours, [theirs[0], theirs[1], None]) == pytest.approx(2048)
    assert crossover(lengths, [None] * 3, theirs) is None


def test_crossovers_of_rows_and_their_words() -> None:
    rows = [
        {"variant": v, "kind": "decode", "length": n, "seconds": s, "bytes": 8}
        for v, times in (("softmax", (1.0, 4.0)), ("gla", (2.0, 2.0)))
        for n, s in zip((16, 64), times, strict=True)
    ]
    found = {(r["kind"], r["figure"]): r["length"] for r in crossovers(rows, "softmax")}
    assert found["decode", "seconds"] == pytest.approx(32)
    assert found["decode", "bytes"] is None and found["training", "seconds"] is None
    lines = crossover_lines(crossovers(rows, "softmax"))
    assert "gla, decode: faster than softmax from 32 on" in lines
    assert "gla, decode: as large in memory as softmax at every length" in lines


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([1.0, 1.0, 1.0], "faster than softmax at every measured length"),
        ([1.0, 8.0, 8.0], "faster than softmax up to 16"),
        ([1.0, 2.0, 8.0], "faster than softmax up to 16"),
        ([4.0, 1.0, 1.0], "faster than softmax from 32 on"),
        ([2.0, 1.0, 1.0], "faster than softmax beyond 16"),
        ([4.0, 1.0, 4.0], "faster than softmax at 64"),
        ([1.0, 4.0, 1.0], "faster than softmax at 16 and from 128 on"),
        ([1.0, 4.0, None], "faster than softmax up to 16"),
        ([4.0, 2.0, 4.0], "faster than softmax at no measured length"),
        ([2.0, 2.0, 2.0], "as fast as softmax at every length"),
        ([None, None, None], "not known to be faster than softmax"),
    ],
)
def test_the_words_of_every_crossover(ours: list[float | None], said: str) -> None:
    rows = [
        {"variant": v, "kind": "prefill", "length": n, "seconds": s, "bytes": None}
        for v, times in (("softmax", [2.0] * 3), ("gla", ours))
        for n, s in zip((16, 64, 256), times, strict=True)
    ]
    lines = crossover_lines(crossovers(rows, "softmax"))
    assert f"gla, prefill: {said}" in lines
    assert "gla, prefill: not known to be smaller in memory than softmax" in lines


def test_cost_prints_all_it_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = "--lengths 64 256 --d-model 64 --layers 1 --seconds 0.02 --device cpu --json"
    argv = ["bench", "cost", "--variants", "gla", "--out", str(tmp_path), *options.split()]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = {(r["variant"], r["kind"], r["length"]): r for r in printed["rows"]}
    assert len(rows) == 2 * 3 * 2 and all(row["seconds"] > 0 for row in rows.values())
    # Keys and values of 64 channels in fp32 grow with the text; the gated state does not.
    state = {n: rows["softmax", "decode", n]["bytes"] for n in (64, 256)}
    assert state[256] - state[64] == 192 * 2 * 64 * 4
    assert rows["gla", "decode", 64]["bytes"] == rows["gla", "decode", 256]["bytes"]
    assert len(printed["crossovers"]) == 6
    assert json.loads((tmp_path / "cost.json").read_text())["rows"] == printed["rows"]
    assert (tmp_path / "cost.png").read_bytes()[1:4] == b"PNG"


def test_lengths_beyond_the_limit_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--lengths 32 1024 --d-model 32 --layers 1 --seconds 0.01 --device cpu --json"
    argv = ["bench", "cost", "--variants", "softmax", "--limit", "1e-6", *options.split()]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["seconds"] is None for row in rows] == [False, True] * 3
    assert main(["bench", "cost", "--variants", "glaa"]) == 2
    assert "--variants: got 'glaa', expected one of linear" in capsys.readouterr().err
    assert "gla" in causal_presets(64) and "linformer" not in causal_presets(64)


def test_standard_attention_is_softmax_attention() -> None:
    torch.manual_seed(0)
    layer, x = StandardAttention(causal=True).double(), torch.randn(2, 9, 512).double()
    q, k, v = layer.qkv_proj(x).view(2, 9, 3, 8, 64).permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = layer.out_proj(expected.transpose(1, 2).reshape(2, 9, 512))
    assert (layer(x)[0] - expected).abs().max() < 1e-12


def test_printed_figures() -> None:
    assert PRINTED["standard"]["ms"] == (3.2, 41.0, 158.0, None, None)
    assert PRINTED["linear"]["ms"] == (4.1, 8.6, 14.3, 26.8, 98.6)
    assert PRINTED["linear"]["gb"] == (0.3, 0.4, 0.5, 0.7, 2.1)
    # The second article's are exact: fp32 scores of 8 sequences and 8 heads.
    for name, printed in PRINTED_MEMORY.items():
        keys = 2048 if name == "standard" else int(name.split()[1])
        assert scores_bytes(8, 2048, keys) == printed << 20


def test_the_articles_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(articles, "MEMORY_LENGTH", 256)
    monkeypatch.setattr(articles, "SLOTS", (128,))
    assert article(lengths=(128, 1024), seconds=0.01, device="cpu", out=tmp_path) == 0
    figures = json.loads((tmp_path / "article.json").read_text())
    rows = {(row["layer"], row["length"]): row for row in figures["first"]}
    assert set(rows) == {(n, t) for n in ("standard", "sdpa", "linear") for t in (128, 1024)}
    assert all(row["ms"] > 0 for row in rows.values())
    assert rows["standard", 1024]["printed_ms"] == 3.2
    assert rows["standard", 128]["printed_ms"] is None
    assert not rows["standard", 128]["printed_oom"]
    second = {row["layer"]: row for row in figures["second"]}
    assert list(second) == ["standard", "linformer 128", "sdpa", "linear"]
    assert second["standard"]["scores_mb"] == 16 and second["linformer 128"]["scores_mb"] == 8
    text = (tmp_path / "article.md").read_text()
    assert text == article_tables(figures) + "\n"
    assert "| standard | 1,024 |" in text and "| linformer 128 | 8 | 64 | " in text


def test_without_the_second_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert article(lengths=(128,), seconds=0.01, device="cpu", no_memory=True, json=True) == 0
    assert json.loads(capsys.readouterr().out)["second"] == []
    with pytest.raises(SystemExit):
        main(["bench", "article", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--no-memory\W+Leave out the second table", shown)


def test_what_does_not_fit_into_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(articles, "available_memory", lambda _: 1 << 20)
    rows = first_article(CPU, 0.001, (1024,), lambda _: None)
    missing = {row["layer"]: row["ms"] is None for row in rows}
    assert missing == {"standard": True, "sdpa": False, "linear": False}
    text = article_tables({"first": rows, "second": []})
    assert articles._printed("standard", 16384)["printed_oom"]
    assert "not run: needs 0 GB" in text


def test_scores_that_do_not_fit_into_memory_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(articles, "MEMORY_LENGTH", 256)
    monkeypatch.setattr(articles, "SLOTS", (128,))
    needs = 5 * scores_bytes(8, 256, 128)  # Linformer's; those of softmax written out are twice it
    monkeypatch.setattr(articles, "available_memory", lambda _: int(needs * 1.3))
    rows = second_article(CPU, lambda _: None)
    run = {"standard": False, "linformer 128": True, "sdpa": True, "linear": True}
    assert {row["layer"]: row["run"] for row in rows} == run
    assert {row["layer"]: row["peak_mb"] is not None for row in rows} == run
    table = article_tables({"first": [], "second": rows}).splitlines()
    (standard,) = (line for line in table if line.startswith("| standard"))
    assert standard.endswith("| not run: needs 0 GB |")


def test_memory_that_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    assert peak_memory_of(lambda: None, CPU) is None


@pytest.mark.parametrize("command", ["cost", "article"])
def test_lengths_are_checked(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", command, "--lengths", "64", "0"]) == 2
    assert "lengths: got (64, 0), expected numbers of tokens" in capsys.readouterr().err
