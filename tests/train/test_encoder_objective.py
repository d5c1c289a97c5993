"""Encoders in training: masked tokens and classes, exact resume, figures, what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gla.cli.eval import describe, evaluate, measure
from gla.data.chunks import ChunkLoader
from gla.data.loader import IGNORE, TokenDataset
from gla.data.prepare import prepare
from gla.data.tokenizer import Tokenizer
from gla.errors import CheckpointError, ConfigError
from gla.models.encoder import Encoder
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig, build
from gla.train.encoder_objective import Classes, MaskedTokens, loader_of
from gla.train.evaluate_encoder import macro_f1
from gla.train.inputs import open_inputs
from gla.train.loop import resume, train
from gla.train.plan import plan
from gla.train.trainer import Trainer

COLORS = {
    "red": "apple cherry brick rose ruby",
    "green": "leaf grass moss frog jade",
    "blue": "sky sea whale ink berry",
}
COMMON = "the a of and is with over under near then".split()
LINFORMER = {"kind": "linformer", "num_heads": 2, "k": 4, "n_max": 64}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of three folders, whose words tell them apart."""
    root, rng = tmp_path_factory.mktemp("colors"), random.Random(0)
    for color, words in COLORS.items():
        for i in range(14):
            path = root / "texts" / color / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            words_and_more = words.split() + COMMON
            lines = [" ".join(rng.choices(words_and_more, k=8)) for _ in range(rng.randint(5, 40))]
            path.write_text("\n".join(lines))
    Tokenizer.train(root / "texts", 300, root / "tokenizer")
    prepare(root / "texts", root / "tokenizer", root / "data", val_fraction=0.3)
    return root / "data"


@pytest.fixture
def encoder_recipe(folder: Path) -> Callable[..., RunConfig]:
    def make(kind: str = "classify", **changes: Any) -> RunConfig:
        tables: dict[str, dict[str, Any]] = {
            "objective": {"kind": kind} | ({"min_documents": 3} if kind == "classify" else {}),
            "model": {"d_model": 32, "layers": ["mine*2"], "mixers": {"mine": LINFORMER}},
            "data": {"path": str(folder)},
            "train": {"steps": 6, "seq_len": 64, "global_batch_size": 8, "precision": "fp32"},
            "optim": {"lr": 1e-2},
            "schedule": {"kind": "constant", "warmup_steps": 2},
            "checkpoint": {"interval": 4},
            "eval": {"interval": 3, "batches": 2},
            "metrics": {"interval": 1},
        }
        for key, value in changes.items():
            section, name = key.split("__")
            tables.setdefault(section, {})[name] = value
        return build(tables)

    return make


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def lines(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    clocks = ("tokens_per_s", "tokens_per_s_overall", "data_wait", "memory_gib")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


@pytest.mark.parametrize("kind", ["classify", "masked"])
def test_a_resumed_run_is_the_unbroken_one(encoder_recipe, tmp_path, kind):
    train(encoder_recipe(kind, train__steps=7), tmp_path / "whole")
    train(encoder_recipe(kind, train__steps=4), tmp_path / "split")
    result = resume(tmp_path / "split", overrides=[("train.steps", "7")])
    whole, split = (weights(tmp_path / name, 7) for name in ("whole", "split"))
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[name], split[name]) for name in whole)
    wanted = [x for x in lines(tmp_path / "whole") if "val_loss" not in x]
    assert wanted == [x for x in lines(tmp_path / "split") if "val_loss" not in x]
    assert "bpb" not in wanted[0] and "nonfinite" not in wanted[0]
    assert wanted[-1]["tokens"] > 7 * 8 * 16
    assert result.step == 7


def test_classes_are_learned_found_and_written_into_the_recipe(encoder_recipe, tmp_path):
    result = train(encoder_recipe(train__steps=40), tmp_path / "run")
    model = Encoder.load(tmp_path / "run")
    assert model.config.classes == ["blue", "green", "red"]
    figures = measure(tmp_path / "run")
    assert figures.pop("split_tokens") >= figures["tokens"]
    assert figures == result.validation
    assert figures["accuracy"] > 0.9 and figures["macro_f1"] > 0.9
    assert figures["majority"] < 0.7
    last = lines(tmp_path / "run")[-1]
    assert last["val_accuracy"] == figures["accuracy"]
    assert last["val_macro_f1"] == figures["macro_f1"]
    text = "\n".join(describe(figures))
    assert f"accuracy    {figures['accuracy']:.2%}" in text and "macro-F1" in text


