"""Every command on a small corpus: tokenizer, data, train, resume, eval, generate, demo, doctor."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gla.cli import recipes
from gla.cli.demo import next_run
from gla.cli.main import main
from gla.models.language_model import LanguageModel

RECIPE = """
[model]
d_model = 32
layers = ["gated", "local"]
[model.mixers.gated]
kind = "linear_attention"
[model.mixers.local]
kind = "softmax_attention"
window = 16
[data]
path = "DATA"
sources = ["TEXT"]
vocab_size = 300
val_fraction = 0.2
[train]
steps = 4
seq_len = 32
global_batch_size = 2
[schedule]
warmup_steps = 1
[checkpoint]
interval = 2
[eval]
interval = 4
"""
WORDS = "the state forgets slowly while each key writes its value into memory".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text/ (20 documents), data/ (prepared), tiny.toml, and runs/tiny (trained)."""
    place = tmp_path_factory.mktemp("commands")
    (place / "text").mkdir()
    rng = random.Random(0)
    for i in range(20):
        text = f"document {i}\n" + " ".join(rng.choices(WORDS, k=80))
        (place / "text" / f"{i}.txt").write_text(text)
    text, tokenizer, data = (str(place / name) for name in ("text", "tokenizer", "data"))
    assert main(["tokenizer", "train", text, "--vocab-size", "300", "--out", tokenizer]) == 0
    prepare = ["data", "prepare", text, "--tokenizer", tokenizer, "--out", data]
    assert main([*prepare, "--val-fraction", "0.2"]) == 0
    recipe = RECIPE.replace("DATA", data).replace("TEXT", text)
    (place / "tiny.toml").write_text(recipe)
    assert main(["train", str(place / "tiny.toml"), "--run", str(place / "runs" / "tiny")]) == 0
    return place


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    return str(place / "runs" / "tiny")


def output_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(argv) == code
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


def figures_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    return json.loads(output_of(capsys, *argv, "--json"))


def test_train_writes_a_run(run: str) -> None:
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4 and any("val_bpb" in line for line in lines)
    samples = list((Path(run) / "samples").iterdir())
    assert len(samples) == 1


