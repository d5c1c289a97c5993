"""The recurrence over the chunks of a segment: the state before each, or its gradient after each.

    forward   S_j+1  = D_j S_j  + W_j        W_j = after * (k~^T v), S_j before chunk j
    reverse   dS_j-1 = D_j dS_j + R_j        R_j = before * (q~^T do), dS_j after chunk j

One chunk after the other, or where the segment has one row of four chunks or more, an even number,
and no document ends inside it, both halves of its chunks at once, each from 0; what the first half
ends with is then carried through the second. torch cuts the tiles of an operation in two halves for
two threads, and what one core wrote the other reads at 2 GB/s when the two share no cache. One
chunk after the other is too little work for two threads: half of the updates and half of the states
would go that way.

Sizes: C tokens of a chunk, H heads, D = K or 1 key channels with a gate of their own, V values;
``rows`` and ``count`` of the segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gla.ops.layout import Layout, Segment
from gla.ops.memory import Buffers


class Scan(NamedTuple):
    """A state, or its gradient, at the bounds of a segment's chunks.

    Attributes:
        states: [rows, count, H, K, V], the state before each chunk, or its gradient after each.
        bound: [rows, H, K, V], the state after the segment, or its gradient before it.
    """

    states: Tensor
    bound: Tensor


def scan(
    layout: Layout,
    s: Segment,
    updates: Tensor,
    decays: Tensor | None,
    entry: Tensor,
    given: Tensor | None,
    left: Tensor | None,
    work: Buffers,
    reverse: bool = False,
) -> Scan:
    """Run the state over the chunks of a segment, or its gradient back over them (``reverse``).

    Args:
        layout, s: where the segment lies.
        updates, decays: [M, K, V] and [M, D, 1] or None.
        entry: [rows, H, K, V], what the segment before ended with.
        given: [N, H, K, V], what each sequence enters with; None is zeros.
        left: [N, H, K, V], receives what each sequence ends with.
        work: the result lies in it.
        reverse: from the last chunk to the first.
    """
    entries, exits = (layout.ends, layout.starts) if reverse else (layout.starts, layout.ends)
    order = range(s.count)[::-1] if reverse else range(s.count)
    # One row of which no sequence ends inside; see the module's docstring.
    halves = s.rows == 1 and s.count % 2 == 0 and s.count > 2
    halves = halves and not any(s.first + j in entries for j in order[1:])
    updates = updates.view(s.rows, s.count, -1, *updates.shape[1:])
    if decays is not None:
        decays = decays.view(s.rows, s.count, -1, *decays.shape[1:])
    name = "dS" if reverse else "states"
    states = work(name, *updates.shape)
    ends = work(f"{name} bound", 2 if halves else s.rows, *updates.shape[2:])
    bound = ends if not halves else ends[:1] if reverse else ends[1:]

    places = [*states.unbind(1)[:: -1 if reverse else 1], bound]
    places[0].copy_(entry)
    for i, j in enumerate(order):
        chunk = s.first + j
        if chunk in entries:
            _read(given, layout.rows_of(entries[chunk], s), places[i])
        if not halves:
            _step(updates[:, j], places[i], _at(decays, j), places[i + 1])
        elif i == 0:
            _both_halves(states, updates, decays, ends, reverse)
        if left is not None and chunk in exits:
            left[layout.rows_of(exits[chunk], s)] = places[i + 1]
    return Scan(states, bound)


def _read(states: Tensor | None, rows: slice, out: Tensor) -> None:
    """Copy rows of [N, H, K, V], or zeros, into out [rows, H, K, V]."""
    if states is None:
        out.zero_()
    else:
        out.copy_(states[rows])


def _step(update: Tensor, state: Tensor, decay: Tensor | None, out: Tensor) -> None:
    if decay is None:
        torch.add(update, state, out=out)
    else:
        torch.addcmul(update, state, decay, out=out)


def _at(decays: Tensor | None, i: int | slice, half: int | slice = slice(None)) -> Tensor | None:
    return None if decays is None else decays[half, i]


def _both_halves(
    states: Tensor, updates: Tensor, decays: Tensor | None, ends: Tensor, reverse: bool
) -> None:
    """The scan of one row's chunks, two halves at once, from the entry that lies in its place.

    states, updates [1, count, H, K, V], decays [1, count, H, D, 1]; ends [2, H, K, V] receives what
    both halves end with.
    """
    states, updates = (x.view(2, -1, *x.shape[2:]) for x in (states, updates))
    over = None
    if decays is not None:
        decays = decays.view(2, -1, *decays.shape[2:])
        over = decays.flip(1).cumprod(1).flip(1) if reverse else decays.cumprod(1)
    first, last, step = (-1, 0, -1) if reverse else (0, -1, 1)
    near, far = (1, 0) if reverse else (0, 1)
    rest, before_rest = (slice(-2), slice(1, -1)) if reverse else (slice(2, None), slice(1, -1))
    # Views of each chunk in the order of the scan; taken one by one they cost as much as a sum.
    places, added = (x.unbind(1)[::step] for x in (states, updates))
    kept = [None] * len(places) if decays is None else decays.unbind(1)[::step]

    state = added[0]  # both from 0: what lies at the far entry is not read yet
    for i in range(1, len(places) - 1):
        _step(added[i], state, kept[i], places[i + 1])
        state = places[i + 1]

    # What the near half ends with is the entry of the far one; then both carry theirs through.
    entry = places[0]
    _step(added[-1][near], state[near], _at(decays, last, near), entry[far])
    _step(entry[far], entry[near], _at(over, last, near), entry[far])
    _step(added[0], entry, _at(over, first), places[1])
    _step(states[:, rest], entry.unsqueeze(1), _at(over, before_rest), states[:, rest])
    _step(added[-1], places[-1], kept[-1], ends)
