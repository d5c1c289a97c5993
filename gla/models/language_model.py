"""The language model: embedding, blocks of a mixer and a feed-forward layer, norm, head.

    h = embed(token)
    h = h + mixer(norm(h));  h = h + mlp(norm(h))          for each block
    logits = norm(h) W^T

Blocks and initialization are those of ``gla.models.backbone``.

Sizes: B batch, T tokens, D model width, V vocabulary, N sequences (N = B, or the number of packed
documents).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla.layers.linear_attention import RecurrenceConfig
from gla.layers.mixer import Mixer
from gla.models.backbone import Backbone, Block
from gla.models.config import ModelConfig
from gla.models.inputs import check_inputs, check_step
from gla.models.loss import linear_cross_entropy
from gla.state import ModelState

PREFILL_TOKENS = 2048


class LanguageModelOutput(NamedTuple):
    """What ``forward`` returns.

    Attributes:
        logits: [B, T, V], 0 at pads.
        state: after the last token of each sequence, or None if it was not asked for.
    """

    logits: Tensor
    state: ModelState | None


class LanguageModel(Backbone):
    """A causal language model.

    Args:
        config: see ``ModelConfig``.

    Raises:
        ConfigError: a mixer cannot do what its table asks, for example heads that do not divide.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        mixers = (config.mixers[name] for name in config.layer_names)
        # Triton for the loss too, where a layer names it.
        self._fused = any(isinstance(m, RecurrenceConfig) and m.fused for m in mixers)
        self.reset_parameters()

    def init_state(self, batch_size: int) -> ModelState:
        """State of sequences that have read nothing."""
        weight = self.embed.weight
        layers = tuple(
            _mixer(block).init_state(batch_size, device=weight.device, dtype=weight.dtype)
            for block in self.blocks
        )
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.int64, device=weight.device))

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        need_state: bool = True,
    ) -> LanguageModelOutput:
        """Logits of the next token at every position.

        Args:
            tokens: [B, T] int64.
            state: of N sequences to go on from; None starts afresh.
            cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1).
            mask: [B, T] bool, True at real tokens. Pads may stand anywhere and change nothing.
            need_state: False saves the work of the final state.

        Raises:
            ValueError: shapes that do not fit, or (on a CPU) ids beyond the vocabulary; the message
                names the tensor.
            StateError: a state of another model or number of sequences.
        """
        check_inputs(len(self.blocks), tokens, state, cu_seqlens, mask)
        if mask is None:
            h, after = self._hidden(tokens, state, cu_seqlens, need_state)
            return LanguageModelOutput(self.logits(h), after)
        # One mechanism for rows and documents: the real tokens of the rows become a pack.
        lengths = mask.sum(1)
        h, after = self._hidden(tokens[mask].unsqueeze(0), state, _offsets(lengths), need_state)
        packed = self.logits(h).squeeze(0)
        logits = packed.new_zeros(*tokens.shape, packed.shape[-1])
        return LanguageModelOutput(logits.masked_scatter(mask.unsqueeze(-1), packed), after)

    def features(self, tokens: Tensor) -> Tensor:
        """Hidden states before the head: tokens [B, T] int64 -> [B, T, D]."""
        check_inputs(len(self.blocks), tokens, None, None, None)
        return self._hidden(tokens, None, None, need_state=False)[0]

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        cu_seqlens: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        state: ModelState | None = None,
    ) -> Tensor:
        """Cross entropy in nats, without the logits of all tokens in memory.

        Args:
            tokens: [B, T] int64.
            targets: [B, T] int64, the token that should follow each.
            ignore_index: targets that count nothing.
            cu_seqlens: [N+1] offsets of documents packed into one row (B = 1).
            reduction: "mean" over the counted targets (0 if there are none), or their "sum".
            state: of N sequences to go on from.

        Returns:
            A scalar, fp32 or wider.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction: got {reduction!r}, expected 'mean' or 'sum'; fix reduction"
            )
        total, _ = self._loss(tokens, targets, ignore_index, state, cu_seqlens, need_state=False)
        if reduction == "sum":
            return total
        return total / (targets != ignore_index).sum().clamp_min(1)

    def loss_and_state(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: ModelState | None = None,
        cu_seqlens: Tensor | None = None,
        ignore_index: int = -100,
    ) -> tuple[Tensor, ModelState]:
        """``loss`` with reduction "sum", and the state after the tokens, differentiable."""
        total, after = self._loss(tokens, targets, ignore_index, state, cu_seqlens, need_state=True)
        return total, _given(after)

    def _loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        ignore_index: int,
        state: ModelState | None,
        cu_seqlens: Tensor | None,
        need_state: bool,
    ) -> tuple[Tensor, ModelState | None]:
        check_inputs(len(self.blocks), tokens, state, cu_seqlens, None)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"targets: got shape {list(targets.shape)}, expected that of tokens, "
                f"{list(tokens.shape)}; fix targets"
            )
        h, after = self._hidden(tokens, state, cu_seqlens, need_state)
        total = linear_cross_entropy(
            h.flatten(0, 1), self._head_weight, targets.flatten(), ignore_index, self._fused
        )
        return total, after

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        mask: Tensor | None = None,
        piece: int = PREFILL_TOKENS,
    ) -> tuple[Tensor, ModelState]:
        """Read a prompt in pieces, so that memory does not grow with its length.

        Args:
            tokens: [B, T] int64, T at least 1.
            state: of B sequences to go on from; None starts afresh.
            mask: [B, T] bool, True at real tokens.
            piece: tokens a row read at once.

        Returns:
            Logits [B, V] after each row's last real token (0 for a row without one), and the state.
        """
        check_inputs(len(self.blocks), tokens, state, None, mask)
        if tokens.shape[1] == 0:
            raise ValueError("tokens: got T = 0, expected at least one token; fix tokens")
        last = self.embed.weight.new_zeros(tokens.shape[0], self.config.d_model)
        for start in range(0, tokens.shape[1], piece):
            part = tokens[:, start : start + piece]
            if mask is None:
                h, state = self._hidden(part, state, None, need_state=True)
                last = h[:, -1]
                continue
            real = mask[:, start : start + piece]
            offsets = _offsets(real.sum(1))
            h, state = self._hidden(part[real].unsqueeze(0), state, offsets, need_state=True)
            read = offsets.diff() > 0
            last = last.to(h.dtype).index_put((read,), h[0, offsets[1:][read] - 1])
        logits = self.logits(last)
        if mask is not None:
            logits = logits * mask.any(1, keepdim=True)
        return logits, _given(state)

    @torch.no_grad()
    def decode_step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Read one token a sequence.

        Args:
            tokens: [B] int64.
            state: of B sequences; it is left as it was.

        Returns:
            Logits [B, V] of the token after, and the next state.
        """
        check_step(len(self.blocks), tokens, state)
        h = self._embed(tokens)
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            h, layer = _block(block).step(h, layer)
            layers.append(layer)
        return self.logits(self.norm(h)), ModelState(tuple(layers), state.position + 1)

    def _hidden(
        self,
        tokens: Tensor,
        state: ModelState | None,
        cu_seqlens: Tensor | None,
        need_state: bool,
    ) -> tuple[Tensor, ModelState | None]:
        """[B, T] -> hidden states before the head [B, T, D], state."""
        h = self._embed(tokens)
        layers = []
        for i, block in enumerate(self.blocks):
            h, layer = block(h, None if state is None else state.layers[i], cu_seqlens, need_state)
            layers.append(layer)
        h = self.norm(h)
        if not need_state:
            return h, None
        length = tokens.new_full((tokens.shape[0],), tokens.shape[1])
        if cu_seqlens is not None:
            length = cu_seqlens.diff().to(torch.int64)
        return h, ModelState(tuple(layers), length if state is None else state.position + length)


def _mixer(block: nn.Module) -> Mixer:
    return _block(block).mixer


def _block(block: nn.Module) -> Block:
    return cast(Block, block)  # for the type checker; a compiled block passes its attributes on


def _given(state: ModelState | None) -> ModelState:
    assert state is not None
    return state


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))
