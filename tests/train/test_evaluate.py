"""The figures of an evaluation, against the definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig
from gla.train.evaluate import evaluate, summary
from gla.train.inputs import Inputs, open_inputs, with_vocab_size

Recipe = Callable[..., RunConfig]


@pytest.fixture
def parts(recipe: Recipe) -> tuple[LanguageModel, Inputs]:
    config = recipe()
    inputs = open_inputs(config.data)
    torch.manual_seed(0)
    model = LanguageModel(with_vocab_size(config, inputs.tokenizer.vocab_size).model)
    return model, inputs


def measure(parts: tuple[LanguageModel, Inputs], **options: int) -> dict[str, float | int]:
    model, inputs = parts
    return evaluate(
        model,
        inputs.val,
        inputs.tokenizer.piece_bytes,
        **{"seq_len": 64, "batch_size": 3, **options},  # type: ignore[arg-type]
    )


def test_the_whole_split_is_each_byte_once(parts: tuple[LanguageModel, Inputs]) -> None:
    val = parts[1].val
    figures = measure(parts)
    assert figures["bytes"] == val.num_bytes
    assert figures["tokens"] == val.num_tokens - val.num_documents  # all but the begin marks
    assert figures["bpb"] == pytest.approx(
        figures["loss"] * figures["tokens"] / math.log(2) / val.num_bytes
    )
    assert figures["ppl"] == pytest.approx(math.exp(figures["loss"]))


def test_rows_that_hold_documents_whole_give_the_loss_of_single_documents(
    parts: tuple[LanguageModel, Inputs],
) -> None:
    model, inputs = parts
    val = inputs.val
    longest = int((val.document_starts[1:] - val.document_starts[:-1]).max())
    total = 0.0
    with torch.no_grad():
        for start, stop in zip(val.document_starts, val.document_starts[1:], strict=False):
            ids = torch.from_numpy(val.tokens(int(start), int(stop)).astype("int64"))
            logits = model(ids[None]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    figures = measure(parts, seq_len=longest, batch_size=2)
    assert figures["loss"] == pytest.approx(total / figures["tokens"], rel=1e-5)


def test_the_size_of_a_batch_does_not_matter(parts: tuple[LanguageModel, Inputs]) -> None:
    assert measure(parts, batch_size=1) == pytest.approx(measure(parts, batch_size=7), rel=1e-5)


def test_some_batches_are_the_first_ones(parts: tuple[LanguageModel, Inputs]) -> None:
    few = measure(parts, batches=2)
    assert 0 < few["tokens"] <= 2 * 3 * 64
    assert measure(parts, batches=1, batch_size=6) == pytest.approx(few, rel=1e-5)
    assert measure(parts, batches=10_000) == measure(parts)


def test_an_evaluation_leaves_mode_and_random_numbers_alone(
    parts: tuple[LanguageModel, Inputs],
) -> None:
    model = parts[0].train()
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    measure(parts)
    assert torch.equal(torch.rand(4), expected)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_figures_without_targets_are_finite() -> None:
    assert summary(0.0, 0, 0) == {"loss": 0.0, "ppl": 1.0, "bpb": 0.0, "tokens": 0, "bytes": 0}
