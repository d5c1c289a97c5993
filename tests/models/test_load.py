"""Loading a model from a run: the newest checkpoint that verifies, or a clear refusal."""

from __future__ import annotations

import logging

import pytest
import tomli_w
import torch
from safetensors.torch import save_file

import gla
from gla import storage
from gla.errors import CheckpointError, ConfigError


@pytest.fixture
def run(tmp_path, make):
    """A run with two checkpoints, and the models that are in them."""
    models = [make(["gla", "ring"], torch.float32) for _ in range(2)]
    with torch.no_grad():
        models[1].embed.weight += 1
    table = models[0].config.model_dump(mode="json", exclude_none=True)
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"model": table}))
    for step, model in zip((10, 20), models, strict=True):

        def write(folder, model=model):
            save_file(model.state_dict(), folder / "model.safetensors")

        storage.write_folder(tmp_path / "checkpoints" / f"step-{step:08d}", write)
    return tmp_path, models


TOKENS = torch.arange(8).unsqueeze(0)


def test_the_newest_checkpoint_is_loaded(run):
    path, (_, newest) = run
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = gla.LanguageModel.load(path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert torch.equal(model(TOKENS).logits, newest(TOKENS).logits)


def test_one_checkpoint_can_be_named(run):
    path, (oldest, _) = run
    model = gla.LanguageModel.load(path / "checkpoints" / "step-00000010")
    assert torch.equal(model(TOKENS).logits, oldest(TOKENS).logits)


def test_the_config_in_a_checkpoint_counts_before_that_of_the_run(run, make):
    path, _ = run
    model = make(["full"], torch.float32)
    table = model.config.model_dump(mode="json", exclude_none=True)

    def write(folder):
        save_file(model.state_dict(), folder / "model.safetensors")
        (folder / "config.toml").write_text(tomli_w.dumps({"model": table}))

    storage.write_folder(path / "checkpoints" / "step-00000030", write)
    assert torch.equal(gla.LanguageModel.load(path)(TOKENS).logits, model(TOKENS).logits)


def test_a_damaged_checkpoint_is_skipped_loudly(run, caplog):
    path, (oldest, _) = run
    file = path / "checkpoints" / "step-00000020" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING, "gla"):
        model = gla.LanguageModel.load(path)
    assert torch.equal(model(TOKENS).logits, oldest(TOKENS).logits)
    assert "step-00000020" in caplog.text
    with pytest.raises(CheckpointError):
        gla.LanguageModel.load(file.parent)


def test_what_is_missing_is_named(tmp_path, run):
    with pytest.raises(CheckpointError, match="got no checkpoint that verifies"):
        gla.LanguageModel.load(tmp_path / "nowhere")
    path, _ = run
    (path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"config\.toml"):
        gla.LanguageModel.load(path)


def test_weights_of_another_model_are_refused(run, make):
    path, _ = run
    table = make(["gla", "full"]).config.model_dump(mode="json", exclude_none=True)
    (path / "config.toml").write_text(tomli_w.dumps({"model": table | {"d_model": 24}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got .*fix by loading the run"):
        gla.LanguageModel.load(path)
