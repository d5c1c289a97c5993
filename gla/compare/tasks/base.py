"""What a synthetic task is: a seeded generator of examples, with its settings and its chance level.

An example is a row of tokens and a row of targets: the token that should follow each, or -100 where
nothing is asked. Sizes: N examples, T tokens of one, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
_DRAWN_AT_ONCE = 1 << 24  # random numbers in memory

Ints = NDArray[np.int64]


class Examples(NamedTuple):
    """Rows of a task.

    Attributes:
        tokens: int64 [N, T].
        targets: int64 [N, T], -100 where nothing is asked.
    """

    tokens: Ints
    targets: Ints


class Case(NamedTuple):
    """A test of a task at a point of its axes.

    Attributes:
        axes: {"length": 512}, or more than one, such as depth and length.
        task: The task with the settings of this point.
    """

    axes: Mapping[str, float]
    task: Task


class Task(BaseModel, ABC):
    """Base of the synthetic tasks: settings, and what is made from them.

    Attributes:
        kind: Names the task.
        vocab_size: V.
        length: T.
        train_examples: Examples of a fixed training set that is read again in new orders; None:
            every update has fresh ones.
        test_examples: Of each test.
        stop_at: Training ends at the first evaluation with this accuracy; None: never.
        chance: Accuracy of a guess among the tokens that can be an answer.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    kind: str
    vocab_size: Count
    length: Count
    train_examples: Count | None = None
    test_examples: Count = 1000
    stop_at: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    @abstractmethod
    def chance(self) -> float:
        """See the class."""

    @abstractmethod
    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """Make examples.

        Args:
            rng: Decides all of them.
            size: N.
            training: Whether they are for training: some tasks then ask for more tokens.
        """

    def parts(self) -> list[tuple[Task, int]]:
        """Return the tasks that training mixes, and the weight of each (or its examples)."""
        return [(self, self.train_examples or 1)]

    def cases(self) -> list[Case]:
        """Return the tests that follow training, the axis that matters most last."""
        return []

    def at_lengths(self, lengths: Sequence[int]) -> list[Case]:
        """Return tests of this task at other lengths."""
        return [Case({"length": t}, self.model_copy(update={"length": t})) for t in lengths]


def draw_distinct(
    rng: np.random.Generator, rows: int, count: int, weights: NDArray[np.float64]
) -> Ints:
    """Draw ``count`` different numbers below len(weights) for each row, in the order of drawing.

    One after the other, each with the probability that its weight has among those that are left:
    the largest of log(weight) + Gumbel noise (Vieira 2014; Kool et al. 2019, arXiv 1903.06059).

    Returns:
        int64 [rows, count].
    """
    size = len(weights)
    out = np.empty((rows, count), np.int64)
    step = max(1, _DRAWN_AT_ONCE // size)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        scores = np.log(weights) + rng.gumbel(size=(part.stop - start, size))
        best = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
        out[part] = np.take_along_axis(best, order, 1)
    return out


def uniform(size: int) -> NDArray[np.float64]:
    """Equal weights for ``draw_distinct``."""
    return np.ones(size)