def test_documents_of_no_class_are_told_of(encoder_recipe, tmp_path, folder, capsys):
    config = encoder_recipe(train__steps=1, objective__exclude=["blue"])
    read = TokenDataset.open(folder / "train")
    sizes = zip(read.document_names, np.diff(read.document_starts), strict=True)
    chunks = sum(-(-n // config.train.seq_len) for name, n in sizes if "blue" not in name)
    assert plan(config, "cpu")["epochs"] == config.train.global_batch_size / chunks
    train(config, tmp_path / "run")
    capsys.readouterr()
    assert evaluate(tmp_path / "run") == 0
    whole = json.loads((folder / "val" / "index.json").read_text())["num_tokens"]
    said = f"of {whole:,} in the split: only documents of a class are read\n"
    assert capsys.readouterr().out.endswith(said)


def test_a_run_keeps_its_objective(encoder_recipe, tmp_path):
    train(encoder_recipe(train__steps=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"^objective\.kind: got 'masked', .*'classify'"):
        other = {"kind": "masked", "min_documents": "10"}  # what else a recipe of that kind needs
        resume(tmp_path / "run", overrides=[(f"objective.{k}", v) for k, v in other.items()])


def test_masked_tokens_are_learned(encoder_recipe, tmp_path):
    result = train(encoder_recipe("masked", train__steps=60), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--references: got .*run, an encoder"):
        evaluate(tmp_path / "run", references=True)
    first = next(x for x in lines(tmp_path / "run"))
    assert abs(first["loss"] - 5.70) < 0.17  # ln 300
    figures = measure(tmp_path / "run")
    assert figures.pop("split_tokens") >= figures["tokens"]
    assert figures == result.validation
    assert figures["loss"] < 4.3 and figures["accuracy"] > 0.05
    assert "nats per token asked for" in describe(figures)[0]


@pytest.fixture
def parts(encoder_recipe, folder) -> Callable[..., Any]:
    def make(kind: str, **changes: Any) -> Any:
        config = encoder_recipe(kind, **changes)
        inputs = open_inputs(config.data)
        update: dict[str, Any] = {"vocab_size": inputs.tokenizer.vocab_size}
        if kind == "classify":
            update["classes"] = ["blue", "green", "red"]
        config = config.model_copy(update={"model": config.model.model_copy(update=update)})
        torch.manual_seed(0)
        objective = {"classify": Classes, "masked": MaskedTokens}[kind]
        return objective(config, inputs, CPU, "fp32")

    return make


@pytest.mark.parametrize("kind", ["classify", "masked"])
def test_a_gradient_does_not_depend_on_how_the_batch_is_cut(parts, kind):
    gradients = []
    for rows in (8, 2):
        objective = parts(kind, train__micro_batch_size=rows)
        trainer = Trainer(objective.config, objective, CPU, "fp32")
        trainer.model.double()
        loss, targets, tokens, size, _ = trainer.backward(objective.batches(3))
        assert (size, targets < tokens) == (0, True)
        gradients.append([loss, *(p.grad for p in trainer.model.parameters() if p.requires_grad)])
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-12)
    for a, b in zip(gradients[0][1:], gradients[1][1:], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_figures_by_hand(parts):
    for kind in ("classify", "masked"):
        objective = parts(kind, eval__batches=0)
        figures = objective.evaluate(whole=True)
        config, inputs = objective.config, objective.inputs
        loader = loader_of(config, inputs.val, inputs.tokenizer, 64, seed=0)
        losses, hits = [], []
        for i in range(loader.num_samples):
            batch: Any = loader.batch(i, 1)
            model = objective.model
            if isinstance(loader, ChunkLoader):
                logits, wanted = model.class_logits(batch.tokens), batch.labels
            else:
                h = model(batch.tokens, cu_seqlens=batch.cu_seqlens)
                asked = batch.targets != IGNORE
                logits, wanted = h[asked] @ model.embed.weight.T, batch.targets[asked]
            p = logits.log_softmax(-1)
            losses += [-float(row[c].detach()) for row, c in zip(p, wanted, strict=True)]
            hits += (logits.argmax(-1) == wanted).tolist()
        assert figures["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert figures["accuracy"] == pytest.approx(sum(hits) / len(hits))
        assert figures["chunks" if kind == "classify" else "targets"] == len(losses)


def test_macro_f1_by_hand():
    # class 0: tp 3, fp 1, fn 1; class 1: tp 1, fp 1, fn 2; class 2 never; class 3: tp 0, fn 0, fp 1
    confusion = torch.tensor([[3, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert macro_f1(confusion) == pytest.approx((6 / 8 + 2 / 5 + 0) / 3)


def test_pretrained_weights_are_taken(encoder_recipe, tmp_path):
    train(encoder_recipe("masked", train__steps=5), tmp_path / "mlm")
    config = encoder_recipe(
        objective__pretrained=str(tmp_path / "mlm"), train__steps=1, optim__lr=1e-9
    )
    train(config, tmp_path / "run")
    before, after = weights(tmp_path / "mlm", 5), weights(tmp_path / "run", 1)
    assert after.keys() - before.keys() == {"class_head.weight", "class_head.bias"}
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-7)
    other = encoder_recipe(objective__pretrained=str(tmp_path / "mlm"), model__d_model=64)
    with pytest.raises(ConfigError, match=r"pretrained: got a run with layers mine\*2 of"):
        train(other, tmp_path / "other")
    assert not (tmp_path / "other" / "config.toml").exists()


def test_a_run_killed_before_its_first_checkpoint_takes_pretrained_weights_again(
    encoder_recipe, tmp_path
):
    train(encoder_recipe("masked", train__steps=5), tmp_path / "mlm")
    config = encoder_recipe(
        objective__pretrained=str(tmp_path / "mlm"), train__steps=2, train__ema_decay=0.9
    )
    train(config, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    files = [step / "model.safetensors", step / "average.safetensors"]
    before = [file.read_bytes() for file in files]
    shutil.rmtree(step.parent)
    resume(tmp_path / "run")
    assert [file.read_bytes() for file in files] == before


def test_the_share_of_masked_tokens_is_kept_for_good(encoder_recipe, tmp_path):
    train(encoder_recipe("masked", train__steps=1), tmp_path / "run")
    changed = [("objective.mask_fraction", "0.4"), ("train.steps", "2")]
    with pytest.raises(CheckpointError, match=r"objective\.mask_fraction: got 0\.4, expected 0\."):
        resume(tmp_path / "run", overrides=changed)


def test_a_model_of_the_other_kind_is_refused(encoder_recipe, folder, tmp_path):
    train(encoder_recipe("masked", train__steps=1), tmp_path / "run")
    message = r"got objective\.kind = 'masked', expected the run of a language model; .*gla.Encoder"
    with pytest.raises(ConfigError, match=message):
        LanguageModel.load(tmp_path / "run")
    tables: dict[str, Any] = {
        "model": {"d_model": 16, "layers": ["gla"]},
        "data": {"path": str(folder)},
        "train": {"steps": 1, "seq_len": 32},
    }
    train(build(tables), tmp_path / "lm", device="cpu")
    with pytest.raises(ConfigError, match=r"got objective\.kind = 'next_token', expected the"):
        Encoder.load(tmp_path / "lm")


def test_a_group_of_its_own_for_the_projections(encoder_recipe, tmp_path):
    group = {"pattern": r"\.mixer\.[EF]$", "lr_factor": 0.0, "weight_decay": 0.0}
    train(encoder_recipe(optim__groups=[group], train__steps=4), tmp_path / "run")
    torch.manual_seed(0)
    start = Encoder(Encoder.load(tmp_path / "run").config).state_dict()
    after = weights(tmp_path / "run", 4)
    for name, weight in after.items():
        still = name.split(".")[-1] in ("E", "F")
        assert torch.equal(weight, start[name]) == still, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "next_token", "objective__mask_fraction": 0.3}, "objective.mask_fraction: got"),
        ({"kind": "masked", "objective__min_documents": 3}, "objective.min_documents: got 3 with"),
        ({"kind": "next_token", "objective__pretrained": "x"}, "objective.pretrained: got 'x'"),
        ({"kind": "masked", "model__layer": ["a"]}, "model.layer: got an unknown key"),
        ({"kind": "next_token", "model__classes": ["a"]}, "model.classes: got an unknown key"),
        ({"kind": "sort"}, "objective.kind: got 'sort'"),
    ],
)
def test_wrong_recipes_say_what_is_wrong(encoder_recipe, changes, message):
    with pytest.raises(ConfigError, match=message):
        encoder_recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__carry_state": True}, "train.carry_state: got true for an encoder"),
        ({"train__isolate_documents": False}, "train.isolate_documents: got false for an enc"),
        ({"model__layers": ["gla"]}, r"^model\.mixers\.gla\.gate: got 'channel' with causal = fal"),
        (
            {"model__layers": ["linformer_causal"]},
            r"^model\.mixers\.linformer_causal: got a causal mixer",
        ),
        (
            {"train__seq_len": 65},
            r"^train\.seq_len: got 65, expected at most n_max = 64 of model\.mixers\.mine; fix",
        ),
        (
            {"eval__seq_len": 80},
            r"^eval\.seq_len: got 80, expected at most n_max = 64 of model\.mixers\.mine; fix",
        ),
        (
            {"model__layers": ["linformer"], "eval__seq_len": 513},
            r"^eval\.seq_len: got 513, expected at most n_max = 512 of model\.mixers\.linformer; ",
        ),
    ],
)
def test_what_an_encoder_cannot_is_refused(encoder_recipe, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(encoder_recipe("masked", **changes), tmp_path / "run")
    if not {"train__carry_state", "train__isolate_documents"} & changes.keys():
        with pytest.raises(ConfigError, match=message):
            plan(encoder_recipe("masked", **changes), "cpu")
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize("kind", ["classify", "masked"])
def test_a_dry_run_knows_encoders(encoder_recipe, kind):
    figures = plan(encoder_recipe(kind), "cpu")
    assert figures["parameters"] > 10_000 and figures["activation_bytes"] > 0
    assert figures["decode_state_bytes"] == 0


def test_a_projection_by_input_has_no_longest_row(encoder_recipe):
    mixers = {"mine": {"kind": "linformer", "k": 4, "projection": "input", "sharing": "none"}}
    config = encoder_recipe("masked", model__mixers=mixers, train__seq_len=600, eval__seq_len=700)
    assert plan(config, "cpu")["parameters"] > 0
