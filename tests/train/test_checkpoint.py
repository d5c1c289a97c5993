"""Checkpoints hold all of a run's state, and fit only the model that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gla import storage
from gla.errors import CheckpointError
from gla.train import checkpoint, kept


class Tied(nn.Module):
    """A shared tensor, a square matrix, a buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.square = nn.Linear(width, width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0))


def facts(step: int = 1) -> checkpoint.TrainerFacts:
    return checkpoint.TrainerFacts(
        step=step,
        tokens=10,
        window={"loss": 1.5},
        validation={},
        best=None,
        updater={"scale": 1.0},
        clock={},
        data={},
    )


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.write(folder, checkpoint.snapshot(model, optimizer, facts(), "a = 1\n"))


def trained(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(width)
    model = Tied(width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sum((p**3).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()


def test_everything_comes_back_and_the_next_step_is_the_same(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "step-1", model, optimizer)
    step(model, optimizer)

    other = Tied()
    fresh = torch.optim.AdamW(other.parameters(), fused=True)
    restored = checkpoint.load(tmp_path / "step-1", other, fresh)
    assert restored == (facts(), {}, {})
    assert other.head.weight is other.embed.weight
    step(other, fresh)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "step-1/config.toml").read_text() == "a = 1\n"


def test_a_shared_tensor_is_stored_once(tmp_path: Path) -> None:
    save(tmp_path / "step-1", *trained())
    names = set(load_file(tmp_path / "step-1/model.safetensors"))
    assert names == {"embed.weight", "square.weight", "square.bias", "table"}


def rewrite(folder: Path, change: str) -> None:
    """Write a checkpoint again with a valid manifest but other weights."""
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        del tensors["square.bias"]
    elif change == "extra":
        tensors["more"] = torch.zeros(2)
    elif change == "shape":
        tensors["square.weight"] = torch.zeros(4, 5)
    else:
        tensors["square.weight"] = tensors["square.weight"].to(torch.bfloat16)
    keep = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != storage.MANIFEST}

    def write(temporary: Path) -> None:
        for name, data in keep.items():
            (temporary / name).write_bytes(data)
        save_file(tensors, temporary / "model.safetensors")

    storage.write_folder(folder, write, replace=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "square.bias is missing"),
        ("extra", "more is not in the model"),
        ("shape", r"square.weight is \[4, 5\] torch.float32, expected \[4, 4\]"),
        ("dtype", r"square.weight is \[4, 4\] torch.bfloat16, expected"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_change_nothing(
    tmp_path: Path, change: str, words: str
) -> None:
    save(tmp_path / "step-1", *trained())
    rewrite(tmp_path / "step-1", change)
    storage.verify_folder(tmp_path / "step-1")
    model, optimizer = trained()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(tmp_path / "step-1", model, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_moments_of_another_dtype_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    save(folder, *trained())
    file = folder / "optimizer.safetensors"
    moments = load_file(file)
    name = "square.weight.exp_avg_sq"
    save_file(moments | {name: moments[name].to(torch.bfloat16)}, file)
    words = r"got \[4, 4\] torch.bfloat16 for square.weight.exp_avg_sq, expected .* torch.float32"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(folder, *trained())
    save_file(moments | {"square.bias.step": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"\[2\] torch.float32 for square.bias.step"):
        checkpoint.load(folder, *trained())


def test_at_most_ten_faults_are_listed() -> None:
    expected = {f"w{i:02}": torch.zeros(1) for i in range(40)}
    with pytest.raises(CheckpointError, match=r"w09 is missing and 30 more") as error:
        checkpoint.check_tensors(Path("m.safetensors"), {}, expected)
    assert str(error.value).count("missing") == 10


def test_a_newer_format_names_both_versions(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "step-1", model, optimizer)
    file = tmp_path / "step-1/trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 9}))
    with pytest.raises(CheckpointError, match=r"format 9, expected 2"):
        checkpoint.load(tmp_path / "step-1", model, optimizer)


def test_pruning_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for number in (2, 10, 99_999_999, 100_000_000):
        save(kept.folder_of(tmp_path, number), *trained())
    kept.prune(tmp_path / "checkpoints", keep=2)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-100000000", "step-99999999"]
    kept.prune(tmp_path / "checkpoints", keep=2)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_disk_that_fails_keeps_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    save(tmp_path / "step-1", model, optimizer)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"step-2.*No space left"):
        save(tmp_path / "step-2", model, optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    storage.verify_folder(tmp_path / "step-1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optim__kind": "muon"}, "optim.kind: got 'muon', expected 'adamw'"),
        ({"train__seed": 5}, "train.seed: got 5, expected 0"),
        ({"train__seq_len": 32}, "train.seq_len: got 32, expected 64"),
        ({"train__global_batch_size": 2}, "train.global_batch_size: got 2, expected 4"),
    ],
)
def test_what_a_run_keeps_for_good_cannot_change(tmp_path, recipe, change, words) -> None:
    (tmp_path / "config.toml").write_text(recipe().to_toml())
    with pytest.raises(CheckpointError, match=words):
        checkpoint.check_same(tmp_path, recipe(**change), {})
