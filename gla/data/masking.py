"""Masked tokens (Devlin et al. 2018, arXiv 1810.04805): what is hidden, and how.

Of the tokens of text, a fraction is asked for. Of these, 80 % become the mask token, 10 % a random
token, 10 % stay, so that a model cannot trust what it sees. What is asked for in a sample depends
on the seed and the sample's position alone: not on how a batch is cut, and a resumed run asks the
same.
"""

from __future__ import annotations

import numpy as np
import torch

from gla.data.loader import IGNORE, Batch, Loader
from gla.data.shards import TokenDataset

_MASKED, _RANDOM = 0.8, 0.1


class MaskedLoader(Loader):
    """A loader whose targets are the tokens asked for, -100 elsewhere.

    Args:
        dataset, seq_len, seed, shuffle: As for ``Loader``.
        mask_id: Id that stands for a masked token.
        is_text: bool [vocab], True at ids that stand for text: control tokens are not asked for,
            nor put in as random tokens.
        fraction: Share of the tokens of text that is asked for.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        *,
        mask_id: int,
        is_text: np.ndarray,
        fraction: float,
    ) -> None:
        super().__init__(dataset, seq_len, seed, shuffle)
        self._draws = seed
        self._mask_id, self._is_text, self._fraction = mask_id, is_text, fraction
        self._text_ids = np.flatnonzero(is_text)

    def batch(self, position: int, size: int) -> Batch:
        """Return the ``size`` samples from ``position`` on, some of their tokens masked."""
        parts = [
            self._mask(super(MaskedLoader, self).batch(p, 1), p)
            for p in range(position, position + size)
        ]
        lengths = np.concatenate([part.cu_seqlens.diff().numpy() for part in parts])
        return Batch(
            torch.cat([part.tokens for part in parts], dim=1),
            torch.cat([part.targets for part in parts], dim=1),
            torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        )

    def _mask(self, batch: Batch, position: int) -> Batch:
        draws = np.random.default_rng([self._draws, position])
        tokens = batch.tokens.numpy().copy()
        asked = self._is_text[tokens] & (draws.random(tokens.shape) < self._fraction)
        targets = np.where(asked, tokens, IGNORE)
        fate = draws.random(tokens.shape)
        other = self._text_ids[draws.integers(len(self._text_ids), size=tokens.shape)]
        tokens[asked & (fate < _MASKED)] = self._mask_id
        replaced = asked & (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
        tokens[replaced] = other[replaced]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), batch.cu_seqlens)
