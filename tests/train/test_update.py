"""Updates that are made, left out, averaged; losses that stand out."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gla.errors import ConfigError, NumericsError
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig
from gla.train.inputs import open_inputs, with_vocab_size
from gla.train.loop import resume, train
from gla.train.objective import LanguageModeling
from gla.train.trainer import MOST_SKIPS, Trainer
from gla.train.update import FIRST_SCALE, Spikes

Recipe = Callable[..., RunConfig]
CPU = torch.device("cpu")


def trainer(config: RunConfig, precision: str = "fp32") -> Trainer:
    config = with_vocab_size(config, 300)
    torch.manual_seed(0)
    objective = LanguageModeling(config, open_inputs(config.data), CPU, precision)
    return Trainer(config, objective, CPU, precision)


def weights(one: Trainer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in one.model.state_dict().items()}


def moments(one: Trainer) -> list[Any]:
    return copy.deepcopy(list(one.updater.optimizer.state.values()))


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def break_step(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Make the loss NaN in given calls of training; the first is the rehearsal."""
    original = LanguageModel.loss
    count = [0]

    def loss(self: LanguageModel, *arguments: Any, **options: Any) -> torch.Tensor:
        value = original(self, *arguments, **options)
        count[0] += self.training
        return value * math.nan if self.training and count[0] in calls else value

    monkeypatch.setattr(LanguageModel, "loss", loss)


