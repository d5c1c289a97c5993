"""From gradients to new weights: adding up, scaling, clipping, the optimizer, the running average.

An update that is not finite is not made: weights, moments and the average stay as they were, the
step counts (the data and the learning rate move on), and neither its tokens nor its loss do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gla.train.config import RunConfig
from gla.train.distributed import Ranks
from gla.train.optim import build_optimizer, part_of, set_lr

FIRST_SCALE = 2.0**16  # of the loss in fp16, as torch.amp starts
_GROW_AFTER = 2000  # good updates in a row after which the scale doubles
_SPIKE_AFTER = 20  # updates seen before a loss can be called a spike
_SPIKE = 6.0  # standard deviations
_MEMORY = 0.98  # of the running mean and variance of the loss


class Norms(NamedTuple):
    """Norms of a gradient before it is clipped, over all processes.

    Attributes:
        total: Of all parameters.
        parts: Of each part of the model, by name.
    """

    total: float
    parts: dict[str, float]


class Spikes:
    """Flags a loss that stands far above the latest ones. Its state is three numbers."""

    def __init__(self) -> None:
        self.mean = self.variance = 0.0
        self.seen = 0

    def flags(self, loss: float) -> bool:
        """Take in a finite loss; return whether it is a spike."""
        away = loss - self.mean
        limit = _SPIKE * math.sqrt(self.variance) + 1e-3 * abs(self.mean)
        spike = self.seen >= _SPIKE_AFTER and away > limit
        if spike:
            away = limit  # a lasting change of level is taken in, a single spike hardly
        self.seen += 1
        share = max(1 - _MEMORY, 1 / self.seen)
        if self.seen > 1:
            self.variance = (1 - share) * (self.variance + share * away**2)
        self.mean += share * away
        return spike


class Updater:
    """The optimizer of a model and all that decides whether and how it moves.

    Attributes:
        optimizer: AdamW, or Muon and AdamW.
        average: The running average of the parameters by name; empty without ``ema_decay``.
        scale: What the loss is multiplied by before the backward pass; 1 but for fp16.
        skipped: Updates that were not made.
        in_a_row: Of them, the latest without a good one between.
    """

    def __init__(self, model: nn.Module, config: RunConfig, precision: str, ranks: Ranks) -> None:
        self.config, self.ranks, self.model = config, ranks, model
        self.optimizer = build_optimizer(model, config.optim)
        self.average = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if config.train.ema_decay
        }
        self._fp16 = precision == "fp16"
        self.scale = FIRST_SCALE if self._fp16 else 1.0
        self._good = 0
        self.skipped = self.in_a_row = 0
        self.spikes = Spikes()

    def backward(self, mean: Tensor) -> None:
        """Add the gradient of a part of the mean loss."""
        (mean * self.scale if self._fp16 else mean).backward()

    def norms(self) -> Norms:
        """Add up the gradients of all processes, and measure them."""
        named = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        gradients = [gradient for _, gradient in named]
        self.ranks.sum_tensors(gradients)
        norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
        values = [norm / self.scale for norm in torch.stack(norms).tolist()]
        squares: dict[str, float] = {}
        for (name, _), value in zip(named, values, strict=True):
            squares[part_of(name)] = squares.get(part_of(name), 0.0) + value**2
        total = math.sqrt(sum(value**2 for value in values))
        return Norms(total, {part: math.sqrt(square) for part, square in squares.items()})

    def take(self, step: int, norm: float) -> float:
        """Make an update whose gradient is finite; return its learning rate."""
        config = self.config
        clipped = min(1.0, config.train.max_norm / (norm + 1e-6)) / self.scale
        if clipped != 1.0:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, clipped)  # pyright: ignore[reportPrivateImportUsage]
        lr = set_lr(self.optimizer, config.optim.lr, config.schedule, config.train.steps, step)
        self.optimizer.step()
        self._move_average(step)
        self.optimizer.zero_grad(set_to_none=True)
        self.in_a_row = 0
        self._good += 1
        if self._fp16 and self._good >= _GROW_AFTER:
            self.scale, self._good = self.scale * 2, 0
        return lr

    def skip(self) -> None:
        """Leave out an update, and lower the scale of fp16."""
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += 1
        self.in_a_row += 1
        self._good = 0
        if self._fp16:
            self.scale = max(1.0, self.scale / 2)

    @property
    def can_scale_down(self) -> bool:
        """Whether a gradient that is not finite may come from the scale of fp16 alone."""
        return self._fp16 and self.scale > 1

    @torch.no_grad()
    def _move_average(self, step: int) -> None:
        if not self.average:
            return
        # Early on the average is short, or it would remember the first weights for too long.
        decay = min(self.config.train.ema_decay, (1 + step) / (10 + step))
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), parameters, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the average, where there is one, in the place of the weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name in self.average:
                parameter.data, self.average[name] = self.average[name], parameter.data

    def facts(self) -> dict[str, Any]:
        """Return what ``restore`` takes, as JSON can hold it: all but tensors."""
        return {
            "scale": self.scale,
            "good": self._good,
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "spikes": [self.spikes.mean, self.spikes.variance, self.spikes.seen],
        }

    def restore(self, facts: Mapping[str, Any], average: Mapping[str, Tensor]) -> None:
        """Undo ``facts`` and take an average over, which starts afresh where there is none.

        Another precision keeps its own scale.
        """
        for name, parameter in self.model.named_parameters():
            if name in self.average:
                self.average[name] = average.get(name, parameter.detach()).to(parameter, copy=True)
        if self._fp16:
            self.scale = float(facts["scale"])
        self._good = int(facts["good"])
        self.skipped, self.in_a_row = int(facts["skipped"]), int(facts["in_a_row"])
        mean, variance, seen = facts["spikes"]
        self.spikes.mean, self.spikes.variance, self.spikes.seen = mean, variance, int(seen)
