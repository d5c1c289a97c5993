"""Learning a synthetic task: what ``gla.train``'s loop asks of an objective, over examples.

A batch depends on the task, the seed and the step alone, so all variants read the same examples in
the same order, and a resumed run goes on where it stopped. Sizes: B rows, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gla.compare.compressor import Compressor
from gla.compare.tasks import Examples, Task
from gla.compare.tasks.mad import Compress
from gla.data.loader import permuted
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig
from gla.train.device import autocast, evaluating
from gla.train.flops import BACKWARD, flops_per_token, peak_flops

_TRAINING, _TESTING = 1, 2  # which random numbers
_TOKENS = 1 << 15  # read at once in evaluation


class Solved(Exception):
    """The accuracy at which training ends was reached: no error."""


class ExampleBatch(NamedTuple):
    """Rows of a task.

    Attributes:
        tokens: int64 [B, T].
        targets: int64 [B, T], -100 where nothing is asked.
    """

    tokens: Tensor
    targets: Tensor


def build_model(config: ModelConfig, task: Task) -> LanguageModel:
    """Return the model that learns a task."""
    if isinstance(task, Compress):
        return Compressor(config, task.length)
    return LanguageModel(config)


class Source:
    """Batches of a task by step: fresh ones, or those of a fixed set in an order for each epoch.

    Args:
        task: What is drawn. Where it mixes parts, a batch is of one of them.
        size: Examples of a batch.
        seed: Decides examples and orders.
    """

    def __init__(self, task: Task, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.parts = task.parts()
        self.fixed: list[Examples] = []
        if task.train_examples is not None or len(self.parts) > 1:
            self.fixed = [
                part.make(np.random.default_rng([seed, _TRAINING, i]), max(count, size), True)
                for i, (part, count) in enumerate(self.parts)
            ]
        # The batches of an epoch: (part, number within it).
        self.places = [
            (i, n) for i, set_ in enumerate(self.fixed) for n in range(len(set_.tokens) // size)
        ]

    def batch(self, step: int) -> Examples:
        """Return the batch of a step: tokens and targets [size, T]."""
        if not self.fixed:
            rng = np.random.default_rng([self.seed, _TRAINING, 0, step])
            return self.parts[0][0].make(rng, self.size, True)
        epoch, index = divmod(step, len(self.places))
        part, number = self.places[permuted(index, len(self.places), self.seed, epoch)]
        examples = self.fixed[part]
        order = np.random.default_rng([self.seed, epoch, part]).permutation(len(examples.tokens))
        rows = order[number * self.size : (number + 1) * self.size]
        return Examples(examples.tokens[rows], examples.targets[rows])


class TaskLearning:
    """See ``gla.train.objective.Objective``.

    Args:
        config: The recipe; ``train.global_batch_size`` examples make an update.
        task: What is learned.
        device: Where the model goes.
        precision: Resolved.
    """

    def __init__(self, config: RunConfig, task: Task, device: torch.device, precision: str) -> None:
        self.config, self.task, self.device, self.precision = config, task, device, precision
        self.rows = config.train.rows
        self.model = build_model(config.model, task).to(device)
        self.source = Source(task, config.train.global_batch_size, config.train.seed)
        text = task.model_dump_json()
        self.fingerprints = {"task": hashlib.sha256(text.encode()).hexdigest()}
        forward = sum(flops_per_token(self.model, config.train.seq_len).values())
        self._flops, self._peak = forward * (1 + BACKWARD), peak_flops(device, precision)

    def describe(self) -> str:
        """See ``Objective``."""
        train = self.config.train
        return (
            f"{self.model.num_parameters():,} parameters on {self.device}, {self.precision}; "
            f"{self.task.kind}: {train.global_batch_size} examples a step, {train.steps:,} steps"
        )

    def batches(self, step: int) -> list[ExampleBatch]:
        """See ``Objective``."""
        tokens, targets = map(torch.from_numpy, self.source.batch(step))
        pairs = zip(tokens.split(self.rows), targets.split(self.rows), strict=True)
        return [ExampleBatch(*pair) for pair in pairs]

    def count(self, batch: ExampleBatch) -> tuple[int, int, int]:
        """See ``Objective``: targets, tokens, and no bytes."""
        return int((batch.targets >= 0).sum()), batch.tokens.numel(), 0

    def loss(self, batch: ExampleBatch, index: int) -> Tensor:
        """See ``Objective``."""
        tokens, targets = (x.to(self.device) for x in batch)
        asked = targets >= 0
        with autocast(self.device, self.precision):
            logits = self._answers(tokens, asked)
        return F.cross_entropy(logits.float(), targets[asked], reduction="sum")

    def _answers(self, tokens: Tensor, asked: Tensor) -> Tensor:
        """Logits [places, V] at the places that are asked, which are few."""
        if isinstance(self.model, Compressor):
            return self.model(tokens).logits[asked]
        return self.model.logits(self.model.features(tokens)[asked])

    def settle(self, taken: bool) -> None:
        """See ``Objective``: nothing is carried."""

    def rehearsal(self, step: int, rows: int) -> Tensor:
        """See ``Objective``."""
        batch = ExampleBatch(*(torch.from_numpy(x[:rows]) for x in self.source.batch(step)))
        return self.loss(batch, 0) / max(self.count(batch)[0], 1)

    def utilization(self, tokens_per_s: float) -> dict[str, float]:
        """See ``Objective``."""
        rate = tokens_per_s * self._flops
        return {"tflops": rate / 1e12} | ({"mfu": rate / self._peak} if self._peak else {})

    def evaluate(self, whole: bool) -> dict[str, float | int]:
        """See ``Objective``: on examples like those of training, that are not among them.

        Raises:
            Solved: The accuracy at which training ends is reached before its last step.
        """
        figures = self.measure([part for part, _ in self.source.parts])
        stop = self.task.stop_at
        if stop is not None and not whole and figures["accuracy"] >= stop:
            raise Solved
        return figures

    def cases(self) -> list[dict[str, Any]]:
        """Return the tests that follow training: {"axes": {name: value}, "metrics": {…}}."""
        return [
            {"axes": dict(axes), "metrics": self.measure([task])}
            for axes, task in self.task.cases()
        ]

    def measure(self, tasks: Sequence[Task]) -> dict[str, float | int]:
        """Return ``loss`` (nats), ``accuracy`` of the targets, ``exact``: examples without fault.

        Teacher forced: a target is predicted from the right tokens before it. An example without
        fault is one that a greedy decoder would write.
        """
        loss, targets, right, rows, exact = 0.0, 0, 0, 0, 0
        with evaluating(self.model), autocast(self.device, self.precision):
            for i, task in enumerate(tasks):
                rng = np.random.default_rng([self.config.train.seed, _TESTING, i])
                made = task.make(rng, max(1, task.test_examples // len(tasks)), False)
                at_once = max(1, _TOKENS // made.tokens.shape[1])
                for start in range(0, len(made.tokens), at_once):
                    part = slice(start, start + at_once)
                    tokens, wanted = (torch.from_numpy(x[part]).to(self.device) for x in made)
                    asked = wanted >= 0
                    logits = self._answers(tokens, asked).float()
                    loss += float(F.cross_entropy(logits, wanted[asked], reduction="sum"))
                    wrong = torch.zeros_like(asked)
                    wrong[asked] = logits.argmax(-1) != wanted[asked]
                    targets, rows = targets + int(asked.sum()), rows + len(tokens)
                    right += int(asked.sum() - wrong.sum())
                    exact += int((~wrong.any(1)).sum())
        return {"loss": loss / targets, "accuracy": right / targets, "exact": exact / rows}

    def watch(self) -> tuple[dict[str, Tensor], str | None]:
        """See ``Objective``: nothing beside the figures."""
        return {}, None

    def tensors(self) -> dict[str, Tensor]:
        """See ``Objective``: nothing is carried."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``Objective``: nothing is carried."""

    def close(self) -> None:
        """See ``Objective``: nothing runs beside."""
