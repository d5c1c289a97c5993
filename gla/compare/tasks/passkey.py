"""A number hidden in filler text, and asked for at the end, by depth and length.

The retrieval test of Mohtashami and Jaggi 2023 (arXiv 2305.16300), in bytes.
Sizes: N examples, T tokens of one.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from gla.compare.tasks.base import Case, Count, Examples, Task
from gla.data.loader import IGNORE
from gla.errors import ConfigError

Depth = Annotated[float, Field(ge=0, le=1)]

FILLER = (
    b"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
HIDDEN = b"The pass key is %s. Remember it. "
ASKED = b"What is the pass key? It is %s"


class Passkey(Task):
    """Bytes: filler from a random place on, the key at a depth, filler, the question, the digits.

    Digits are predicted one after the other from those before. A greedy decoder writes the whole
    key exactly where all are predicted right, so ``exact`` is that.

    Attributes:
        kind: "passkey".
        vocab_size: That of ASCII.
        length: T.
        digits: Of the key.
        depth: Where the key stands, 0 at the start of the filler, 1 at its end; None: anywhere.
        test_lengths, depths: The tests after training are at all pairs of these.
    """

    kind: Literal["passkey"] = "passkey"  # pyright: ignore[reportIncompatibleVariableOverride]
    vocab_size: Literal[128] = 128  # pyright: ignore[reportIncompatibleVariableOverride]
    length: Count = 512
    digits: Count = 5
    depth: Depth | None = None
    test_lengths: list[Count] = Field(default=[512, 1024, 2048, 4096])
    depths: list[Depth] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0])

    @model_validator(mode="after")
    def _fits(self) -> Self:
        shortest, needed = min([self.length, *self.test_lengths]), self._fixed
        if shortest < needed:
            raise ConfigError(
                f"length: got {shortest}, expected at least {needed} for {self.digits} digits; "
                "fix length"
            )
        return self

    @property
    def _fixed(self) -> int:
        """Bytes that are no filler."""
        return len(HIDDEN) + len(ASKED) - 2 * len(b"%s") + 2 * self.digits

    @property
    def chance(self) -> float:
        """One digit of ten."""
        return 0.1

    def cases(self) -> list[Case]:
        """See ``Task``."""
        return [
            Case({"length": t, "depth": d}, self.model_copy(update={"length": t, "depth": d}))
            for t in self.test_lengths
            for d in self.depths
        ]

    def make(self, rng: np.random.Generator, size: int, training: bool) -> Examples:
        """See ``Task``: T + 1 bytes, of which the last is only a target."""
        rows = np.stack([self._row(rng) for _ in range(size)]).astype(np.int64)
        tokens, following = rows[:, :-1], rows[:, 1:]
        targets = np.full_like(tokens, IGNORE)
        targets[:, -self.digits :] = following[:, -self.digits :]
        return Examples(tokens, targets)

    def _row(self, rng: np.random.Generator) -> np.ndarray:
        key = b"".join(b"%d" % digit for digit in rng.integers(10, size=self.digits))
        room = self.length + 1 - self._fixed
        depth = rng.random() if self.depth is None else self.depth
        start = int(rng.integers(len(FILLER)))
        filler = (FILLER * (room // len(FILLER) + 2))[start : start + room]
        cut = round(depth * room)
        text = filler[:cut] + HIDDEN % key + filler[cut:] + ASKED % key
        return np.frombuffer(text, np.uint8)
