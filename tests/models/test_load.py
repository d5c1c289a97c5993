"""Loading a model from a run: the newest checkpoint that verifies, or a clear refusal."""

from __future__ import annotations

import json
import logging
import math
import resource
import shutil
import struct
from typing import Any, Literal

import pytest
import tomli_w
import torch
from safetensors.torch import save_file
from torch import nn

import gla
from gla import storage
from gla.errors import CheckpointError, ConfigError, NumericsError
from gla.layers.mixer import Mixer, MixerConfig
from gla.models.weights import named_once
from gla.ops import forms


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


def test_a_run_of_kernels_that_do_not_run_here_opens_in_another_form(run, monkeypatch):
    path, (_, newest) = run
    table = newest.config.with_impl("triton").model_dump(mode="json", exclude_none=True)
    (path / "config.toml").write_text(tomli_w.dumps({"model": table}))
    monkeypatch.setattr(forms, "_no_kernels", lambda *_: "a GPU")
    with pytest.raises(ConfigError, match=r"^mixers\.gla\.impl: got 'triton', .*--impl torch"):
        gla.LanguageModel.load(path)
    model = gla.LanguageModel.load(path, impl="torch")
    assert model.config == newest.config.with_impl("torch")
    assert torch.equal(model(TOKENS).logits, newest(TOKENS).logits)


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
    path, _ = run
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nowhere", tmp_path / "empty"):
        for opener in (gla.LanguageModel.load, gla.Encoder.load, gla.Session.open):
            with pytest.raises(
                ConfigError, match=r"got no config\.toml there, expected the folder"
            ):
                opener(place)
    shutil.copy(path / "config.toml", tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"got no checkpoint that verifies, .* gla resume"):
        gla.LanguageModel.load(tmp_path / "empty")
    (path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"config\.toml"):
        gla.LanguageModel.load(path)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_named(run, device):
    with pytest.raises(ConfigError, match=f"device: got '{device}', expected a device of this"):
        gla.LanguageModel.load(run[0], device)


def test_weights_of_another_model_are_refused(run, make):
    path, _ = run
    table = make(["gla", "full"]).config.model_dump(mode="json", exclude_none=True)
    (path / "config.toml").write_text(tomli_w.dumps({"model": table | {"d_model": 24}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got .*fix by loading the run"):
        gla.LanguageModel.load(path)


def test_a_pickle_is_refused_by_its_first_bytes_and_not_opened(tmp_path):
    proof = tmp_path / "opened"
    payload = f"cos\nmkdir\n(S'{proof}'\ntR.".encode()  # a pickle that makes a folder when read
    for name, data in (("bare", b"\x80\x02" + payload), ("zip", b"PK\x03\x04" + payload)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match="a pickle, which can run any code"):
            gla.LanguageModel.load(tmp_path / name)
    (tmp_path / "text").write_text("x")
    with pytest.raises(CheckpointError, match="got a file, expected the folder"):
        gla.LanguageModel.load(tmp_path / "text")
    assert not proof.exists()


def write_weights(path, tensors, name="step-00000030", **more):
    def write(folder):
        save_file(tensors, folder / "model.safetensors")
        for file, others in more.items():
            save_file(others, folder / f"{file}.safetensors")

    storage.write_folder(path / "checkpoints" / name, write)


def test_weights_that_are_not_finite_are_refused_unless_allowed(run):
    path, (model, _) = run
    tensors = {n: t.clone() for n, t in model.state_dict().items()}
    tensors["blocks.0.mlp.up_proj.weight"][0, 0] = math.nan
    write_weights(path, tensors)
    with pytest.raises(NumericsError, match=r"NaN or infinity in blocks\.0\.mlp\.up_proj\.weight,"):
        gla.LanguageModel.load(path)
    loaded = gla.LanguageModel.load(path, allow_nonfinite=True)
    assert loaded.get_parameter("blocks.0.mlp.up_proj.weight")[0, 0].isnan()


def test_an_average_is_loaded_in_place_of_the_weights(run):
    path, (oldest, newest) = run
    average = {n: p.detach() for n, p in newest.named_parameters()}
    write_weights(path, oldest.state_dict(), average=average)
    loaded = gla.LanguageModel.load(path)
    assert torch.equal(loaded(TOKENS).logits, newest(TOKENS).logits)


def test_missing_and_further_tensors_are_named(run):
    path, (model, _) = run
    tensors = dict(model.state_dict())
    write_weights(path, {n: t for n, t in tensors.items() if n != "norm.weight"})
    with pytest.raises(CheckpointError, match=r"no tensors \['norm.weight'\]"):
        gla.LanguageModel.load(path)
    write_weights(path, tensors | {"more": torch.zeros(2)}, "step-00000040")
    with pytest.raises(CheckpointError, match=r"further tensors \['more'\]"):
        gla.LanguageModel.load(path)


class TwiceConfig(MixerConfig):
    kind: Literal["twice"] = "twice"


class Twice(Mixer):
    """A mixer of which two maps share a weight."""

    def __init__(self, d_model, config):
        super().__init__()
        self.first = nn.Linear(d_model, d_model, bias=False)
        self.second = nn.Linear(d_model, d_model, bias=False)
        self.second.weight = self.first.weight

    def init_state(self, batch_size, *, device=None, dtype=None):
        return ()

    def forward(self, x, state=None, *, cu_seqlens=None, need_state=True):
        return self.second(self.first(x)), () if need_state else None


def test_a_weight_shared_within_a_mixer_is_stored_once_and_loads(tmp_path):
    gla.register_mixer("twice", TwiceConfig, Twice)
    config = gla.ModelConfig(
        d_model=16, vocab_size=32, layers=["t*2"], mixers={"t": {"kind": "twice"}}
    )
    model = gla.LanguageModel(config)
    table = config.model_dump(mode="json", exclude_none=True)
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"model": table}))
    tensors = named_once(model.state_dict())
    assert not any("second" in name for name in tensors)
    write_weights(tmp_path, tensors)
    loaded = gla.LanguageModel.load(tmp_path)
    mixer: Any = loaded.blocks[1].get_submodule("mixer")
    assert mixer.second.weight is mixer.first.weight
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_a_header_that_claims_gigabytes_takes_no_memory(run):
    path, _ = run
    header = json.dumps(
        {"embed.weight": {"dtype": "F32", "shape": [50000, 50000], "data_offsets": [0, 10**10]}}
    ).encode()

    def write(folder):
        data = struct.pack("<Q", len(header)) + header + b"\0" * 64
        (folder / "model.safetensors").write_bytes(data)

    storage.write_folder(path / "checkpoints" / "step-00000030", write)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        gla.LanguageModel.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
