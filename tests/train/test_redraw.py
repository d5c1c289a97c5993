"""Random features that are redrawn in training: in the checkpoint, and exact after a resume."""

from __future__ import annotations

import pytest

from gla import storage
from gla.errors import ConfigError
from gla.models.language_model import LanguageModel
from gla.train.loop import resume, train

PERFORMER = {
    "kind": "linear_attention",
    "gate": "none",
    "feature_map": "favor",
    "normalize": True,
    "redraw_every": 2,
}


def test_a_resumed_run_draws_what_an_unbroken_one_draws(recipe, tmp_path):
    model = {"d_model": 32, "layers": ["mine*2"], "mixers": {"mine": PERFORMER}}
    whole = {"model__" + key: value for key, value in model.items()}
    schedule = {"train__steps": 7, "schedule__kind": "wsd", "schedule__decay_fraction": 0.0}
    train(recipe(**whole, **schedule), tmp_path / "whole")
    train(recipe(**whole, **schedule | {"train__steps": 5}), tmp_path / "split")
    resume(tmp_path / "split", overrides=[("train.steps", "7")])
    a, b = (LanguageModel.load(tmp_path / name).state_dict() for name in ("whole", "split"))
    assert all(a[name].equal(b[name]) for name in a)
    assert a["blocks.0.mixer.feature_map.redraws"] == 3
    assert storage.newest_verified(tmp_path / "split" / "checkpoints")[0] is not None


def test_what_is_saved_has_the_features_that_were_trained(recipe, tmp_path):
    """The last step is one to redraw after: nothing may be drawn that no update has used."""
    model = {"model__d_model": 32, "model__layers": ["mine"], "model__mixers": {"mine": PERFORMER}}
    train(recipe(**model, train__steps=6), tmp_path / "run")
    saved = LanguageModel.load(tmp_path / "run").state_dict()
    assert saved["blocks.0.mixer.feature_map.redraws"] == 2


def test_a_state_is_not_carried_over_a_redraw(recipe, tmp_path):
    model = {"model__d_model": 32, "model__layers": ["mine"], "model__mixers": {"mine": PERFORMER}}
    with pytest.raises(ConfigError, match=r"^train.carry_state: got true with redraw_every = 2"):
        train(recipe(**model, train__carry_state=True), tmp_path / "run")