def test_a_step_left_out_changes_nothing_but_the_step(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_step(monkeypatch, 4)  # step 3
    config = recipe(train__on_nonfinite="skip", train__steps=3, checkpoint__interval=1)
    train(config, tmp_path / "run", device="cpu")
    monkeypatch.undo()
    for file in ("model.safetensors", "optimizer.safetensors"):
        two, three = (
            load_file(tmp_path / "run/checkpoints" / f"step-{step:08d}" / file) for step in (2, 3)
        )
        assert two.keys() == three.keys()
        assert all(torch.equal(tensor, three[name]) for name, tensor in two.items()), file
    training = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert training[2]["loss"] is None and "loss" in training[2]["nonfinite"]
    assert [line["tokens"] for line in training[1:]] == [training[1]["tokens"]] * 2
    assert [line["skipped"] for line in training] == [0, 0, 1]
    file = tmp_path / "run/nonfinite/step-00000003-rank-0.safetensors"
    with safe_open(file, "pt") as dumped:
        assert dumped.metadata()["last_sample"] == "11"
        assert dumped.get_tensor("0.tokens").shape == dumped.get_tensor("0.targets").shape


def test_a_step_left_out_does_not_poison_later_ones(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_step(monkeypatch, 4)
    config = recipe(train__on_nonfinite="skip", train__ema_decay=0.9, metrics__interval=2)
    train(config, tmp_path / "run", device="cpu")
    folder = tmp_path / "run/checkpoints/step-00000006"
    for file in folder.glob("*.safetensors"):
        assert all(t.isfinite().all() for t in load_file(file).values()), file.name
    steps = load_file(folder / "optimizer.safetensors")["embed.weight.step"]
    assert float(steps) == 5
    training = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6]
    assert all(4 < line["loss"] < 6 for line in training)  # a window holds the good steps only


def test_too_many_left_out_in_a_row_are_an_error(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_step(monkeypatch, *range(3, 100))
    config = recipe(train__on_nonfinite="skip", train__steps=50, eval__interval=50)
    with pytest.raises(NumericsError, match=rf"the {MOST_SKIPS}th in a row"):
        train(config, tmp_path / "run", device="cpu")


def test_an_infinite_gradient_in_fp16_skips_and_halves_the_scale(recipe: Recipe) -> None:
    one = trainer(recipe(), "fp16")
    assert one.updater.scale == FIRST_SCALE
    before, old = weights(one), moments(one)
    batches = one.objective.batches(0)
    one.updater.scale = 2.0**120
    loss, *_ = one.backward(batches)
    norms = one.updater.norms()
    assert math.isfinite(loss) and not math.isfinite(norms.total)
    assert one.updater.can_scale_down
    one.updater.skip()
    assert one.updater.scale == 2.0**119 and one.updater.skipped == 1
    assert all(torch.equal(t, before[n]) for n, t in weights(one).items())
    assert moments(one) == old == []
    assert all(p.grad is None for p in one.model.parameters())


def test_the_scale_of_fp16_cancels(recipe: Recipe) -> None:
    small, large = trainer(recipe(), "fp16"), trainer(recipe(), "fp16")
    large.updater.scale = 2 * FIRST_SCALE
    norms = []
    for one in (small, large):
        one.backward(one.objective.batches(0))
        norms.append(one.updater.norms().total)
        one.updater.take(0, norms[-1])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    for name, weight in weights(small).items():
        torch.testing.assert_close(weight, weights(large)[name], rtol=1e-3, atol=2e-3)


def test_fp16_learns(tmp_path: Path, recipe: Recipe) -> None:
    config = recipe(train__precision="fp16", train__steps=40, eval__interval=40)
    train(config, tmp_path / "run", device="cpu")
    losses = [line["loss"] for line in lines(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0] - 1


def test_the_scale_grows_after_many_good_updates(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gla.train.update._GROW_AFTER", 2)
    one = trainer(recipe(), "fp16")
    for step in range(2):
        one.backward(one.objective.batches(step))
        one.updater.take(step, one.updater.norms().total)
    assert one.updater.scale == 2 * FIRST_SCALE


def test_the_average_is_that_of_the_formula_and_is_what_is_evaluated(
    tmp_path: Path, recipe: Recipe
) -> None:
    one = trainer(recipe(train__ema_decay=0.5))
    name = "blocks.0.mlp.up_proj.weight"
    expected = weights(one)[name].double()
    for step in range(3):
        one.backward(one.objective.batches(step))
        one.updater.take(step, one.updater.norms().total)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weights(one)[name].double()
    torch.testing.assert_close(one.updater.average[name].double(), expected, rtol=1e-6, atol=1e-8)
    raw = weights(one)
    with one.updater.averaged():
        torch.testing.assert_close(
            one.model.get_parameter(name).double(), expected, rtol=1e-6, atol=1e-8
        )
    assert all(torch.equal(t, raw[n]) for n, t in weights(one).items())

    result = train(recipe(train__ema_decay=0.5), tmp_path / "run", device="cpu")
    folder = tmp_path / "run/checkpoints/step-00000006"
    average = load_file(folder / "average.safetensors")
    loaded = LanguageModel.load(tmp_path / "run")
    assert torch.equal(loaded.get_parameter(name), average[name])
    assert not torch.equal(
        loaded.get_parameter(name), load_file(folder / "model.safetensors")[name]
    )
    from gla.cli.eval import measure

    figures = measure(tmp_path / "run", device="cpu")
    assert figures["loss"] == pytest.approx(result.validation["loss"], rel=1e-6)


def test_spikes_are_flagged_and_a_new_level_is_learned() -> None:
    rng = random.Random(0)
    spikes = Spikes()
    quiet = [spikes.flags(3 + rng.gauss(0, 0.05)) for _ in range(200)]
    assert not any(quiet)
    assert spikes.flags(9.0)
    assert not any(spikes.flags(3 + rng.gauss(0, 0.05)) for _ in range(50))
    later = [spikes.flags(5 + rng.gauss(0, 0.05)) for _ in range(100)]
    assert later[0] and not any(later[-20:])


def test_a_falling_loss_is_no_spike() -> None:
    spikes = Spikes()
    assert not any(spikes.flags(2 + 8 * math.exp(-i / 30)) for i in range(300))


def test_a_spike_is_told(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LanguageModel.loss
    count = [0]

    def loss(self: LanguageModel, *arguments: Any, **options: Any) -> torch.Tensor:
        value = original(self, *arguments, **options)
        count[0] += self.training
        return value * 20 if self.training and count[0] == 27 else value

    monkeypatch.setattr(LanguageModel, "loss", loss)
    train(recipe(train__steps=28, eval__interval=28), tmp_path / "run", device="cpu")
    assert "step 26: a loss of" in (tmp_path / "run/log.txt").read_text()
    assert [line["step"] for line in lines(tmp_path / "run") if line.get("spikes")] == [26]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), MemoryError(), "cpu"])
def test_a_batch_that_does_not_fit_names_one_that_does(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    original = LanguageModel.loss
    if error == "cpu":
        error = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")

    def loss(self: LanguageModel, tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if tokens.shape[1] > 3 * 64:
            raise error
        return original(self, tokens, *args, **options)

    monkeypatch.setattr(LanguageModel, "loss", loss)
    config = recipe(train__global_batch_size=8)
    with pytest.raises(ConfigError, match=r"got 8, .*expected at most 2; fix with .*size 2,"):
        train(config, tmp_path / "run", device="cpu")
    # What the message asks for can be done: nothing was begun, and no override is kept.
    fitting = recipe(train__global_batch_size=8, train__micro_batch_size=2)
    train(fitting, tmp_path / "run", device="cpu")
    with pytest.raises(ConfigError, match=r"got 8, "):
        more = [("train.steps", "7"), ("train.micro_batch_size", "8")]
        resume(tmp_path / "run", overrides=more, device="cpu")
    assert resume(tmp_path / "run", device="cpu").step == 6
    monkeypatch.setattr("gla.train.rehearsal._fits", lambda *_: False)
    with pytest.raises(ConfigError, match="not even a single row"):
        train(recipe(), tmp_path / "other", device="cpu")


def test_a_rehearsal_changes_nothing(recipe: Recipe) -> None:
    one, other = trainer(recipe()), trainer(recipe())
    one._rehearse(4)
    assert all(p.grad is None for p in one.model.parameters())
    assert one.backward(one.objective.batches(0)) == other.backward(other.objective.batches(0))


def test_activation_checkpointing_changes_memory_and_nothing_else(recipe: Recipe) -> None:
    kept, gradients = [], []
    for checkpointing in (False, True):
        one = trainer(recipe(train__activation_checkpointing=checkpointing))
        saved: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = one.objective.loss(one.objective.batches(0)[0], 0)
        kept.append(sum(t.untyped_storage().nbytes() for t in saved.values()))
        loss.backward()
        gradients.append({n: p.grad for n, p in one.model.named_parameters()})
    assert kept[1] < 0.6 * kept[0]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_random_numbers_follow_seed_step_and_process(recipe: Recipe) -> None:
    def drawn(step: int, rank: int = 0, seed: int = 0) -> float:
        one.step, one.ranks.rank = step, rank
        one.config = one.config.model_copy(
            update={"train": one.config.train.model_copy(update={"seed": seed})}
        )
        one._seed()
        return float(torch.rand(()))

    one = trainer(recipe())
    values = {(s, r, e): drawn(s, r, e) for s in range(3) for r in range(2) for e in range(2)}
    assert len(set(values.values())) == len(values)
    assert drawn(1, 1, 1) == values[1, 1, 1]
