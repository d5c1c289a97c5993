"""The trainer: it learns, it writes what it should, it refuses what it must."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gla
from gla import storage
from gla.errors import CheckpointError, ConfigError, DataError, NumericsError
from gla.models.language_model import LanguageModel
from gla.train import loop
from gla.train.config import RunConfig
from gla.train.inputs import open_inputs, with_vocab_size
from gla.train.loop import resume, train
from gla.train.objective import LanguageModeling
from gla.train.trainer import Trainer

Recipe = Callable[..., RunConfig]


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tree(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


def trainer(config: RunConfig, precision: str = "fp32") -> Trainer:
    inputs = open_inputs(config.data)
    config = with_vocab_size(config, inputs.tokenizer.vocab_size)
    device = torch.device("cpu")
    torch.manual_seed(config.train.seed)
    return Trainer(config, LanguageModeling(config, inputs, device, precision), device, precision)


def test_the_loss_falls_from_ln_v(tmp_path: Path, recipe: Recipe) -> None:
    result = train(recipe(train__steps=60, eval__interval=60), tmp_path / "run", device="cpu")
    losses = [line["loss"] for line in lines(tmp_path / "run") if "loss" in line]
    assert losses[0] == pytest.approx(math.log(300), abs=0.2)
    assert losses[-1] < losses[0] - 2
    assert result.validation["loss"] < losses[0] - 2


def test_a_run_folder_holds_what_the_design_says(tmp_path: Path, recipe: Recipe) -> None:
    config = recipe()
    samples = []

    def sampler(model: LanguageModel, tokenizer: object) -> str:
        assert not model.training
        samples.append(tokenizer)
        return "a *sample*\n  of text"

    result = gla.train(  # pyright: ignore[reportCallIssue] - a package that is callable
        config, run=tmp_path / "run", device="cpu", sampler=sampler
    )
    run = result.run
    assert result.step == 6
    for name in ("config.toml", "env.json", "log.txt", "tokenizer/tokenizer.model"):
        assert (run / name).is_file()
    steps = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert steps == ["step-00000004", "step-00000006"]  # the newest two
    training = [line for line in lines(run) if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4, 5, 6]
    for line in training:
        assert {"tokens", "loss", "bpb", "lr", "grad_norm", "tokens_per_s"} <= set(line)
    evaluations = [line for line in lines(run) if "val_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6]
    assert all("loss" not in line and "val_bpb" in line for line in evaluations)
    assert (run / "samples/step-00000006.txt").read_text() == "a *sample*\n  of text"
    assert len(samples) == 2
    environment = json.loads((run / "env.json").read_text())
    assert environment["seed"] == 0
    assert environment["versions"]["torch"]
    assert set(environment["data"]) == {"train", "val", "tokenizer"}
    model = LanguageModel.load(run)
    assert model.config.vocab_size == 300


def test_the_package_says_the_arguments_of_its_call() -> None:
    call: Any = gla.train
    assert inspect.signature(call) == inspect.signature(train)
    assert all(f"\n    {name} " in call.__doc__ for name in inspect.signature(train).parameters)


def test_tensorboard_holds_scalars_histograms_and_samples(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(), tmp_path / "run", device="cpu", sampler=lambda *_: "text")
    events = EventAccumulator(str(tmp_path / "run/tb"))
    events.Reload()
    tags = events.Tags()
    for name in ("loss", "bits_per_byte", "lr", "gradient_norm"):
        assert [e.step for e in events.Scalars(f"train/{name}")] == [1, 2, 3, 4, 5, 6]
    assert {"speed/tokens_per_s", "speed/memory_gib", "validation/loss"} <= set(tags["scalars"])
    watched = ("decay", "output_std", "half_life", "state_norm", "state_rank")
    wanted = {f"{what}/blocks.{i}.mixer" for what in watched for i in (0, 1)}
    assert set(tags["histograms"]) == wanted
    assert wanted <= set(tags["scalars"])
    histogram = events.Histograms("decay/blocks.0.mixer")[0].histogram_value
    assert 0 <= histogram.min < histogram.max <= 1
    assert tags["tensors"] == ["sample/text_summary"]


def test_the_scalar_of_half_lives_is_their_median(tmp_path, recipe, monkeypatch) -> None:
    watched = {f"{what}/a": torch.tensor([1.0, 2.0, 9.0]) for what in ("half_life", "decay")}
    monkeypatch.setattr(LanguageModeling, "watch", lambda self: (watched, None))
    train(recipe(train__steps=1), tmp_path / "run", device="cpu")
    *_, last = lines(tmp_path / "run")
    assert (last["half_life/a"], last["decay/a"]) == (2, 4)


def test_training_is_the_same_with_and_without_evaluation(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(), tmp_path / "a", device="cpu", sampler=lambda *_: str(torch.rand(9)))
    train(recipe(eval__interval=6), tmp_path / "b", device="cpu")
    first, second = (tree(tmp_path / name / "checkpoints/step-00000006") for name in "ab")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert first[file] == second[file]


def test_a_gradient_does_not_depend_on_how_the_batch_is_cut(recipe: Recipe) -> None:
    whole = trainer(recipe(train__global_batch_size=40))
    cut = trainer(recipe(train__global_batch_size=40, train__micro_batch_size=1))
    # Rows hold different numbers of targets, so a mean of means would differ.
    counts = {int((b.targets >= 0).sum()) for b in cut.objective.batches(0)}
    assert len(counts) > 1
    one, many = (t.backward(t.objective.batches(0)) for t in (whole, cut))
    assert one[1:] == many[1:]
    assert one[0] == pytest.approx(many[0], rel=1e-6)
    for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def test_the_gradient_is_clipped(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(recipe(train__max_norm=0.01))
    one.backward(one.objective.batches(0))
    gradients = [p.grad for p in one.model.parameters() if p.grad is not None]
    expected = float(torch.nn.utils.get_total_norm(gradients))
    norms = one.updater.norms()
    assert norms.total == pytest.approx(expected, rel=1e-5) and norms.total > 0.01
    assert sum(n**2 for n in norms.parts.values()) == pytest.approx(norms.total**2)
    assert set(norms.parts) == {
        "embed",
        "mixer",
        "mixer.gate",
        "mixer_norm",
        "mlp",
        "mlp_norm",
        "norm",
    }
    seen = []
    monkeypatch.setattr(
        one.updater.optimizer,
        "step",
        lambda: seen.append(float(torch.nn.utils.get_total_norm(gradients))),
    )
    one.updater.take(0, norms.total)
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_a_batch_without_targets_has_loss_0_and_is_no_error(recipe: Recipe) -> None:
    one = trainer(recipe())
    batches = one.objective.batches(0)
    masked = [b._replace(targets=torch.full_like(b.targets, -100)) for b in batches]
    assert one.backward(masked) == (0.0, 0, 0, 0, 0)
    assert one.updater.norms().total == 0


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    original = LanguageModel.loss
    calls = []

    def loss(self: LanguageModel, *arguments: object, **options: object) -> torch.Tensor:
        value = original(self, *arguments, **options)  # type: ignore[arg-type]
        calls.append(value)
        if len(calls) < 4:  # the first one is the rehearsal
            return value
        if what == "loss":
            return value * math.nan
        value.register_hook(lambda gradient: gradient * math.inf)
        return value

    monkeypatch.setattr(LanguageModel, "loss", loss)
    with pytest.raises(NumericsError, match=r"step 3 \(samples 8 to 11, written to"):
        train(recipe(checkpoint__interval=1, eval__interval=6), tmp_path / "run", device="cpu")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()][-1] == "step-00000002"
    assert lines(tmp_path / "run")[-1]["step"] == 2


def test_train_refuses_a_folder_that_holds_a_run(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(), tmp_path / "run", device="cpu")
    before = tree(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"gla resume"):
        train(recipe(), tmp_path / "run", device="cpu")
    assert tree(tmp_path / "run") == before


def test_train_starts_in_a_folder_whose_creation_was_killed(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.run_folder.json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(recipe(), tmp_path / "run", device="cpu")
    monkeypatch.undo()
    assert train(recipe(), tmp_path / "run", device="cpu").step == 6


def test_a_folder_that_cannot_be_written_fails_before_step_1(
    tmp_path: Path, recipe: Recipe
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"got a path below a file, expected a folder"):
        train(recipe(), tmp_path / "file" / "run", device="cpu")


def test_missing_data_and_too_little_data_are_data_errors(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(DataError, match=r"data\.path.*gla data prepare"):
        train(recipe(data__path=str(tmp_path / "none")), tmp_path / "run", device="cpu")
    with pytest.raises(DataError, match=r"tokens"):
        train(recipe(train__global_batch_size=10_000), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_sources_are_prepared_on_first_use(tmp_path: Path, recipe: Recipe, data: Path) -> None:
    texts = data.parent / "texts"
    config = recipe(
        data__path=str(tmp_path / "made"), data__sources=[str(texts)], data__vocab_size=280
    )
    train(config, tmp_path / "run", device="cpu")
    assert LanguageModel.load(tmp_path / "run").config.vocab_size == 280
    before = tree(tmp_path / "made")
    train(config, tmp_path / "again", device="cpu")
    assert tree(tmp_path / "made") == before


def test_another_vocabulary_is_refused_with_both_numbers(tmp_path: Path, recipe: Recipe) -> None:
    config = recipe(model__vocab_size=128)
    with pytest.raises(ConfigError, match=r"model\.vocab_size: got 128, expected .*300"):
        train(config, tmp_path / "run", device="cpu")


def test_a_device_that_is_absent_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    for name in ("cuda:99", "mps" if not torch.backends.mps.is_available() else "cuda:99"):
        with pytest.raises(ConfigError, match=r"--device cpu"):
            train(recipe(), tmp_path / "run", device=name)
    with pytest.raises(ConfigError, match=r"expected auto"):
        train(recipe(), tmp_path / "run", device="toaster")


def test_a_group_that_matches_nothing_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    config = recipe(optim__groups=[{"pattern": "covn"}])
    with pytest.raises(ConfigError, match=r"optim\.groups.*covn"):
        train(config, tmp_path / "run", device="cpu")


def test_a_warmup_longer_than_the_run_is_cut_with_a_note(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(schedule__warmup_steps=500), tmp_path / "run", device="cpu")
    assert "500 is longer than the run" in (tmp_path / "run/log.txt").read_text()
    assert max(line["lr"] for line in lines(tmp_path / "run") if "lr" in line) == 1e-2


def test_a_groups_warmup_that_is_cut_is_noted(tmp_path: Path, recipe: Recipe) -> None:
    groups = [{"pattern": "embed", "lr_factor": 0.5}, {"pattern": "gate", "warmup_steps": 50}]
    train(recipe(optim__groups=groups), tmp_path / "run", device="cpu")
    note = "optim.groups[1].warmup_steps: 50 is longer than the run of 6 steps; cut to 2\n"
    log = (tmp_path / "run/log.txt").read_text()
    assert note in log and log.count("is longer than the run") == 1


def test_training_works_outside_the_main_thread(tmp_path: Path, recipe: Recipe) -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.append(train(recipe(), tmp_path / "run", device="cpu"))
    )
    thread.start()
    thread.join()
    assert results[0].step == 6


def test_bf16_autocast_trains_with_fp32_parameters(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(train__precision="bf16", train__steps=40), tmp_path / "run", device="cpu")
    losses = [line["loss"] for line in lines(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0] - 1
    model = LanguageModel.load(tmp_path / "run")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_ctrl_c_sent_to_the_whole_group_saves_and_says_nothing_of_workers(
    tmp_path: Path, recipe: Recipe
) -> None:
    config = recipe(
        train__steps=100_000,
        train__loader_workers=2,
        checkpoint__interval=10**6,
        eval__interval=10**6,
    )
    (tmp_path / "recipe.toml").write_text(config.to_toml())
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "gla",
        "train",
        str(tmp_path / "recipe.toml"),
        "--run",
        str(run),
    ]
    process = subprocess.Popen(
        [*command, "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        said = ""
        while "step 3 " not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        os.killpg(process.pid, signal.SIGINT)
        said += process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert len(list((run / "checkpoints").glob("step-*"))) == 1


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gla train"):
        resume(tmp_path / "none", device="cpu")
    assert not (tmp_path / "none").exists()


def test_resume_of_a_finished_run_changes_no_weight_and_can_be_extended(
    tmp_path: Path, recipe: Recipe
) -> None:
    run = tmp_path / "run"
    train(recipe(), run, device="cpu")
    before = tree(run / "checkpoints")
    assert resume(run, device="cpu").step == 6
    assert tree(run / "checkpoints") == before
    assert resume(run, overrides=[("train.steps", "9")], device="cpu").step == 9
    assert [line["step"] for line in lines(run) if "loss" in line] == list(range(1, 10))


def test_resume_refuses_to_end_before_its_checkpoint(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(), tmp_path / "run", device="cpu")
    before = tree(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"train\.steps: got 5, expected at least 6, .*step-0+6;"):
        resume(tmp_path / "run", overrides=[("train.steps", "5")], device="cpu")
    assert tree(tmp_path / "run") == before


def test_resume_refuses_another_architecture_and_names_the_field(
    tmp_path: Path, recipe: Recipe
) -> None:
    train(recipe(), tmp_path / "run", device="cpu")
    before = tree(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"model\.d_model: got 48, expected 32"):
        resume(tmp_path / "run", overrides=[("model.d_model", "48")], device="cpu")
    with pytest.raises(
        CheckpointError, match=r"architecture; model\.mixers\.mine\.rotary: got True, exp[^;]*; fix"
    ):
        resume(tmp_path / "run", overrides=[("model.mixers.mine.rotary", "true")], device="cpu")
    assert tree(tmp_path / "run") == before


def test_resume_may_compute_the_model_in_another_form(tmp_path: Path, recipe: Recipe) -> None:
    mixers = {"mine": {"kind": "linear_attention", "impl": "torch", "chunk_size": 16}}
    train(recipe(model__mixers=mixers, train__steps=2), tmp_path / "run", device="cpu")
    overrides = [("model.mixers.mine.impl", "auto"), ("model.mixers.mine.chunk_size", "32")]
    assert (
        resume(tmp_path / "run", overrides=[*overrides, ("train.steps", "3")], device="cpu").step
        == 3
    )
    assert LanguageModel.load(tmp_path / "run").config.mixers["mine"].model_dump()["impl"] == "auto"


def test_resume_refuses_other_data(tmp_path: Path, recipe: Recipe, data: Path) -> None:
    train(recipe(), tmp_path / "run", device="cpu")
    from gla.data.prepare import prepare

    other = tmp_path / "other"
    prepare(data.parent / "texts", data / "tokenizer", other, val_fraction=0.3)
    changed = [("data.path", str(other)), ("train.steps", "8")]
    with pytest.raises(CheckpointError, match=r"data\.path.*fingerprint.*--allow-data-change"):
        resume(tmp_path / "run", overrides=changed, device="cpu")
    allow = loop.Allow(data=True)
    assert resume(tmp_path / "run", overrides=changed, device="cpu", allow=allow).step == 8


def test_resume_refuses_another_tokenizer(tmp_path: Path, recipe: Recipe, data: Path) -> None:
    train(recipe(), tmp_path / "run", device="cpu")
    from gla.data.prepare import prepare
    from gla.data.tokenizer import Tokenizer

    sources = sorted(map(str, (data.parent / "texts").iterdir()))[:30]
    Tokenizer.train(sources, 300, tmp_path / "tok")
    prepare(data.parent / "texts", tmp_path / "tok", tmp_path / "other", val_fraction=0.1)
    changed = [("data.path", str(tmp_path / "other")), ("train.steps", "7")]
    with pytest.raises(CheckpointError, match="--allow-data-change"):
        resume(tmp_path / "run", overrides=changed, device="cpu")
    with pytest.raises(CheckpointError, match=r"\(tokenizer\).*--allow-tokenizer-change"):
        resume(tmp_path / "run", overrides=changed, device="cpu", allow=loop.Allow(data=True))
    allow = loop.Allow(data=True, tokenizer=True)
    assert resume(tmp_path / "run", overrides=changed, device="cpu", allow=allow).step == 7


def test_data_made_otherwise_than_the_recipe_says_is_refused_or_said(
    tmp_path: Path, recipe: Recipe, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"data\.vocab_size: got 512, expected 300"):
        train(recipe(data__vocab_size=512), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    train(recipe(data__sources=["elsewhere"], train__steps=1), tmp_path / "run", device="cpu")
    said = capsys.readouterr().err
    assert "is prepared already, from sources = " in said and "are not used" in said
    train(recipe(train__steps=1), tmp_path / "again", device="cpu")
    assert "prepared already" not in capsys.readouterr().err


def test_weights_that_are_not_finite_do_not_resume(tmp_path: Path, recipe: Recipe) -> None:
    run = tmp_path / "run"
    train(recipe(), run, device="cpu")
    folder = run / "checkpoints/step-00000006"
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] = math.inf
    save_file(tensors, folder / "model.safetensors")
    storage.write_manifest(folder)
    with pytest.raises(NumericsError, match=r"norm\.weight.*--allow-nonfinite"):
        resume(run, device="cpu")
    assert resume(run, device="cpu", allow=loop.Allow(nonfinite=True)).step == 6


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resume_falls_back_past_a_damaged_checkpoint_and_says_so(
    tmp_path: Path, recipe: Recipe, kind: str
) -> None:
    run = tmp_path / "run"
    train(recipe(optim__kind=kind), run, device="cpu")
    good = tree(run / "checkpoints/step-00000006")
    file = run / "checkpoints/step-00000006/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    resume(run, device="cpu")
    log = (run / "log.txt").read_text()
    assert "skipped a damaged checkpoint" in log
    assert "step-00000004" in log
    again = tree(run / "checkpoints/step-00000006")
    assert again["model.safetensors"] == good["model.safetensors"]
    assert again["optimizer.safetensors"] == good["optimizer.safetensors"]
    assert (run / "checkpoints/damaged-step-00000006").is_dir()


def test_resume_with_no_valid_checkpoint_lists_why(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(), tmp_path / "run", device="cpu")
    for folder in (tmp_path / "run/checkpoints").iterdir():
        (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        resume(tmp_path / "run", device="cpu")
    for name in ("step-00000004", "step-00000006"):
        assert name in str(error.value)
    assert "\n" not in str(error.value) and "; fix by restoring" in str(error.value)


def test_a_second_writer_is_refused_with_the_process_id(tmp_path: Path, recipe: Recipe) -> None:
    train(recipe(), tmp_path / "run", device="cpu")
    with (
        loop.run_folder.locked(tmp_path / "run"),
        pytest.raises(CheckpointError, match=rf"process {os.getpid()} "),
    ):
        resume(tmp_path / "run", device="cpu")
