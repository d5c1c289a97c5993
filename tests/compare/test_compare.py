"""``gla compare`` as users run it: to the end, again, killed in the middle, wrong."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from gla.cli.main import main
from gla.compare.cell import run_cell, write_spec
from gla.compare.plan import known_cells, plan
from gla.compare.progress import Progress
from gla.compare.suite import load_suite
from gla.compare.workers import Workers

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gla", "compare", *map(str, arguments)]


def gla(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """The suite, run to its end by the command: (suite, folder, what it printed)."""
    from tests.compare.conftest import SUITE

    root = tmp_path_factory.mktemp("finished")
    (root / "tiny.toml").write_text(SUITE)
    done = gla(root / "tiny.toml", "--out", root / "out", "--jobs", 1, "--json")
    (root / "stderr.txt").write_text(done.stderr)
    return root / "tiny.toml", root / "out", json.loads(done.stdout)


def test_what_is_reported(finished: tuple[Path, Path, dict]) -> None:
    _, out, printed = finished
    assert printed == json.loads((out / "report.json").read_text())
    assert printed["complete"] and len(printed["cells"]) == 5  # 2 + 2 rates + 1 more seed
    task = printed["tasks"]["recall"]
    assert (task["measure"], task["better"], task["chance"]) == ("accuracy", "higher", 1 / 16)
    softmax, gated = task["variants"]["softmax"], task["variants"]["gla"]
    assert abs(gated["parameters"] / softmax["parameters"] - 1) <= 0.02
    for row in (softmax, gated):
        assert row["n"] == 2 and sorted(row["values"]) == ["0", "1"]
        assert row["mean"] == pytest.approx(sum(row["values"].values()) / 2)
        assert row["half_width"] == pytest.approx(
            12.7062 * abs(row["values"]["0"] - row["values"]["1"]) / 2, rel=1e-4
        )
        assert [c["axes"] for c in row["cases"]] == [
            {"length": 32, "pairs": 4},
            {"length": 64, "pairs": 8},
        ]
        assert row["curve"][-1] == [6, pytest.approx(row["mean"])]
    assert gated["lr"] in (1e-3, 1e-2) and list(gated["sweep"]) == ["0.001", "0.01"]
    best = max(gated["sweep"].values())
    assert gated["sweep"][f"{gated['lr']:g}"] == best == gated["values"]["0"]
    # Seed 0 picked among two rates for one of them only.
    assert gated["difference"]["mean"] == gated["values"]["1"] - softmax["values"]["1"]
    assert gated["verdict"] == "one seed: no interval"
    assert gated["state_bytes"] != softmax["state_bytes"] > 0


def test_every_cell_says_what_made_it(finished: tuple[Path, Path, dict]) -> None:
    _, out, printed = finished
    for folder, cell in printed["cells"].items():
        assert cell["versions"]["torch"] and len(cell["code"]) == 64
        assert cell["config"]["train"]["seed"] == cell["seed"]
        assert cell["config"]["optim"]["lr"] == cell["lr"]
        assert json.loads((out / folder / "cell.json").read_text())["digest"] == cell["digest"]
        assert (out / folder / "config.toml").exists() and (out / folder / "metrics.jsonl").exists()
        assert not (out / folder / "checkpoints").exists()


def test_what_is_said_of_training_and_tests(finished: tuple[Path, Path, dict]) -> None:
    suite, out, printed = finished
    lines = (suite.parent / "stderr.txt").read_text().splitlines()
    for folder, cell in printed["cells"].items():
        name = f"recall {cell['variant']} lr-{cell['lr']:g}-seed-{cell['seed']}: "
        begun, done = (line.removeprefix(name) for line in lines if line.startswith(name))
        assert begun == "trained, the tests have begun"
        times = f"trained {cell['train_seconds']:.0f} s, tested {cell['test_seconds']:.0f} s"
        assert re.fullmatch(rf"accuracy 0\.\d+, {times} \(\d new\)", done)
        assert cell["test_seconds"] > 0
        log = (out / folder / "log.txt").read_text().splitlines()
        assert log[-1].endswith(f"trained {cell['train_seconds']:.0f} s; the tests begin")


def test_the_live_table_says_which_cells_are_in_their_tests(
    suite_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(load_suite(suite_file))
    first, second = (cell.folder for cell in known_cells(made, {})[:2])
    progress = Progress(made, tmp_path)
    progress.testing(first)
    console = Console(width=100)
    console.print(progress._table({}, [first, second]))
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    cells = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert (cells["softmax"], cells["gla"]) == ("– · tests", "– · 0%")


def test_the_files_of_the_report(finished: tuple[Path, Path, dict]) -> None:
    _, out, printed = finished
    with open(out / "report.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    final = [r for r in rows if r["metric"] == "accuracy" and not r["axes"]]
    assert len(final) == 5
    by_name = {(r["variant"], r["seed"], float(r["lr"])): float(r["value"]) for r in final}
    value = printed["tasks"]["recall"]["variants"]["softmax"]["values"]["1"]
    assert by_name["softmax", "1", 3e-3] == value
    assert any(row["axes"] == "length=64 pairs=8" for row in rows)
    page = (out / "report.html").read_text()
    assert "Student" in page and "data:image/png" in page and "http" not in page
    assert (out / "report-recall-overview.png").read_bytes()[1:4] == b"PNG"
    assert len(list((out / "tb").rglob("events.*"))) == 5


def test_nothing_finished_is_computed_again(
    finished: tuple[Path, Path, dict], capsys: pytest.CaptureFixture[str]
) -> None:
    suite, out, printed = finished
    before = {p: p.stat().st_mtime_ns for p in (out / "cells").rglob("*") if p.is_file()}
    for more in ((), ("--report",)):
        capsys.readouterr()
        assert main(["compare", str(suite), "--out", str(out), "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out) == printed
    assert before == {p: p.stat().st_mtime_ns for p in (out / "cells").rglob("*") if p.is_file()}


def wait_for(what: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_kill_loses_nothing(suite_file: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a cell; the end is bit for bit that of a run without one."""
    out = tmp_path / "out"
    overrides = [("seeds", "1"), ("train.steps", "30"), ("variants.gla.lr", "[1e-3]")]
    changes = [word for key, value in overrides for word in (f"--{key}", value)]
    options = ("--size", "long", "--jobs", 1, "--out", out, *changes)
    made = plan(load_suite(suite_file, "long", overrides))
    first = known_cells(made, {})[0]
    process = subprocess.Popen(command(suite_file, *options), env=ENVIRONMENT)
    try:
        wait_for(lambda: list((out / first.folder / "checkpoints").glob("step-*/manifest.json")))
    finally:
        process.kill()
        process.wait()
    cut = out / first.folder
    wait_for(lambda: not _is_held(cut / ".lock"))
    assert not (cut / "result.json").exists()
    summary = json.loads(gla(suite_file, *options, "--json").stdout)
    assert summary["complete"]
    assert "resumed from" in (cut / "log.txt").read_text()
    whole = tmp_path / "whole"
    write_spec(whole, first.facts())
    expected = run_cell(whole, "cpu")
    found = json.loads((cut / "result.json").read_text())
    assert found["metrics"] == expected["metrics"] and found["cases"] == expected["cases"]
    steps = [json.loads(line)["step"] for line in (cut / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(range(1, 31)) <= set(steps)


def _is_held(lock: Path) -> bool:
    """Whether the process that a lock names still lives."""
    try:
        os.kill(int(lock.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with Workers(tmp_path, ["cpu"], 1) as pool:
        for idle in (True, False):  # killed before it is given a cell, and before it reads its name
            if not idle:
                pool.give("cells/a")
            process = pool._pool[0][0]
            process.kill()
            process.join()
            if idle:
                pool.give("cells/a")
            (outcome,) = pool.poll(10)
            assert outcome.folder == "cells/a" and outcome.result is None and not outcome.by_user
            assert outcome.error == "its process ended with exit code -9"
            assert pool.idle == 1 and pool._pool[0][0].is_alive()


def test_a_worker_does_not_hear_ctrl_c_and_says_what_failed(tmp_path: Path) -> None:
    (tmp_path / "cells" / "a").mkdir(parents=True)
    with Workers(tmp_path, ["cpu"], 1) as pool:
        process = pool._pool[0][0]
        os.kill(process.pid, signal.SIGINT)  # while it still imports modules
        pool.give("cells/a")
        (outcome,) = pool.poll(60)
        assert outcome.error.startswith("FileNotFoundError: ") and "error.txt" in outcome.error
        assert "cell.json" in (tmp_path / "cells" / "a" / "error.txt").read_text()
        assert process.is_alive() and pool.idle == 1
        # Out of the parent's group, which is signalled as a whole, but in its session, to which
        # Linux gives one share of the CPU: so "nice gla compare" is nice.
        assert os.getpgid(process.pid) == process.pid and os.getsid(process.pid) == os.getsid(0)


@pytest.mark.slow
def test_sigterm_ends_in_order(suite_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--size", "long", "--train.steps", 100000, "--jobs", 1, "--out", out)
    process = subprocess.Popen(command(suite_file, *options), env=ENVIRONMENT)
    try:
        wait_for(lambda: list(out.glob("cells/*/*/*/checkpoints/step-*")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    (log,) = out.glob("cells/*/*/*/log.txt")
    assert "stopped at step" in log.read_text()
    assert not (out / ".lock").exists()


def test_errors_are_one_line_each(
    suite_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> str:
        assert main(["compare", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "size: got 'gpu', expected one of base, long" in fails(suite_file, "--size", "gpu")
    assert "SUITE: got 'gate', expected a TOML file or 'gates'" in fails("gate")
    assert "got no folder" in fails(suite_file, "--report", "--out", tmp_path / "nowhere")
    assert "got no finished cell" in fails(suite_file, "--report", "--out", tmp_path)
    assert not (tmp_path / "report.json").exists()
    wrong = suite_file.read_text().replace('gate = "channel"', 'gate = "chanel"')
    (tmp_path / "wrong.toml").write_text(wrong)
    said = fails(tmp_path / "wrong.toml", "--dry-run")
    assert "tasks.recall, variants.gla: model" in said and "chanel" in said


def test_a_plan_without_training(suite_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(suite_file), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[-1] == "5 cells"
    assert "6 steps of 4 x 32  lr 0.001, 0.01" in lines[1]
