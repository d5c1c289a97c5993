"""The command line as a process sees it: exit codes, streams, one line for an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gla
from gla.cli import main as cli
from gla.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def run_gla(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gla", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_version() -> None:
    done = run_gla("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gla {gla.__version__}\n", "")


def test_help_names_every_command() -> None:
    done = run_gla("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_every_command_has_its_file() -> None:
    files = {p.stem for p in (ROOT / "gla" / "cli").glob("*.py")}
    assert set(COMMANDS) <= files


def test_no_command_is_a_usage_error() -> None:
    done = run_gla()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: gla COMMAND")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"usage: gla {command}" in capsys.readouterr().out


def test_help_of_a_nested_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["tokenizer", "train"], ["data", "prepare"]):
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--help"])
        assert left.value.code == 0
        assert "--out PATH" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("demo", "doctor")])
def test_missing_arguments_are_a_usage_error(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.count("\n") == 1 and ": got none, expected" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "tokenizer train x --vocabsize 300 --out t",
            "--vocabsize: got an unknown option, expected --vocab-size; see gla tokenizer train",
        ),
        ("generate r --xyzzy 3", "--xyzzy: got an unknown option, expected one of its options"),
        (
            "data prepare x --tokenizer t --out o --val-fraction abc",
            "--val-fraction: got 'abc', expected a number",
        ),
        ("eval r --batches x", "--batches: got 'x', expected a whole number; see gla eval --help"),
        (
            "doctor --task sum",
            "--task: got 'sum', expected one of classify, language-model, recall; see gla",
        ),
        ("generate r --max-new-tokens", "--max-new-tokens: got no value, expected one"),
        ("data prepar x", "prepar: got an unknown option, expected prepare; see gla data --help"),
        ("eval", "RUN: got none, expected: Folder of the run; see gla eval --help"),
        ("compare", "SUITE: got none, expected: A TOML file, or the name of a suite that ships"),
        ("tokenizer train --out t", "SOURCES: got none, expected files, folders or other"),
        ("generate r --prompt-file none.txt", "--prompt-file: got none.txt, no file, expected one"),
        ("eval r --batches 3 --references", "--references: got --batches 3 beside it, expected"),
        ("eval r --batches -1", "--batches: got -1, expected at least 0; fix by giving more"),
        ("bench cost --seconds -1", "--seconds: got -1, expected more than 0; fix"),
        ("bench cost --limit nan", "--limit: got nan, expected more than 0; fix"),
        ("bench article --seconds 0", "--seconds: got 0, expected more than 0; fix"),
        ("compare gates --jobs 0 --dry-run", "--jobs: got 0, expected at least 1; fix"),
    ],
)
def test_wrong_usage_is_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith(f"gla: {said}")


def test_wrong_usage_is_one_line_on_a_terminal() -> None:
    """Where there are colours and bars."""
    ours, its = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        command = [sys.executable, "-m", "gla", "eval", "r", "--batches", "x"]
        env = os.environ | {"TERM": "xterm-256color"}
        done = subprocess.run(command, stdout=its, stderr=its, stdin=its, env=env, check=False)
        os.close(its)
        shown = screen.read(10_000).decode()
    assert done.returncode == 2
    expected = "gla: --batches: got 'x', expected a whole number; see gla eval --help"
    assert shown.splitlines() == [expected]


def test_an_unknown_command_names_the_nearest() -> None:
    done = run_gla("trian", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gla: command: got 'trian', expected 'train'; fix with gla --help\n"


def test_an_unknown_option_is_a_usage_error_on_stderr() -> None:
    done = run_gla("doctor", "--jsn")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (gla.ConfigError, 2),
        (gla.DataError, 3),
        (gla.CheckpointError, 4),
        (gla.StateError, 4),
        (gla.NumericsError, 5),
        (gla.DistributedError, 6),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    error: type[gla.GlaError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: list[str]) -> int:
        raise error("x.toml: got 1, expected 2; fix x")

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert main([]) == code
    assert capsys.readouterr().err == "gla: x.toml: got 1, expected 2; fix x\n"
    with pytest.raises(error):
        main(["--debug"])


def test_an_os_error_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "none.txt"
    monkeypatch.setattr(cli, "_dispatch", lambda _: open(missing))
    assert main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gla: {missing}: got No such file") and error.count("\n") == 1


def test_ctrl_c_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err == "gla: interrupted\n"


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]])
def test_a_closed_stdout_is_quiet(arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gla", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # before the first byte is written
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141