@pytest.mark.parametrize(
    "line",
    [
        "report RUN --out FILE",
        "inspect RUN --out FILE",
        "bench cost --out FILE",
        "bench article --out FILE",
        "compare recall --out FILE",
        "train tiny.toml --run FILE",
        "tokenizer train text --out FILE",
    ],
)
def test_a_file_where_a_folder_is_to_be_is_told_first(
    line: str, place: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "tiny.toml"
    parts = {"RUN": run, "FILE": str(file), "tiny.toml": str(file), "text": str(place / "text")}
    error = output_of(capsys, *(parts.get(part, part) for part in line.split()), code=2)
    assert error.startswith(f"gla: {file}: got a file, expected a folder; fix with another --")
    assert error.count("\n") == 1


def test_train_refuses_a_folder_that_holds_a_run(
    place: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in Path(run).rglob("*")}
    error = output_of(capsys, "train", str(place / "tiny.toml"), "--run", run, code=2)
    assert f"gla resume {run}" in error and error.count("\n") == 1
    assert {p: p.stat().st_mtime_ns for p in Path(run).rglob("*")} == before


def test_overrides_change_the_recipe_and_the_last_one_wins(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    overrides = ["--train.steps=9", "--train.seed", "5", "--train.steps", "2"]
    shown = output_of(capsys, "train", str(place / "tiny.toml"), "--run", run, *overrides)
    assert "trained to step 2" in shown
    config = (tmp_path / "run" / "config.toml").read_text()
    assert "steps = 2\n" in config and "seed = 5\n" in config


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--train.stepz", "5"], "steps"),
        (["--steps", "5"], "train.steps"),
        (["--train.steps", "many"], "train.steps: got 'many'"),
        (["--device", "cuda:99"], "--device cpu"),
        (["extra"], "extra argument 'extra'"),
    ],
)
def test_wrong_arguments_of_train(
    place: Path,
    tmp_path: Path,
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    argv = ["train", str(place / "tiny.toml"), "--run", str(run), *arguments]
    assert expected in output_of(capsys, *argv, code=2)
    assert not run.exists()


@pytest.mark.parametrize("name", ["demo", "stdlib", "tinystories-15m", "fineweb-60m"])
def test_the_dry_run_of_each_recipe(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    figures = figures_of(capsys, "train", name, "--dry-run", "--device", "cpu")
    assert figures["parameters"] > 1e6 and figures["tokens_per_step"] > 0
    assert figures["data"]["sources"]
    text = output_of(capsys, "train", name, "--dry-run", "--device", "cpu")
    assert f"{figures['parameters']:,}" in text and figures["data"]["sources"][0] in text
    assert list(tmp_path.iterdir()) == []


def test_eval_prints_the_same_figures_in_both_ways(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = figures_of(capsys, "eval", run)
    assert {"loss", "ppl", "bpb", "tokens", "bytes"} <= set(figures)
    assert figures["ppl"] == pytest.approx(torch.tensor(figures["loss"]).exp().item(), rel=1e-4)
    text = output_of(capsys, "eval", run)
    assert f"{figures['loss']:.4f}" in text and f"{figures['bytes']:,}" in text
    other = figures_of(capsys, "eval", run, "--impl", "recurrent")
    assert other["loss"] == pytest.approx(figures["loss"], rel=1e-3)
    assert "expected one of auto, recurrent" in output_of(
        capsys, "eval", run, "--impl", "x", code=2
    )


def test_eval_says_why_it_has_not_read_the_whole_split(
    place: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads((place / "data" / "val" / "index.json").read_text())["num_tokens"]
    assert "in the split" not in output_of(capsys, "eval", run)
    text = output_of(capsys, "eval", run, "--batches", "1")
    assert text.endswith(f"of {whole:,} in the split: --batches 1\n")


def test_eval_prints_references_if_asked(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "references" not in figures_of(capsys, "eval", run)
    rows = figures_of(capsys, "eval", run, "--references")["references"]
    assert list(rows) == ["unigram", "bigram", "xz -9e", "xz -9e after train"]
    assert rows["xz -9e after train"]["bpb"] < rows["xz -9e"]["bpb"]
    text = output_of(capsys, "eval", run, "--references")
    for name, row in rows.items():
        assert f"{name:<19} {row['bpb']:.4f} bits/byte" in text


def test_eval_refuses_tokens_of_another_tokenizer(
    place: Path, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, tokenizer, data = str(place / "text"), str(tmp_path / "tok"), str(tmp_path / "data")
    output_of(capsys, "tokenizer", "train", text, "--vocab-size", "290", "--out", tokenizer)
    output_of(capsys, "data", "prepare", text, "--tokenizer", tokenizer, "--out", data)
    error = output_of(capsys, "eval", run, "--data", data, code=3)
    assert "expected those of" in error and error.count("\n") == 1


def test_resume_goes_on_and_keeps_an_override(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shown = output_of(capsys, "resume", str(copy), "--train.steps", "6")
    assert "trained to step 6" in shown
    assert "steps = 6\n" in (copy / "config.toml").read_text()


@pytest.mark.parametrize("command", ["resume", "eval", "generate", "report", "inspect", "serve"])
def test_a_folder_without_a_run_is_told_alike_everywhere(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "none"
    error = output_of(capsys, command, str(folder), code=2)
    wanted = f"gla: {folder}: got no config.toml there, expected the folder of a run; fix the path"
    assert error.startswith(wanted) and error.count("\n") == 1


def test_generate_repeats_with_a_seed_and_begins_with_the_prompt(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "20", "--seed", "3", "--device", "cpu"]
    first = output_of(capsys, "generate", run, "--prompt", "the state", *options)
    assert first.startswith("the state") and len(first) > len("the state\n")
    assert first == output_of(capsys, "generate", run, "--prompt", "the state", *options)
    (tmp_path / "prompt.txt").write_text("the state")
    from_file = output_of(
        capsys, "generate", run, "--prompt-file", str(tmp_path / "prompt.txt"), *options
    )
    assert "the state" + from_file == first


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--top-k", "999"], "top_k"),
        (["--max-new-tokens", "-1"], "max_new_tokens"),
    ],
)
def test_generate_refuses_values_out_of_range(
    run: str, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in output_of(capsys, "generate", run, *options, code=2)


def test_generate_refuses_a_prompt_file_that_is_no_text(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(b"ab\xff")
    assert "offset 2" in output_of(
        capsys, "generate", run, "--prompt-file", str(tmp_path / "x"), code=3
    )


def test_generate_goes_on_from_a_saved_state(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-new-tokens", "9", "--temperature", "0", "--device", "cpu"]
    whole = output_of(capsys, "generate", run, "--prompt", "the state forgets", *options)
    state = str(tmp_path / "book.state")
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfthe state")
    reading = ["generate", run, "--prompt-file", str(tmp_path / "book.txt"), "--state-out", state]
    assert main([*reading, "--max-new-tokens", "0"]) == 0
    assert re.search(r"^read .*book.txt: \d+ tokens, [\d,]+/s$", capsys.readouterr().err, re.M)
    going_on = ["generate", run, "--state-in", state]
    assert "the state" + output_of(capsys, *going_on, "--prompt", " forgets", *options) == whole
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" forgets")))
    assert "the state forgets" + output_of(capsys, *going_on, "--stdin", *options) == whole
    assert "weights" in output_of(capsys, *going_on, "--weights", "bf16", code=4)
    assert "weights" in output_of(capsys, "generate", run, "--weights", "fp8", code=2)


def test_generate_stops_before_a_stop_string(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "the", "--temperature", "0", "--max-new-tokens", "30"]
    whole = output_of(capsys, "generate", run, *options)
    stop = whole[20:23]
    cut = output_of(capsys, "generate", run, *options, "--stop", "never there", stop)
    assert cut == whole[: whole.index(stop, 3)] + "\n"


def test_a_conversation_forks_saves_and_rewinds(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"""the state
/fork other
while each
/rewind
/rewind 7
while each
/save {tmp_path / "talk.state"}
/save {tmp_path}
/fork main
while each
/what
"""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    options = ["--temperature", "0", "--max-new-tokens", "5"]
    assert main(["generate", run, "--interactive", *options]) == 0
    shown = capsys.readouterr()
    notes = shown.err.splitlines()
    assert notes[0].startswith("made branch other, at token ")
    assert notes[1].startswith("rewound 1 turn, ") and "got 7, expected 1 to 1 turns" in notes[2]
    assert "talk.state" in notes[3] and f"/save: got {tmp_path}, a folder, expected" in notes[4]
    assert notes[5].startswith("in branch main")
    assert notes[6].startswith("/what: got an unknown command")
    text = shown.out
    first = output_of(capsys, "generate", run, "--prompt", "the state\n", *options)
    assert text.startswith(first.removeprefix("the state\n"))
    turn = text.removeprefix(first.removeprefix("the state\n"))
    assert turn == turn[: len(turn) // 3] * 3  # three times from the same place
    assert (tmp_path / "talk.state").exists()


def test_ctrl_c_keeps_what_was_written(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = output_of(capsys, "generate", run, "--prompt", "the", "--temperature", "0")
    step, steps = LanguageModel.decode_step, []

    def interrupt(self: LanguageModel, *given: Any) -> Any:
        steps.append(given)
        if len(steps) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *given)

    monkeypatch.setattr(LanguageModel, "decode_step", interrupt)
    state = str(tmp_path / "state")
    options = ["--prompt", "the", "--temperature", "0", "--state-out", state]
    capsys.readouterr()
    assert main(["generate", run, *options]) == 130
    partial = capsys.readouterr().out.rstrip("\n")
    assert len(steps) == 7 and "the" < partial < whole and whole.startswith(partial)
    rest = ["--temperature", "0", "--max-new-tokens", "193"]
    assert partial + output_of(capsys, "generate", run, "--state-in", state, *rest) == whole


def test_demo_from_text_to_table(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipes, "find", lambda name: place / "tiny.toml")
    monkeypatch.chdir(tmp_path)
    figures = figures_of(capsys, "demo", "--steps", "2")
    assert list(figures["rows"]) == ["gated model", "unigram", "bigram", "xz -9e"]
    assert len({row["bytes"] for row in figures["rows"].values()}) == 1
    assert len({row["tokens"] for row in figures["rows"].values() if "tokens" in row}) == 1
    assert figures["decode_state_bytes"] > 0
    assert Path(figures["run"]) == Path("runs/demo") and Path(figures["tensorboard"]).is_dir()
    assert Path(figures["sample"]).read_text().startswith("def ")

    text = output_of(capsys, "demo", "--steps", "2")  # a second one takes the next name
    assert f"{figures['rows']['xz -9e']['bpb']:.3f}" in text
    assert f"{figures['rows']['bigram']['loss']:.3f}" in text
    assert "gla generate runs/demo-2" in text
    assert "holds a run" in output_of(capsys, "demo", "--run", "runs/demo", code=2)


def test_next_run_passes_over_runs_only(tmp_path: Path) -> None:
    (tmp_path / "demo" / "checkpoints").mkdir(parents=True)
    assert next_run(tmp_path) == tmp_path / "demo"
    for name in ("demo", "demo-2"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.toml").touch()
    assert next_run(tmp_path) == tmp_path / "demo-3"


def test_doctor_names_a_form_for_each_dtype_and_checks_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = figures_of(capsys, "doctor")
    assert facts["versions"]["torch"] == torch.__version__ and "cpu" in facts["devices"]
    on_cpu = {(r["dtype"], r["tokens"]): r for r in facts["forms"] if r["device"] == "cpu"}
    assert on_cpu["float32", "one token"]["form"] == "recurrent"
    assert on_cpu["float32", "more tokens"]["form"] == "torch"
    assert on_cpu["float32", "more tokens"]["error"] < 5e-6
    assert on_cpu["bfloat16", "more tokens"]["error"] < 5e-3
    text = output_of(capsys, "doctor")
    assert 'what impl="auto" picks' in text and facts["versions"]["torch"] in text


def test_rows_under_another_name_and_sources_by_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(1)
    for name in ("a", "b"):
        rows = [{"body": f"{name} {i} " + " ".join(rng.choices(WORDS, k=20))} for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    field = ["--text-field", "body"]
    tok, data = str(tmp_path / "tok"), str(tmp_path / "data")
    output_of(capsys, "tokenizer", "train", *sources, "--vocab-size", "300", "--out", tok, *field)
    weighted = ["--weights", "1", "0.25", *field]
    shown = output_of(
        capsys, "data", "prepare", *sources, "--tokenizer", tok, "--out", data, *weighted
    )
    assert "MB of text a second" in shown
    documents = sum(
        json.loads((tmp_path / "data" / split / "index.json").read_text())["num_documents"]
        for split in ("train", "val")
    )
    assert documents in (50, 51)
    assert f"mixture: ended where {sources[0]} ran out, with all of its 40 documents used" in shown
    assert f"{sources[1]}: {documents - 40} documents used, the rest left out" in shown
    made = json.loads((tmp_path / "data/made_from.json").read_text())
    assert made["weights"] == [1, 0.25] and made["text_field"] == "body"


def test_report_writes_a_page(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shown = output_of(capsys, "report", run, "--out", str(tmp_path))
    assert shown.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_eval_refuses_a_tokenizer_that_is_not_the_checkpoints(
    place: Path, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "tokenizer")
    text, data = str(place / "text" / "1*.txt"), str(tmp_path / "data")
    tokenizer = str(copy / "tokenizer")
    output_of(capsys, "tokenizer", "train", text, "--vocab-size", "300", "--out", tokenizer)
    output_of(capsys, "data", "prepare", text, "--tokenizer", tokenizer, "--out", data)
    error = output_of(capsys, "eval", str(copy), "--data", data, code=4)
    assert "--allow-tokenizer-change" in error and error.count("\n") == 1
    output_of(capsys, "eval", str(copy), "--data", data, "--allow-tokenizer-change")


def test_eval_of_the_best_needs_one(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = output_of(capsys, "eval", run, "--best", code=4)
    assert "checkpoints/best" in error and "checkpoint.keep_best" in error
