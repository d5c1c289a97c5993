"""A dry run says what training would take, and takes nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig, load_recipe
from gla.train.inputs import with_vocab_size
from gla.train.plan import describe, plan

Recipe = Callable[..., RunConfig]
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_the_figures_are_those_of_the_model(recipe: Recipe) -> None:
    config = recipe(train__global_batch_size=8, train__micro_batch_size=2, train__steps=10)
    figures = plan(config, "cpu")
    model = LanguageModel(with_vocab_size(config, 300).model)
    assert figures["parameters"] == model.num_parameters()
    assert figures["tokens_per_step"] == 8 * 64
    assert figures["tokens"] == 10 * 8 * 64
    assert figures["weights_bytes"] == 4 * 4 * model.num_parameters()
    assert figures["data"]["prepared"]
    json.dumps(figures, allow_nan=False)


def test_epochs_are_how_often_the_data_are_read(recipe: Recipe, tmp_path: Path) -> None:
    tokens = json.loads((Path(recipe().data.path) / "train" / "index.json").read_text())
    once = tokens["num_tokens"] / (4 * 64)  # steps, were there no empty places in rows
    assert plan(recipe(train__steps=9, train__carry_state=True), "cpu")["epochs"] == 9 / once
    figures = plan(recipe(train__steps=300), "cpu")
    assert 0.95 * 300 / once < figures["epochs"] <= 300 / once
    assert f"epochs            {figures['epochs']:.2f}" in describe(figures)
    unknown = plan(recipe(data__path=str(tmp_path / "none"), data__vocab_size=300), "cpu")
    assert unknown["epochs"] is None
    assert "epochs            known once the data are prepared" in describe(unknown)


def test_prepared_data_name_what_they_were_made_from(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe()
    texts = str(Path(config.data.path).parent / "texts")
    assert f"data sources      {texts}" in describe(plan(config, "cpu"))
    shutil.copytree(config.data.path, tmp_path / "data")
    (tmp_path / "data" / "made_from.json").unlink()
    silent = plan(recipe(data__path=str(tmp_path / "data")), "cpu")
    assert "data sources      not recorded in the prepared data" in describe(silent)


def test_the_activations_are_those_that_autograd_keeps(recipe: Recipe) -> None:
    config = recipe(train__seq_len=128)
    figures = plan(config, "cpu")
    model = LanguageModel(with_vocab_size(config, 300).model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.arange(4 * 128).remainder(300).view(1, -1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.loss(tokens, tokens, cu_seqlens=torch.arange(0, 513, 128))
    size = sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in weights)
    assert figures["activation_bytes"] == pytest.approx(size, rel=0.25)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_plan_without_their_data(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    figures = plan(load_recipe(path), "cpu")
    assert figures["parameters"] > 500_000
    assert not figures["data"]["prepared"]
    assert figures["data"]["sources"]
    text = "\n".join(describe(figures))
    assert f"{figures['parameters']:,}" in text
    assert figures["data"]["sources"][0] in text
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_close_to_what_a_checkpoint_takes(tmp_path: Path, recipe: Recipe) -> None:
    from gla.train.loop import train

    figures = plan(recipe(), "cpu")
    train(recipe(), tmp_path / "run", device="cpu")
    folder = tmp_path / "run/checkpoints/step-00000006"
    size = sum(p.stat().st_size for p in folder.iterdir())
    assert math.isclose(figures["checkpoint_bytes"], size, rel_tol=0.1)


def test_a_large_vocabulary_does_not_count_by_the_token(recipe: Recipe) -> None:
    """The head's gradient, as large as the head, is kept once however long the row is."""
    short, long = (
        plan(recipe(data__path="absent", data__vocab_size=32_000, train__seq_len=n), "cpu")
        for n in (256, 4096)
    )
    head = 4 * 32_000 * 32
    assert short["activation_bytes"] > head
    grown = long["activation_bytes"] - short["activation_bytes"]
    kept_a_token = (short["activation_bytes"] - head) / (256 * 4)
    assert grown == pytest.approx(kept_a_token * (4096 - 256) * 4, rel=0.35)


def test_muon_keeps_fewer_moments(recipe: Recipe) -> None:
    adamw, muon = (plan(recipe(optim__kind=kind), "cpu") for kind in ("adamw", "muon"))
    model = LanguageModel(with_vocab_size(recipe(), 300).model)
    maps = sum(
        p.numel() * 4
        for n, p in model.named_parameters()
        if "proj.weight" in n and "gate.up" not in n
    )
    assert adamw["weights_bytes"] - muon["weights_bytes"] == maps
    assert adamw["checkpoint_bytes"] - muon["checkpoint_bytes"] == maps
