"""Two processes do what one does; whatever happens to one of them, none hangs or half-writes."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gla import storage
from gla.errors import ConfigError, DistributedError
from gla.train.config import RunConfig
from gla.train.distributed import Ranks, started
from gla.train.inputs import open_inputs, with_vocab_size
from gla.train.objective import LanguageModeling, share_of
from tests.train.conftest import lines, rows

Recipe = Callable[..., RunConfig]
DRIVER = Path(__file__).with_name("rank_driver.py")
ROOT = Path(__file__).parents[2]
STEPS = 6
CPU = torch.device("cpu")


class Results(NamedTuple):
    folder: Path
    of: dict[str, Any]

    def said(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}-{rank}.txt").read_text()

    def steps(self, name: str) -> list[str]:
        return sorted(p.name for p in (self.folder / name / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Results:
    from gla.train.config import build

    folder = tmp_path_factory.mktemp("ranks")
    config = build(
        {
            "model": {"d_model": 32, "layers": ["gla", "window"]},
            "data": {"path": str(data)},
            "train": {
                "steps": STEPS,
                "seq_len": 64,
                "global_batch_size": 4,
                "precision": "fp32",
                "timeout_s": 20,
            },
            "checkpoint": {"interval": 2, "keep": 9},
            "eval": {"interval": 3},
            "metrics": {"interval": 1},
        }
    )
    (folder / "recipe.toml").write_text(config.to_toml())
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, str(DRIVER), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return Results(folder, json.loads(process.stdout))


@pytest.mark.parametrize("name", ["two", "two-one", "one-two"])
def test_the_number_of_processes_changes_only_the_rounding(results: Results, name: str) -> None:
    assert set(results.of[name]["codes"]) == {0}
    one, other = (results.folder / n for n in ("one", name))
    for a, b in zip(rows(one), rows(other), strict=True):
        assert (a["step"], a.get("tokens")) == (b["step"], b.get("tokens"))
        assert a.keys() == b.keys()
        for key in {"loss", "bpb", "val_loss", "val_bpb", "lr"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-6)
        if "grad_norm" in a:
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    file = f"checkpoints/step-{STEPS:08d}/model.safetensors"
    weights, others = load_file(one / file), load_file(other / file)
    for key, weight in weights.items():
        torch.testing.assert_close(weight, others[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["two-one-begin", "one-two-begin"])
def test_a_run_goes_on_with_another_number_of_processes(results: Results, name: str) -> None:
    assert set(results.of[name]["codes"]) == {143}
    assert "resumed from" in (results.folder / name[:7] / "log.txt").read_text()


def test_two_processes_go_back_to_an_older_checkpoint(results: Results) -> None:
    assert results.of["back"]["codes"] == [0, 0], results.said("back", 1)
    two, back = results.folder / "two", results.folder / "back"
    log = (back / "log.txt").read_text()
    assert "put aside" in log and f"resumed from {back / 'checkpoints' / 'step-00000002'}" in log
    assert lines(two) == lines(back)
    assert results.steps("two") == results.steps("back")
    for name in ("model", "optimizer"):
        file = f"checkpoints/step-{STEPS:08d}/{name}.safetensors"
        assert (two / file).read_bytes() == (back / file).read_bytes()


def test_a_loss_that_is_not_finite_in_one_stops_all(results: Results) -> None:
    assert results.of["nan"]["codes"] == [5, 5]
    assert results.steps("nan") == ["step-00000002"]
    for rank in range(2):
        assert "step 3" in results.said("nan", rank)
        file = results.folder / f"nan/nonfinite/step-00000003-rank-{rank}.safetensors"
        with safe_open(file, "pt") as dumped:
            assert dumped.metadata()["first_sample"] == "8"
            assert dumped.get_tensor("0.tokens").shape[0] == 1


def test_only_rank_0_writes_and_errors_come_from_all(results: Results) -> None:
    steps = [line["step"] for line in rows(results.folder / "two") if "loss" in line]
    assert steps == list(range(1, STEPS + 1))
    assert "step 1" in results.said("two", 0)
    assert results.said("two", 1) == ""
    assert all("NumericsError" in results.said("nan", rank) for rank in range(2))


def test_a_killed_process_ends_the_others_within_5_seconds(results: Results) -> None:
    codes = results.of["killed"]["codes"]
    assert codes == [6, -9]
    assert results.of["killed"]["seconds"] < 5
    assert "no answer from rank 1" in results.said("killed", 0)
    assert storage.newest_verified(results.folder / "killed/checkpoints")[1] == []


@pytest.mark.parametrize(("name", "rank"), [("stopped", 1), ("stopped-first", 0)])
def test_a_process_that_does_not_answer_is_named(results: Results, name: str, rank: int) -> None:
    assert results.of[name]["codes"][1 - rank] == 6
    assert f"no answer from rank {rank}" in results.said(name, 1 - rank)
    assert results.of[name]["seconds"] < 12


def test_mismatched_collectives_are_named(results: Results) -> None:
    assert 6 in results.of["mismatched"]["codes"]
    said = results.said("mismatched", 0) + results.said("mismatched", 1)
    assert "ALLREDUCE" in said and "BARRIER" in said


def test_a_recipe_that_differs_is_found_before_step_1(results: Results) -> None:
    assert results.of["differs"]["codes"] == [6, 6]
    assert "recipe: got another one on rank 1" in results.said("differs", 0)
    assert not (results.folder / "differs/config.toml").exists()


def test_sigterm_to_one_lets_all_save_the_same_step(results: Results) -> None:
    assert results.of["sigterm"]["codes"] == [143, 143]
    assert results.steps("sigterm")[-1] == "step-00000003"
    assert "stopped at step 3" in results.said("sigterm", 0)


def test_a_second_sigterm_ends_at_once_and_leaves_nothing_half(results: Results) -> None:
    codes = results.of["sigterm-twice"]["codes"]
    assert codes == [6, 143]
    newest, skipped = storage.newest_verified(results.folder / "sigterm-twice/checkpoints")
    assert newest is not None and newest.name == "step-00000002" and skipped == []


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 4)])
def test_a_step_has_the_same_samples_on_any_number_of_processes(
    recipe: Recipe, sizes: tuple[int, ...]
) -> None:
    def tokens(size: int, carried: bool) -> list[list[int]]:
        config = recipe(train__global_batch_size=4, train__carry_state=carried)
        inputs = open_inputs(config.data)
        config = with_vocab_size(config, 300)
        all_steps = []
        for step in range(3):
            batches = [
                batch
                for rank in range(size)
                for batch in LanguageModeling(
                    config, inputs, CPU, "fp32", Ranks(rank, size)
                ).batches(step)
            ]
            all_steps.append([t for batch in batches for t in batch.tokens[0].tolist()])
        return all_steps

    for carried in (False, True):
        seen = [tokens(size, carried) for size in sizes]
        assert all(other == seen[0] for other in seen)


def test_a_batch_that_cannot_be_shared_is_refused_with_the_arithmetic(recipe: Recipe) -> None:
    config = recipe(train__global_batch_size=6)
    with pytest.raises(ConfigError, match="6 % 4 = 2"):
        share_of(config, Ranks(0, 4))
    config = recipe(train__global_batch_size=6, train__micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"6 / 2 = 3 rows a process, and 3 % 2 = 1"):
        share_of(config, Ranks(0, 2))
    assert share_of(config, Ranks(0, 3)) == (2, 2)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE: got 'two'"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE: got '0'"),
        ({"WORLD_SIZE": "2"}, "RANK: got 'nothing'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK: got 2, expected below WORLD_SIZE = 2"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT: got 'x'"),
    ],
)
def test_a_wrong_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=named), started(CPU, 5):
        pass


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        for name, value in {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(DistributedError, match=port), started(CPU, 5):
            pass


def test_one_process_alone_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with started(CPU, 5) as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.sum([1.5, math.inf]) == [1.5, math.inf]
