"""The model of the compression task: a language model's last output, decoded place by place.

As in MAD (Poli et al. 2024, arXiv 2403.17844): the hidden state after the last token, plus a sine
and cosine code of a place, goes through a small feed-forward network that names the token there.

Sizes: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from gla.layers.linear import Linear
from gla.layers.norms import RMSNorm
from gla.models.config import ModelConfig
from gla.models.encoder import sinusoids
from gla.models.language_model import LanguageModel, LanguageModelOutput
from gla.state import ModelState


class Compressor(LanguageModel):
    """A language model with the decoder in place of its head.

    Args:
        config: Of the language model.
        length: T, the most tokens of an example.
    """

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__(config)
        width, eps = config.d_model, config.norm_eps
        self.head = None
        self.decoder = nn.Sequential(
            RMSNorm(width, eps),
            Linear(width, width, bias=True),
            nn.GELU(),
            RMSNorm(width, eps),
            Linear(width, width, bias=True),
            nn.GELU(),
            RMSNorm(width, eps),
            Linear(width, config.vocab_size, bias=True),
        )
        places = sinusoids(torch.arange(length), width)
        self.register_buffer("places", places, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        need_state: bool = True,
    ) -> LanguageModelOutput:
        """tokens [B, T] -> logits [B, T, V] of the token at each place, from the last output."""
        assert state is None and cu_seqlens is None and mask is None
        places = cast(Tensor, self.places)[: tokens.shape[1]]
        h = self.features(tokens)[:, -1:] + places
        return LanguageModelOutput(self.decoder(h), None)
