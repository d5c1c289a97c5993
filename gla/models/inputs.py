"""What a model accepts: shapes, packing and states.

Sizes: B batch, T tokens, N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla.errors import StateError
from gla.state import ModelState


def check_inputs(
    blocks: int,
    tokens: Tensor,
    state: ModelState | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
) -> None:
    """Check the shapes of a call; see ``LanguageModel.forward`` for the arguments.

    Raises:
        ValueError: one that does not fit; the message names the tensor.
        StateError: a state of another model or number of sequences.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens: got shape {list(tokens.shape)}, expected [B, T]; fix tokens")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens: got {tokens.dtype}, expected int64; fix tokens.long()")
    sequences = tokens.shape[0]
    if mask is not None:
        if cu_seqlens is not None:
            raise ValueError("mask: got a mask and cu_seqlens, expected one of them; fix mask")
        if mask.shape != tokens.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"mask: got shape {list(mask.shape)} and {mask.dtype}, expected "
                f"{list(tokens.shape)} and bool; fix mask"
            )
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, tokens)
        sequences = cu_seqlens.shape[0] - 1
    if state is not None:
        check_state(blocks, state, sequences)


def check_step(blocks: int, tokens: Tensor, state: ModelState) -> None:
    """Check the shapes of a decode step; see ``LanguageModel.decode_step``.

    Raises:
        ValueError: tokens that do not fit.
        StateError: a state of another model or number of sequences.
    """
    if tokens.dim() != 1:
        raise ValueError(f"tokens: got shape {list(tokens.shape)}, expected [B]; fix tokens")
    check_state(blocks, state, tokens.shape[0])


def check_state(blocks: int, state: ModelState, sequences: int) -> None:
    """Check that a state belongs to a model of ``blocks`` blocks and has N = ``sequences`` rows.

    Raises:
        StateError: it does not.
    """
    if len(state.layers) != blocks:
        raise StateError(
            f"state: got {len(state.layers)} layers, expected {blocks}; "
            "fix by using the state of this model"
        )
    if state.position.shape != (sequences,):
        raise StateError(
            f"state: got {len(state.position)} sequences, expected {sequences}; "
            "fix by choosing its rows with gla.state.select"
        )


def _check_cu_seqlens(cu_seqlens: Tensor, tokens: Tensor) -> None:
    B, T = tokens.shape
    if B != 1:
        raise ValueError(
            f"cu_seqlens: got B = {B} rows of tokens, expected 1; fix by packing them into one"
        )
    good = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not good or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens: got shape {list(cu_seqlens.shape)} and {cu_seqlens.dtype}, expected "
            "[N+1] and int32 or int64; fix cu_seqlens"
        )
    if torch.compiler.is_compiling():
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != T or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens: got offsets from {first} to {last}, expected non-decreasing ones from 0 "
            f"to T = {T}; fix cu_seqlens"
        )
