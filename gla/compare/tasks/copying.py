"""Copying: a few tokens out of many, and induction heads.

Sizes: N examples, T tokens of one, V vocabulary.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from gla.compare.tasks.base import Case, Count, Examples, Task, draw_distinct, uniform
from gla.data.loader import IGNORE
from gla.errors import ConfigError


class SelectiveCopy(Task):
    """Selective copying (Gu and Dao 2023, arXiv 2312.00752): some tokens among blanks, in order.

    Token 0 is the blank and 1 asks for the next token; 2 … V - 1 are copied. ``copies`` of them
    stand at random places of the first T - copies, and the last ``copies`` places ask.

    Attributes:
        kind: "selective_copy".
        vocab_size: V.
        length: T.
        copies: Tokens to copy.
        test_lengths: T of the tests after training.
    """

    kind: Literal["selective_copy"] = "selective_copy"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Annotated[int, Field(ge=4)] = 16
    length: Count = 256
    copies: Count = 16
    test_lengths: list[Count] = Field(default=[])

    @model_validator(mode="after")
    def _fits(self) -> Self:
        shortest = min([self.length, *self.test_lengths])
        if shortest < 2 * self.copies:
            raise ConfigError(
                f"length: got {shortest}, expected at least {2 * self.copies} for "
                f"{self.copies} copies; fix length or copies"
            )
        return self

    @property
    def chance(self) -> float:
        """One of the tokens that are copied."""
        return 1 / (self.vocab_size - 2)

    def cases(self) -> list[Case]:
        """See ``Task``."""
        return self.at_lengths(self.test_lengths)

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``."""
        context = self.length - self.copies
        copied = rng.integers(2, self.vocab_size, size=(size, self.copies))
        places = np.sort(draw_distinct(rng, size, self.copies, uniform(context)), axis=1)
        tokens = np.zeros((size, self.length), np.int64)
        np.put_along_axis(tokens, places, copied, 1)
        tokens[:, context:] = 1
        targets = np.full_like(tokens, IGNORE)
        targets[:, context:] = copied
        return Examples(tokens, targets)


class InductionHeads(Task):
    """Induction heads (Olsson et al. 2022; as in arXiv 2312.00752): what followed the mark?

    Random tokens 1 … V - 1, with the mark, 0, at one random place; the last token is the mark
    again, and what followed it the first time is asked.

    Attributes:
        kind: "induction".
        vocab_size: V.
        length: T.
        test_lengths: T of the tests after training.
    """

    kind: Literal["induction"] = "induction"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Annotated[int, Field(ge=3)] = 16
    length: Annotated[int, Field(ge=3)] = 256
    test_lengths: list[Annotated[int, Field(ge=3)]] = Field(
        default=[256, 512, 1024, 2048, 4096, 8192, 16384]
    )

    @property
    def chance(self) -> float:
        """One of the tokens."""
        return 1 / (self.vocab_size - 1)

    def cases(self) -> list[Case]:
        """See ``Task``."""
        return self.at_lengths(self.test_lengths)

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``."""
        tokens = rng.integers(1, self.vocab_size, size=(size, self.length))
        rows, places = np.arange(size), rng.integers(0, self.length - 2, size=size)
        tokens[rows, places] = 0
        tokens[:, -1] = 0
        targets = np.full_like(tokens, IGNORE)
        targets[:, -1] = tokens[rows, places + 1]
        return Examples(tokens, targets)
