"""Keys and values of a softmax layer: all that was read, or the first g and the last W tokens.

Neither is changed under the hands of a caller who keeps an older state. The ring is small and is
written anew. The full cache has spare room, and new tokens go into slots that older states do not
read; ``filled`` is shared by all states over the same buffers, so that a state which finds its
next slot taken, because another one went on from the same point, copies the buffers first.

Sizes: N sequences, T tokens, G heads of keys and values, D their dimension, C capacity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla.layers.packing import document_of_token

_SMALLEST = 64


class SoftmaxState(NamedTuple):
    """State of a softmax layer. Keys are stored after the rotary embedding.

    Attributes:
        k: [N, C, G, D] keys. Full: token j in slot j, C at least ``position``. Ring: C = g + W;
            the first g tokens in their slots for good, token j after them in slot
            g + (j - g) mod W.
        v: [N, C, G, D] values.
        position: [N] int64, tokens read so far.
        filled: [N] int64, slots of the buffers written so far by any state that shares them; None
            in a ring. Kept on the CPU, where its value decides what happens.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    filled: Tensor | None


def empty(
    batch_size: int,
    capacity: int | None,
    num_heads: int,
    dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> SoftmaxState:
    """State of N sequences that have read nothing: a ring of ``capacity`` slots, or no room yet."""
    k = torch.zeros(batch_size, capacity or 0, num_heads, dim, device=device, dtype=dtype)
    position = torch.zeros(batch_size, device=device, dtype=torch.int64)
    filled = torch.zeros(batch_size, dtype=torch.int64) if capacity is None else None
    return SoftmaxState(k, torch.zeros_like(k), position, filled)


class Place(NamedTuple):
    """Where new tokens stand.

    Attributes:
        row: [B, T] or [1, T] int64, the sequence of each token.
        position: same shape, its place in that sequence, from 0.
        length: [N] int64, new tokens of each sequence.
        first: [N] int64, index of the sequence's first new token among all B * T tokens.
    """

    row: Tensor
    position: Tensor
    length: Tensor
    first: Tensor


def place_tokens(start: Tensor, B: int, T: int, cu_seqlens: Tensor | None) -> Place:
    """Place B rows of T tokens, or a packed row, after ``start`` [N] earlier tokens each."""
    t = torch.arange(T, device=start.device)
    if cu_seqlens is None:
        row = torch.arange(B, device=start.device)
        length = torch.full_like(start, T)
        return Place(row.unsqueeze(1).expand(B, T), start.unsqueeze(1) + t, length, row * T)
    document = document_of_token(cu_seqlens, T)
    first = cu_seqlens[:-1].long()
    position = t - first[document] + start[document]
    return Place(document.unsqueeze(0), position.unsqueeze(0), cu_seqlens.diff().long(), first)


def start(k: Tensor, v: Tensor) -> SoftmaxState:
    """Full cache after the first tokens, k, v [B, T, G, D]. Reads no value on the host."""
    B, T = k.shape[:2]
    k, v = (F.pad(x, (0, 0, 0, 0, 0, max(0, _SMALLEST - T))) for x in (k, v))
    position = torch.full((B,), T, device=k.device)
    return SoftmaxState(k, v, position, torch.full((B,), T))


def append(state: SoftmaxState, k: Tensor, v: Tensor, place: Place) -> SoftmaxState:
    """Full cache with new tokens: k, v [B, T, G, D] go to the slots that ``place`` says.

    Room grows by doubling. Buffers are written in place where that cannot be noticed.
    """
    position = state.position + place.length
    # One read of positions on the host; what is filled is known there.
    before, after = state.position.cpu(), position.to("cpu", copy=True)
    needed = int(after.max()) if len(after) else 0
    buffers = (state.k, state.v)
    owned = state.filled is not None and torch.equal(state.filled.cpu(), before)
    if needed > state.k.shape[1]:
        capacity = max(needed, 2 * state.k.shape[1], _SMALLEST)
        pad = (0, 0, 0, 0, 0, capacity - state.k.shape[1])
        buffers = tuple(F.pad(x, pad) for x in buffers)
        owned, filled = True, before.clone()
    else:
        filled = state.filled
    in_place = owned and not _noticed(buffers, (k, v))
    new = []
    for buffer, x in zip(buffers, (k, v), strict=True):
        x = x.to(buffer.dtype)
        index = (place.row, place.position)
        new.append(buffer.index_put_(index, x) if in_place else buffer.index_put(index, x))
    if in_place and filled is not None:
        filled.copy_(after)
    else:
        filled = after
    return SoftmaxState(new[0], new[1], position, filled)


def _noticed(buffers: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> bool:
    """Whether autograd, or inference mode, would see a write into the buffers."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*buffers, *new)):
        return True
    return buffers[0].is_inference() and not torch.is_inference_mode_enabled()


def turn(state: SoftmaxState, k: Tensor, v: Tensor, place: Place, pinned: int = 0) -> SoftmaxState:
    """Ring with new tokens: k, v [B, T, G, D]; each slot takes the newest token that is its own.

    ``pinned`` is g, the tokens at the start that keep their slots.
    """
    if k.shape[1] == 0:
        return state
    window = state.k.shape[1] - pinned
    position = state.position + place.length
    slot = torch.arange(state.k.shape[1], device=k.device)
    last = position.unsqueeze(1) - 1
    owner = last - (last - slot).remainder(window)  # place in its sequence of the slot's token
    owner = torch.where(slot < pinned, slot.where(slot <= last, -1), owner)
    new = (owner >= state.position.unsqueeze(1)) & ((slot < pinned) | (owner >= pinned))
    token = place.first.unsqueeze(1) + owner - state.position.unsqueeze(1)
    token = token.where(new, 0)
    rings = []
    for ring, x in zip((state.k, state.v), (k, v), strict=True):
        x = x.flatten(0, 1).to(ring.dtype)
        rings.append(torch.where(new[..., None, None], x[token], ring))
    return SoftmaxState(rings[0], rings[1], position, None)


def in_order(ring: Tensor, position: Tensor, pinned: int = 0) -> Tensor:
    """Ring [N, g + W, G, D] -> the last W tokens [N, W, G, D] from the oldest to the newest.

    Places below ``pinned`` = g, or below 0, hold anything.
    """
    window = ring.shape[1] - pinned
    place = position.unsqueeze(1) - window + torch.arange(window, device=ring.device)
    slot = pinned + (place - pinned).remainder(window)
    return ring.gather(1, slot[..., None, None].expand(-1, -1, *ring.shape[2:]))
