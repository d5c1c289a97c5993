"""Cells in this process: batches by step, text at several lengths, encoders, early ends."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gla.compare.cell import read_result, run_cell, write_spec
from gla.compare.compressor import Compressor
from gla.compare.examples import Source, TaskLearning
from gla.compare.plan import known_cells, plan
from gla.compare.run import report_only
from gla.compare.suite import Suite, load_suite
from gla.compare.tasks import build_task
from gla.compare.text import TextOptions, by_length, measure, read_row
from gla.data.prepare import prepare
from gla.errors import ConfigError, DataError
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.train.config import DataConfig, build
from gla.train.inputs import open_inputs

MQAR = {"kind": "mqar", "vocab_size": 32, "length": 32, "pairs": 4}


def run(suite: Suite, folder: Path) -> dict:
    cell = known_cells(plan(suite), {})[0]
    write_spec(folder, cell.facts())
    return run_cell(folder, "cpu")


def test_batches_depend_on_seed_and_step_alone() -> None:
    for table in (MQAR, {**MQAR, "train_examples": 50}):
        first, again = (Source(build_task(table), 8, seed=3) for _ in range(2))
        later = again.batch(17)
        assert (first.batch(17).tokens == later.tokens).all()
        assert (first.batch(17).targets == later.targets).all()
        other = Source(build_task(table), 8, seed=4)
        assert (other.batch(17).tokens != later.tokens).any()
        assert (first.batch(0).tokens != first.batch(1).tokens).any()


def test_an_epoch_reads_every_example_once_and_the_next_in_another_order() -> None:
    source = Source(build_task({**MQAR, "train_examples": 48}), 8, seed=0)
    epochs = [[source.batch(6 * e + i).tokens for i in range(6)] for e in (0, 1)]
    sets = [sorted(map(tuple, np.concatenate(batches).tolist())) for batches in epochs]
    assert sets[0] == sets[1] == sorted(map(tuple, source.fixed[0].tokens.tolist()))
    assert any((a != b).any() for a, b in zip(*epochs, strict=True))


def test_a_mixture_reads_each_part_by_its_examples() -> None:
    table = {**MQAR, "mixture": [[32, 4, 40], [64, 8, 16]]}
    source = Source(build_task(table), 8, seed=0)
    lengths = [source.batch(step).tokens.shape[1] for step in range(7)]
    assert sorted(lengths) == [32] * 5 + [64] * 2


def test_rows_of_text_stop_at_documents(prepared: Path) -> None:
    val = open_inputs(DataConfig(path=str(prepared))).val
    starts = np.asarray(val.document_starts)
    every, ends = val.tokens().astype(np.int64), set(starts[1:] - 1)
    for first, length in ((0, 700), (333, 64), (val.num_tokens - 50, 50)):
        ids, following = read_row(val, starts, first, length)
        assert (ids == every[first : first + length]).all()
        wanted = [
            -100 if place in ends else every[place + 1] for place in range(first, first + length)
        ]
        assert following.tolist() == wanted


def test_text_by_length_against_whole_forward_passes(prepared: Path) -> None:
    inputs = open_inputs(DataConfig(path=str(prepared)))
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, vocab_size=300, layers=["gla", "softmax"])
    model = LanguageModel(config)
    starts = np.asarray(inputs.val.document_starts)
    options = TextOptions(lengths=[1, 4], test_tokens=600)
    cases, positions = by_length(model, inputs, 64, options, "fp32")
    assert [c["axes"] for c in cases] == [{"length": 64}, {"length": 256}]
    expected = {}
    for length in (64, 256):  # both read the first 512 tokens
        nats, size = [], 0
        for first in range(0, 512, length):
            ids, following = read_row(inputs.val, starts, first, length)
            with torch.no_grad():
                logits = model(torch.from_numpy(ids)[None]).logits[0]
            targets = torch.from_numpy(following)
            nats.append(F.cross_entropy(logits, targets, ignore_index=-100, reduction="none"))
            size += int(inputs.tokenizer.piece_bytes[following[following >= 0]].sum())
        expected[length] = torch.stack(nats)
        (case,) = (c for c in cases if c["axes"]["length"] == length)
        bits = float(expected[length].sum()) / math.log(2)
        assert case["metrics"]["bpb"] == pytest.approx(bits / size, rel=1e-5)
    assert [c["axes"]["position"] for c in positions] == [16, 32, 64, 128, 256]
    asked = ~np.isnan(measure(model, inputs, 256, 2, "fp32")[0][:, 128:])
    mean = float(expected[256][:, 128:].sum()) / int(asked.sum())
    assert positions[-1]["metrics"]["loss"] == pytest.approx(mean, rel=1e-5)


PLAIN = 'kind = "text"\nlengths = [1, 2]'


def text_suite(file: Path, data: Path, options: str = PLAIN) -> Suite:
    file.write_text(
        f"""
