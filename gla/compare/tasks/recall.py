"""Associative recall: key-value pairs first, then queries for the values of keys.

Sizes: N examples, T tokens of one, V vocabulary, P pairs.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from gla.compare.tasks.base import (
    Case,
    Count,
    Examples,
    Ints,
    Task,
    draw_distinct,
    uniform,
)
from gla.data.loader import IGNORE
from gla.errors import ConfigError

Size = Annotated[tuple[Count, Count], Field(strict=False)]
Share = Annotated[tuple[Count, Count, Count], Field(strict=False)]


class MultiQueryRecall(Task):
    """MQAR (Arora et al. 2023, arXiv 2312.04927): P pairs, then each key once, far or near.

    Token 0 fills. Keys are 1 … V/2 - 1, values V/2 … V - 1; a key stands once among the pairs, and
    the queries stand at even places behind them, near ones likelier: place i with weight
    i^(power - 1). With ``assignments`` = a, each key stands a times among the pairs, in random
    order with different values, and the last one counts: what came before must be forgotten.

    Attributes:
        kind: "mqar".
        vocab_size: V.
        length: T.
        pairs: P, different keys.
        assignments: a.
        power: Of the places of queries.
        mixture: (length, pairs, examples) of each part that training mixes; empty: only the above.
        tests: (length, pairs) of the tests after training.
    """

    kind: Literal["mqar"] = "mqar"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Annotated[int, Field(ge=8)] = 8192
    length: Count = 64
    pairs: Count = 4
    assignments: Count = 1
    power: Annotated[float, Field(gt=0)] = 0.01
    mixture: list[Share] = Field(default=[])
    tests: list[Size] = Field(default=[])

    @model_validator(mode="after")
    def _fits(self) -> Self:
        sizes = [(self.length, self.pairs), *((t, p) for t, p, _ in self.mixture), *self.tests]
        half = self.vocab_size // 2
        for length, pairs in sizes:
            needed = 2 * pairs * self.assignments + 2 * pairs
            if length % 2 or needed > length or max(pairs, self.assignments) >= half:
                raise ConfigError(
                    f"length: got {length} for {pairs} pairs and a vocabulary of "
                    f"{self.vocab_size}, expected an even one of at least {needed}, and fewer "
                    f"pairs and assignments than {half}; fix length, pairs or vocab_size"
                )
        return self

    @property
    def chance(self) -> float:
        """One value of all."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def parts(self) -> list[tuple[Task, int]]:
        """See ``Task``."""
        if not self.mixture:
            return super().parts()
        return [(self._sized(length, pairs), n) for length, pairs, n in self.mixture]

    def cases(self) -> list[Case]:
        """See ``Task``."""
        return [Case({"length": t, "pairs": p}, self._sized(t, p)) for t, p in self.tests]

    def _sized(self, length: int, pairs: int) -> Task:
        changes = {"length": length, "pairs": pairs, "mixture": [], "tests": []}
        return self.model_copy(update=changes)

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``."""
        half, pairs, times = self.vocab_size // 2, self.pairs, self.assignments
        keys = 1 + draw_distinct(rng, size, pairs, uniform(half - 1))
        # Which key stands at each place of the context: each of them ``times`` times.
        slots = draw_distinct(rng, size, pairs * times, uniform(pairs * times)) % pairs
        values = self._values(rng, slots)
        tokens = np.zeros((size, self.length), np.int64)
        context = 2 * pairs * times
        tokens[:, 0:context:2] = np.take_along_axis(keys, slots, 1)
        tokens[:, 1:context:2] = values
        last = np.zeros((size, pairs), np.int64)
        for place in range(pairs * times):  # a later assignment overwrites an earlier one
            np.put_along_axis(last, slots[:, place : place + 1], values[:, place : place + 1], 1)
        room = (self.length - context) // 2
        weights = np.arange(1, room + 1, dtype=np.float64) ** (self.power - 1)
        places = context + 2 * draw_distinct(rng, size, pairs, weights)
        np.put_along_axis(tokens, places, keys, 1)
        targets = np.full_like(tokens, IGNORE)
        np.put_along_axis(targets, places, last, 1)
        return Examples(tokens, targets)

    def _values(self, rng: np.random.Generator, slots: Ints) -> Ints:
        """Values for the places of the context: those of one key differ."""
        half, pairs = self.vocab_size // 2, self.pairs
        choices = self.vocab_size - half
        if self.assignments == 1:
            return half + draw_distinct(rng, len(slots), slots.shape[1], uniform(choices))
        first = rng.integers(choices, size=(len(slots), pairs))
        steps = draw_distinct(rng, len(slots) * pairs, self.assignments - 1, uniform(choices - 1))
        steps = np.concatenate([np.zeros((len(steps), 1), np.int64), steps + 1], 1)
        of_key = (first[..., None] + steps.reshape(len(slots), pairs, -1)) % choices
        # The n-th time that a key stands, it has its n-th value.
        nth = np.zeros_like(slots)
        seen = np.zeros((len(slots), pairs), np.int64)
        rows = np.arange(len(slots))
        for place in range(slots.shape[1]):
            nth[:, place] = seen[rows, slots[:, place]]
            seen[rows, slots[:, place]] += 1
        return half + of_key[rows[:, None], slots, nth]
