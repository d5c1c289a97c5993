"""Language modelling on real text, and how it goes on beyond the training length.

After training, the first ``test_tokens`` tokens of the validation split are read as one stream,
cut into rows of 1, 2, 4, … times the training length, and each row is read from an empty state.
Documents follow one another in a row, as in a long input; no token is predicted across a
document's end. Every length reads the same text, so what changes is how much stands before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gla.data.loader import IGNORE
from gla.data.shards import TokenDataset
from gla.errors import ConfigError
from gla.models.language_model import LanguageModel
from gla.tables import describe_faults
from gla.train.device import autocast, evaluating
from gla.train.inputs import Inputs

Count = Annotated[int, Field(ge=1)]
_PIECE = 2048  # tokens read at once
_FIRST_EDGE = 16  # of the ranges of positions, which then double


class TextOptions(BaseModel):
    """Options of a task of kind "text".

    Attributes:
        lengths: Lengths of the rows in tests, times ``train.seq_len``; empty: no such tests.
        test_tokens: Tokens of validation text that each of them reads, cut down to whole rows.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    lengths: list[Count] = [1, 2, 4, 8, 16]
    test_tokens: Count = 65536

    def require(self, seq_len: int, there: int | None = None) -> None:
        """Raise a ConfigError where not even one row of the longest length can be read.

        Args:
            seq_len: Of training.
            there: Tokens of the validation split, where they are known.
        """
        longest = max(self.lengths, default=0) * seq_len
        for name, tokens in (("test_tokens", self.test_tokens), ("validation text", there)):
            if tokens is not None and tokens < longest:
                raise ConfigError(
                    f"lengths: got {max(self.lengths)}, rows of {longest:,} tokens, with "
                    f"{tokens:,} tokens of {name}, expected at least one row; fix with smaller "
                    "lengths or more text"
                )

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> TextOptions:
        """Check a table; the key ``kind`` may stand in it.

        Raises:
            ConfigError: One line for each fault.
        """
        try:
            return cls.model_validate({k: v for k, v in table.items() if k != "kind"})
        except ValidationError as faults:
            raise ConfigError(describe_faults(cls, faults)) from None


def by_length(
    model: LanguageModel, inputs: Inputs, seq_len: int, options: TextOptions, precision: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure a model at several lengths.

    Returns:
        Cases {"axes": {"length": tokens}, "metrics": {"bpb", "loss"}}, and for the longest rows
        the same by position, {"axes": {"position": first token after it}, …}.
    """
    if not options.lengths:
        return [], []
    longest = max(options.lengths) * seq_len
    rows = min(options.test_tokens, inputs.val.num_tokens) // longest
    cases, positions = [], []
    for times in sorted(set(options.lengths)):
        length = times * seq_len
        nats, size = measure(model, inputs, length, rows * longest // length, precision)
        cases.append(_case("length", length, nats, size))
        if length == longest:
            positions = _by_position(nats, size)
    return [c for c in cases if c], positions


def measure(
    model: LanguageModel, inputs: Inputs, length: int, rows: int, precision: str
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read the first rows of the validation split.

    Returns:
        Nats of each token's target, fp64 [rows, length], NaN where none is asked; and the bytes
        that the targets stand for, int64 [rows, length].
    """
    device = next(model.parameters()).device
    starts = np.asarray(inputs.val.document_starts)
    nats = np.full((rows, length), np.nan)
    size = np.zeros((rows, length), np.int64)
    with evaluating(model), autocast(device, precision):
        for row in range(rows):
            ids, following = read_row(inputs.val, starts, row * length, length)
            asked, state = following >= 0, None
            for start in range(0, length, _PIECE):
                part = slice(start, start + _PIECE)
                out = model(torch.from_numpy(ids[None, part]).to(device), state)
                state = out.state
                targets = torch.from_numpy(following[part]).to(device)
                loss = F.cross_entropy(out.logits[0].float(), targets, reduction="none")
                nats[row, part] = np.where(asked[part], loss.double().cpu().numpy(), np.nan)
            size[row] = np.where(asked, inputs.tokenizer.piece_bytes[following], 0)
    return nats, size


def read_row(
    dataset: TokenDataset, starts: NDArray[np.int64], first: int, length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ``length`` ids from token ``first`` on, and what follows each: -100 at document ends.

    Args:
        dataset: At least first + length tokens.
        starts: Where its documents start.
        first: The first token.
        length: How many.
    """
    ids = dataset.tokens(first, min(first + length + 1, dataset.num_tokens)).astype(np.int64)
    following = np.append(ids[1:], IGNORE)[:length]
    ends = starts[(starts > first) & (starts <= first + length)] - 1 - first
    following[ends] = IGNORE
    return ids[:length], following


def _case(
    axis: str, at: int, nats: NDArray[np.float64], size: NDArray[np.int64]
) -> dict[str, Any] | None:
    asked = ~np.isnan(nats)
    if not asked.any():
        return None
    total = float(nats[asked].sum())
    return {
        "axes": {axis: at},
        "metrics": {
            "bpb": total / math.log(2) / max(int(size[asked].sum()), 1),
            "loss": total / int(asked.sum()),
        },
    }


def _by_position(nats: NDArray[np.float64], size: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Figures of the positions 0 … 15, 16 … 31, 32 … 63, and so on."""
    cases, start, end = [], 0, _FIRST_EDGE
    while start < nats.shape[1]:
        cases.append(
            _case("position", min(end, nats.shape[1]), nats[:, start:end], size[:, start:end])
        )
        start, end = end, 2 * end
    return [case for case in cases if case]
