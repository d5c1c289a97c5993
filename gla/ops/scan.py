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

import itertools
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
        updates: [rows, count, H, K, V], what each chunk adds.
        decays: [rows, count, H, D, 1] or None.
    """

    states: Tensor
    bound: Tensor
    updates: Tensor
    decays: Tensor | None


def state_scan(
    layout: Layout,
    s: Segment,
    updates: Tensor,
    decays: Tensor | None,
    S: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
    work: Buffers,
) -> Scan:
    """Run the state over the chunks of a segment, from S [rows, H, K, V] before it.

    States at the starts of sequences are read from ``initial`` (None: zeros), those at their ends
    written to ``final``, [N, H, K, V] both.
    """
    scan = _new_scan("states", layout, s, updates, decays, work)
    states, bound, updates, decays = scan
    states[:, 0].copy_(S)
    if s.first in layout.starts:
        _read(initial, layout.rows_of(layout.starts[s.first], s), states[:, 0])
    if _in_halves(layout, s):
        _both_halves(scan, reverse=False)
        scan = scan._replace(bound=bound[1:])
        if final is not None and s.first + s.count - 1 in layout.ends:
            final[layout.rows_of(layout.ends[s.first + s.count - 1], s)] = scan.bound
        return scan
    before = states.unbind(1)
    for j, after in enumerate((*before[1:], bound)):
        chunk = s.first + j
        if j and chunk in layout.starts:
            _read(initial, layout.rows_of(layout.starts[chunk], s), before[j])
        _step(updates[:, j], before[j], None if decays is None else decays[:, j], after)
        if final is not None and chunk in layout.ends:
            final[layout.rows_of(layout.ends[chunk], s)] = after
    return scan


def gradient_scan(
    layout: Layout,
    s: Segment,
    updates: Tensor,
    decays: Tensor | None,
    dS: Tensor,
    grad_final: Tensor,
    grad_initial: Tensor,
    work: Buffers,
) -> Scan:
    """Run the state's gradient back over the chunks of a segment, from dS [rows, H, K, V] after it.

    Gradients at the ends of sequences are read from ``grad_final``, those at their starts written
    to ``grad_initial``, [N, H, K, V] both.
    """
    scan = _new_scan("dS", layout, s, updates, decays, work)
    states, bound, updates, decays = scan
    last = s.first + s.count - 1
    states[:, -1].copy_(dS)
    if last in layout.ends:
        _read(grad_final, layout.rows_of(layout.ends[last], s), states[:, -1])
    if _in_halves(layout, s):
        _both_halves(scan, reverse=True)
        scan = scan._replace(bound=bound[:1])
        if s.first in layout.starts:
            grad_initial[layout.rows_of(layout.starts[s.first], s)] = scan.bound
        return scan
    after = states.unbind(1)
    for j, before in reversed(list(enumerate((bound, *after[:-1])))):
        chunk = s.first + j
        if chunk != last and chunk in layout.ends:
            _read(grad_final, layout.rows_of(layout.ends[chunk], s), after[j])
        _step(updates[:, j], after[j], None if decays is None else decays[:, j], before)
        if chunk in layout.starts:
            grad_initial[layout.rows_of(layout.starts[chunk], s)] = before
    return scan


def products_at_bounds(
    layout: Layout, s: Segment, scan: Scan, back: Scan, work: Buffers
) -> tuple[Tensor, Tensor]:
    """Sum over V of the state times its gradient, before and after each chunk, [M, K] each."""
    assert scan.decays is not None
    inner = scan.states[:, 1:]
    inner = torch.mul(inner, back.states[:, :-1], out=work("S_dS", *inner.shape)).sum(-1)
    start = torch.cat(((scan.states[:, 0] * back.bound).sum(-1).unsqueeze(1), inner), 1)
    end = torch.cat((inner, (scan.bound * back.states[:, -1]).sum(-1).unsqueeze(1)), 1)
    for j in range(1, s.count):
        if s.first + j in layout.starts:  # between two sequences: S of one, dS of the other
            i = j - 1
            before = torch.addcmul(back.updates[:, j], back.states[:, j], scan.decays[:, j])
            start[:, j] = (scan.states[:, j] * before).sum(-1)
            after = torch.addcmul(scan.updates[:, i], scan.states[:, i], scan.decays[:, i])
            end[:, i] = (after * back.states[:, i]).sum(-1)
    return start.flatten(0, 2), end.flatten(0, 2)


def _new_scan(
    name: str,
    layout: Layout,
    s: Segment,
    updates: Tensor,
    decays: Tensor | None,
    work: Buffers,
) -> Scan:
    """Updates [M, K, V] and decays [M, D, 1] by chunk, and room for states and bounds."""
    updates = updates.view(s.rows, s.count, -1, *updates.shape[1:])
    if decays is not None:
        decays = decays.view(s.rows, s.count, -1, *decays.shape[1:])
    ends = 2 if _in_halves(layout, s) else s.rows
    bound = work(f"{name} bound", ends, *updates.shape[2:])
    return Scan(work(name, *updates.shape), bound, updates, decays)


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


def _in_halves(layout: Layout, s: Segment) -> bool:
    inside = range(s.first + 1, s.first + s.count)
    even = s.rows == 1 and s.count % 2 == 0 and s.count > 2
    return even and not any(chunk in layout.starts for chunk in inside)


def _both_halves(scan: Scan, reverse: bool) -> None:
    """The scan of one row's chunks, two halves at once, from the entry that lies in its place.

    Its bound is [2, H, K, V]: what both halves end with.
    """
    states, updates = (x.view(2, -1, *x.shape[2:]) for x in (scan.states, scan.updates))
    decays = over = None
    if scan.decays is not None:
        decays = scan.decays.view(2, -1, *scan.decays.shape[2:])
        over = decays.flip(1).cumprod(1).flip(1) if reverse else decays.cumprod(1)
    order = list(range(states.shape[1]))[:: -1 if reverse else 1]
    first, second, last = order[0], order[1], order[-1]
    near, far = (1, 0) if reverse else (0, 1)
    rest, before_rest = (slice(-2), slice(1, -1)) if reverse else (slice(2, None), slice(1, -1))

    state = updates[:, first]  # both from 0: what lies at the far entry is not read yet
    for i, after in itertools.pairwise(order[1:]):
        _step(updates[:, i], state, _at(decays, i), states[:, after])
        state = states[:, after]

    # What the near half ends with is the entry of the far one; then both carry theirs through.
    entry = states[:, first]
    _step(updates[near, last], state[near], _at(decays, last, near), entry[far])
    _step(entry[far], entry[near], _at(over, last, near), entry[far])
    _step(updates[:, first], entry, _at(over, first), states[:, second])
    _step(states[:, rest], entry.unsqueeze(1), _at(over, before_rest), states[:, rest])
    _step(updates[:, last], states[:, last], _at(decays, last), scan.bound)


def _at(decays: Tensor | None, i: int | slice, half: int | slice = slice(None)) -> Tensor | None:
    return None if decays is None else decays[half, i]
