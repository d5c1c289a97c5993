"""The tasks of MAD (Poli et al. 2024, arXiv 2403.17844) that stand nowhere else here.

Recall in context, with noise between pairs and with keys and values of several tokens;
memorization of a fixed table; compression of a sequence into one vector. Selective copying, the
sixth, is in ``copying``. In training every next token is a target, as published; the tests ask for
values of keys that were there before.

Sizes: N examples, T tokens of one, V vocabulary.
"""

from __future__ import annotations

from itertools import permutations
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from gla.compare.tasks.base import Count, Examples, Ints, Task
from gla.data.loader import IGNORE
from gla.errors import ConfigError

Share = Annotated[float, Field(ge=0, lt=1)]
_TABLE_SEED = 12345


class InContextRecall(Task):
    """Pairs of a key and its value in this example, over and over; a key seen before is asked.

    Keys are the first half of the vocabulary without noise tokens, values the second.

    Attributes:
        kind: "in_context_recall".
        vocab_size: V.
        length: T.
        noise_tokens: The last ones of the vocabulary, that stand in place of some pairs.
        noise: Share of the pairs that are noise.
    """

    kind: Literal["in_context_recall"] = "in_context_recall"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Annotated[int, Field(ge=4)] = 16
    length: Annotated[int, Field(ge=4, multiple_of=2)] = 128
    noise_tokens: Annotated[int, Field(ge=0)] = 0
    noise: Share = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.vocab_size - self.noise_tokens < 4 or (self.noise > 0) != (self.noise_tokens > 0):
            raise ConfigError(
                f"noise_tokens: got {self.noise_tokens} of {self.vocab_size} with noise = "
                f"{self.noise}, expected some where noise > 0 only, and 4 other tokens; fix it"
            )
        return self

    @property
    def _real(self) -> int:
        return self.vocab_size - self.noise_tokens

    @property
    def chance(self) -> float:
        """One of the values."""
        return 1 / (self._real - self._real // 2)

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``: T tokens, the last value only a target."""
        half, pairs, rows = self._real // 2, self.length // 2, np.arange(size)
        keys = rng.integers(half, size=(size, pairs))
        values_of = rng.integers(half, self._real, size=(size, half))
        noisy = rng.random((size, pairs)) < self.noise
        noisy[rows, rng.integers(pairs - 1, size=size)] = False  # at least one real pair
        # The last pair asks for a key that was there.
        chosen = np.argmax(rng.random((size, pairs - 1)) * ~noisy[:, :-1], axis=1)
        keys[:, -1], noisy[:, -1] = keys[rows, chosen], False
        values = np.take_along_axis(values_of, keys, 1)
        pair = np.stack([keys, values], 2)
        if self.noise:
            filler = rng.integers(self._real, self.vocab_size, size=pair.shape)
            pair = np.where(noisy[..., None], filler, pair)
        tokens = pair.reshape(size, -1)
        following = np.concatenate([tokens[:, 1:], np.full((size, 1), IGNORE)], 1)
        if training:
            return Examples(tokens, following)
        targets = np.full_like(tokens, IGNORE)
        seen = np.zeros((size, half), bool)
        for place in range(pairs):
            known = seen[rows, keys[:, place]] & ~noisy[:, place]
            targets[known, 2 * place] = values[known, place]
            seen[rows, keys[:, place]] |= ~noisy[:, place]
        return Examples(tokens, targets)


class FuzzyRecall(Task):
    """Recall in context with keys of 1 … 3 different tokens, and such values.

    Filled from the left with token V - 1. Keys in tests have the most tokens.

    Attributes:
        kind: "fuzzy_recall".
        vocab_size: V.
        length: T.
        key_tokens, value_tokens: At most.
    """

    kind: Literal["fuzzy_recall"] = "fuzzy_recall"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Annotated[int, Field(ge=9)] = 16
    length: Count = 128
    key_tokens: Annotated[int, Field(ge=1, le=3)] = 3
    value_tokens: Annotated[int, Field(ge=1, le=3)] = 3

    @model_validator(mode="after")
    def _fits(self) -> Self:
        longest = self.key_tokens + self.value_tokens
        if self.length < 3 * longest:
            raise ConfigError(
                f"length: got {self.length}, expected at least {3 * longest}; fix length"
            )
        return self

    @property
    def chance(self) -> float:
        """One of the tokens of values."""
        return 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``: T tokens, the last token of the last value only a target."""
        real = self.vocab_size - 1
        sizes = range(1, self.key_tokens + 1) if training else (self.key_tokens,)
        keys = [list(permutations(range(real // 2), n)) for n in sizes]
        values = [
            list(permutations(range(real // 2, real), n)) for n in range(1, self.value_tokens + 1)
        ]
        rows = [self._row(rng, keys, values, training) for _ in range(size)]
        return Examples(np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]))

    def _row(
        self, rng: np.random.Generator, keys: list, values: list, training: bool
    ) -> tuple[Ints, Ints]:
        def draw(of_size: list) -> tuple[int, ...]:
            choices = of_size[rng.integers(len(of_size))]
            return choices[rng.integers(len(choices))]

        probe, answer = draw(keys), draw(values)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        end = self.length + 1 - len(probe) - len(answer)  # where the question begins
        at = int(rng.integers(max(1, end - self.key_tokens - self.value_tokens)))
        tokens: list[int] = []
        targets: list[int] = []
        while True:
            must = probe not in known and len(tokens) >= at
            key = probe if must else draw(keys)
            value = answer if key == probe else known.get(key) or draw(values)
            if len(tokens) + len(key) + len(value) > end:
                if probe in known:
                    break
                tokens, targets, known, at = [], [], {}, 0  # no room was left for it: first, then
                continue
            asked = value if key in known else (IGNORE,) * len(value)
            known[key] = value
            tokens += [*key, *value]
            targets += [*(IGNORE,) * len(key), *asked]
        tokens += [*probe, *answer]
        targets += [*(IGNORE,) * len(probe), *answer]
        fill = self.length + 1 - len(tokens)
        row = np.array([self.vocab_size - 1] * fill + tokens)
        asked_row = row if training else np.array([IGNORE] * fill + targets)
        return row[:-1], asked_row[1:]


class Memorize(Task):
    """A fixed table from keys to values, which stands in no example: weights must hold it.

    Keys, each followed by token V - 1, behind which the value is asked; so what an example shows
    never helps.

    Attributes:
        kind: "memorize".
        vocab_size: V.
        length: T.
    """

    kind: Literal["memorize"] = "memorize"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Annotated[int, Field(ge=5)] = 256
    length: Annotated[int, Field(ge=2, multiple_of=2)] = 32

    @property
    def chance(self) -> float:
        """One of the values."""
        return 1 / len(self.table)

    @property
    def table(self) -> Ints:
        """int64 [(V - 1) // 2]: the value of each key; the same in every example and run."""
        keys = (self.vocab_size - 1) // 2
        return keys + np.random.default_rng(_TABLE_SEED).permutation(keys)

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``."""
        table = self.table
        keys = rng.integers(len(table), size=(size, self.length // 2))
        tokens = np.full((size, self.length), self.vocab_size - 1, np.int64)
        tokens[:, 0::2] = keys
        targets = np.full_like(tokens, IGNORE)
        targets[:, 1::2] = table[keys]
        return Examples(tokens, targets)


class Compress(Task):
    """Random tokens and token V - 1 at the end, whose output alone must give all of them back.

    Targets stand at the places of the tokens, but are predicted by a decoder from the last
    output and the place; see ``gla.compare.compressor``.

    Attributes:
        kind: "compress".
        vocab_size: V.
        length: T.
    """

    kind: Literal["compress"] = "compress"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Annotated[int, Field(ge=3)] = 16
    length: Annotated[int, Field(ge=2)] = 32

    @property
    def chance(self) -> float:
        """One of the tokens."""
        return 1 / (self.vocab_size - 1)

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``."""
        tokens = rng.integers(self.vocab_size - 1, size=(size, self.length))
        tokens[:, -1] = self.vocab_size - 1
        targets = tokens.copy()
        targets[:, -1] = IGNORE
        return Examples(tokens, targets)