title = "Text"
baseline = "a"
seeds = 1
model = {{ d_model = 32, depth = 1 }}
train = {{ steps = 4, seq_len = 64, global_batch_size = 2, precision = "fp32" }}
variants.a.layers = ["gla"]
[tasks.text]
{options}
data.path = "{data}"
"""
    )
    return load_suite(file)


def test_a_cell_of_text(prepared: Path, tmp_path: Path) -> None:
    result = run(text_suite(tmp_path / "s.toml", prepared), tmp_path / "cell")
    assert result["status"] == "done" and result["steps"] == 4
    assert 1 < result["metrics"]["bpb"] < 12
    assert [c["axes"]["length"] for c in result["cases"]] == [64, 128]
    digest = json.loads((tmp_path / "cell" / "cell.json").read_text())["digest"]
    assert read_result(tmp_path / "cell", digest) == result
    with pytest.raises(DataError, match="that of another cell"):
        read_result(tmp_path / "cell", "0" * 64)
    assert read_result(tmp_path / "nowhere", digest) is None


def test_text_that_is_too_short_for_a_row_is_said_before_training(
    prepared: Path, tmp_path: Path
) -> None:
    few = PLAIN + "\ntest_tokens = 127"
    with pytest.raises(ConfigError, match="rows of 128 tokens, with 127 tokens of test_tokens"):
        plan(text_suite(tmp_path / "s.toml", prepared, few))
    long = 'kind = "text"\nlengths = [1000]'
    suite = text_suite(tmp_path / "s.toml", prepared, long)
    with pytest.raises(ConfigError, match=r"64,000 tokens, with [\d,]+ tokens of validation text"):
        run(suite, tmp_path / "cell")
    assert not (tmp_path / "cell" / "metrics.jsonl").exists()


def test_a_cell_of_an_encoder(prepared: Path, tmp_path: Path) -> None:
    masked = 'kind = "encoder"\nobjective = { kind = "masked" }'
    suite = text_suite(tmp_path / "s.toml", prepared, masked)
    suite = suite.model_copy(
        update={"variants": {"a": suite.variants["a"].model_copy(update={"layers": ["linear"]})}}
    )
    result = run(suite, tmp_path / "cell")
    assert 0 <= result["metrics"]["accuracy"] <= 1 and "cases" not in result
    assert result["state_bytes"] is None
    with pytest.raises(ConfigError, match="kind: got 'encoder' with objective"):
        plan(text_suite(tmp_path / "s.toml", prepared, 'kind = "encoder"'))
    with pytest.raises(ConfigError, match="lengths: got an option, expected none"):
        plan(text_suite(tmp_path / "s.toml", prepared, masked + "\nlengths = [1]"))


def tiny(suite_file: Path, *overrides: tuple[str, str]) -> Suite:
    return load_suite(suite_file, None, [("seeds", "1"), *overrides])


def test_training_ends_at_an_accuracy(suite_file: Path, tmp_path: Path) -> None:
    suite = tiny(suite_file, ("tasks.recall.stop_at", "1e-9"), ("train.steps", "40"))
    result = run(suite, tmp_path / "cell")
    assert result["status"] == "solved" and 4 <= result["steps"] < 40
    assert result["metrics"]["accuracy"] > 0 and len(result["cases"]) == 2
    assert (tmp_path / "cell" / "result.json").exists()


def test_figures_are_of_the_average_where_one_is_kept(suite_file: Path, tmp_path: Path) -> None:
    common = [
        *(("train.ema_decay", "0.99"), ("optim.lr", "0.1")),
        *(("schedule.kind", "constant"), ("schedule.warmup_steps", "0")),
    ]
    stops = [("tasks.recall.stop_at", "1e-9"), ("train.steps", "40")]
    solved = run(tiny(suite_file, *common, *stops), tmp_path / "solved")
    assert solved["status"] == "solved"
    done = run(tiny(suite_file, *common, ("train.steps", str(solved["steps"]))), tmp_path / "done")
    assert solved["metrics"] == done["metrics"]
    # The first test is on the examples of the evaluation.
    assert done["cases"][0]["axes"] == {"length": 32, "pairs": 4}
    assert solved["cases"][0]["metrics"] == done["cases"][0]["metrics"] == done["metrics"]


def test_a_kill_before_the_first_checkpoint_forgets_no_pretraining(
    suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretrained(model: LanguageModel, _: object) -> None:
        model.embed.weight.data.fill_(0.5)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gla.compare.cell.start_from_pretrained", pretrained)
    suite = tiny(suite_file, ("train.ema_decay", "0.9"))
    whole = run(suite, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("gla.train.trainer.Trainer.fit", killed)
        run(suite, tmp_path / "cut")
    assert (tmp_path / "cut" / "config.toml").exists()
    assert run(suite, tmp_path / "cut")["metrics"] == whole["metrics"]


def test_results_on_data_that_changed_are_refused(prepared: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(prepared, data)
    suite = text_suite(tmp_path / "s.toml", data, PLAIN + "\ndata.vocab_size = 300")
    (cell,) = known_cells(plan(suite), {})
    run(suite, out / cell.folder)
    assert report_only(suite, out)["complete"]
    shutil.rmtree(data)
    assert report_only(suite, out)["complete"]  # nothing to compare with
    prepare(prepared.parent / "texts", prepared / "tokenizer", data, val_fraction=0.3)
    with pytest.raises(DataError, match=r"got a result on other data than .*data holds"):
        report_only(suite, out)


def test_a_loss_that_is_not_finite_is_a_result(suite_file: Path, tmp_path: Path) -> None:
    result = run(tiny(suite_file, ("optim.lr", "1e30")), tmp_path / "cell")
    assert result["status"] == "diverged" and result["metrics"] == {}
    assert "expected finite numbers" in result["reason"]


@pytest.mark.parametrize("kind", ["compress", "memorize", "fuzzy_recall", "passkey"])
def test_other_tasks_train(suite_file: Path, tmp_path: Path, kind: str) -> None:
    text = suite_file.read_text()
    start, end = text.index("[tasks.recall]"), text.index("[sizes.long.train]")
    options = {"passkey": "length = 96\ntest_lengths = [96]\ndepths = [0.5]"}.get(kind, "")
    task = f'[tasks.recall]\nkind = "{kind}"\ntest_examples = 8\n{options}\n'
    suite_file.write_text(text[:start] + task + text[end:])
    result = run(tiny(suite_file, ("train.steps", "2")), tmp_path / "cell")
    assert result["status"] == "done" and 0 <= result["metrics"]["accuracy"] <= 1


def test_the_compressor_reads_its_last_output_alone() -> None:
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, vocab_size=16, layers=["gla"])
    model = Compressor(config, length=12)
    tokens = torch.randint(0, 15, (3, 12))
    logits = model(tokens).logits
    assert logits.shape == (3, 12, 16)
    h = model.features(tokens)[:, -1]
    places = model.get_buffer("places")
    one = model.decoder(h + places[4])
    assert (one - logits[:, 4]).abs().max() < 1e-5
    assert torch.equal(places[:, 0], torch.arange(12).sin())


@pytest.mark.parametrize("table", [MQAR, {"kind": "compress", "vocab_size": 32}])
def test_the_loss_and_figures_of_a_task_against_all_logits(suite_file: Path, table: dict) -> None:
    recipe = known_cells(plan(load_suite(suite_file)), {})[0].recipe
    learning = TaskLearning(build(recipe), build_task(table), torch.device("cpu"), "fp32")
    (batch,) = learning.batches(0)
    logits = learning.model(batch.tokens).logits.flatten(0, 1)
    wanted = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100, reduction="sum")
    assert torch.allclose(learning.loss(batch, 0), wanted, rtol=1e-5)
    assert learning.count(batch) == (int((batch.targets >= 0).sum()), batch.tokens.numel(), 0)
    found = learning.measure([learning.task])
    made = learning.task.make(np.random.default_rng([0, 2, 0]), 1000, False)
    tokens, targets = map(torch.from_numpy, made)
    with torch.no_grad():
        logits = learning.model(tokens).logits
    right = (logits.argmax(-1) == targets) | (targets < 0)
    assert found["exact"] == pytest.approx(float(right.all(1).float().mean()))
    asked = targets >= 0
    assert found["accuracy"] == pytest.approx(float(right[asked].float().mean()))
    loss = F.cross_entropy(logits[asked], targets[asked])
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.slow
def test_gated_layers_learn_recall(suite_file: Path, tmp_path: Path) -> None:
    text = [("tasks.recall.pairs", "2"), ("tasks.recall.stop_at", "0.9")]
    suite = tiny(suite_file, *text, ("train.steps", "1500"), ("train.global_batch_size", "64"))
    assert run(suite, tmp_path / "cell")["metrics"]["accuracy"] > 0.5
