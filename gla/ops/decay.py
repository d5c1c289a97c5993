"""Decay inside a chunk: the factors that turn the gated recurrence into matrix products.

Within a chunk of C tokens let ``b_t = g_1 + ... + g_t`` per key channel. The chunk needs

    P[t, s] = sum_k q[t, k] k[s, k] exp(b_t - b_s)     for s <= t      scores among its tokens
    q[t] exp(b_t), k[s] exp(b_C - b_s), exp(b_C)                        to read and update the state

``b_t - b_s`` is never positive, but as a matrix product it has to be split over q and k.

*Mild tiles.* With the middle of the chunk as reference, ``exp(b_t - b_mid)`` goes to q and its
reciprocal to k. A tile (one chunk of one head) takes this path only if no channel decays by more
than ``MILD`` = 24 nats over either half, so no exponent exceeds +24 and nothing is clamped.

*Strong tiles* take the exact path, which has no positive exponent at all. A pair (t, s) is handled at
the one level h = C/2, ..., 2, 1 where t lies in the right and s in the left half of the same block of
2h tokens: with the block's middle m, ``exp(b_t - b_m)`` and ``exp(b_m - b_s)`` are both at most 1,
and their product is exact even when one of them underflows to 0. Both exponents are *sums* of gates,
built bottom-up by ``Tree``, never differences of long sums, so gates of -1e4 or -inf cost no
precision. A level is one small product per block; log2(C) levels replace C^2 K exponentials.

Gates are floored at ``FLOOR`` first: every exponent that contains such a gate gives exactly 0 in the
working precision with or without the floor, so no value changes, and -inf needs no special case.

Sizes: N tiles, C tokens of a chunk, K key dimension, D = K (a gate per channel) or 1 (per head).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

MILD = 24.0
_BLOCK = 32  # levels below this are computed by masked products of this size: small ones are slow


def floor_of(dtype: torch.dtype) -> float:
    """A log-decay whose exponential, times anything at most 1, is exactly 0 in dtype."""
    return -750.0 if dtype == torch.float64 else -110.0


class Factors(NamedTuple):
    """What scales q, k and the state in one tile; all exponents at most MILD.

    Attributes:
        to_q, to_k: [N, C, D]; q~ = q * to_q, k~ = k * to_k.
        before: [N, D] scales the state that q~ reads.
        after: [N, D] scales k~^T v on its way into the state.
        total: [N, D] decay of the state over the chunk.
        strong: [M] indices of the tiles that take the exact path, or None.
        tree: sums of gates of the strong tiles, or None.
    """

    to_q: Tensor
    to_k: Tensor
    before: Tensor
    after: Tensor
    total: Tensor
    strong: Tensor | None
    tree: Tree | None


@functools.lru_cache(maxsize=32)
def _from_middle(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[C, C] matrix that maps gates to b_t - b_mid, mid = C/2 - 1, without cancellation."""
    t, u = torch.arange(C, device=device).unsqueeze(1), torch.arange(C, device=device)
    mid = C // 2 - 1
    return ((u > mid) & (u <= t)).to(dtype) - ((u <= mid) & (u > t)).to(dtype)


def factors(g: Tensor) -> Factors:
    """Factors of N tiles from their floored gates g [N, C, D]."""
    N, C, D = g.shape
    half = C // 2
    x = torch.matmul(_from_middle(C, g.dtype, g.device), g)
    first, last = g[:, 0] - x[:, 0], x[:, -1].clone()  # log-decay of the two halves
    mild = (first >= -MILD) & (last >= -MILD)
    mild = mild.all(-1)
    to_q = x.exp_()
    to_k = to_q.reciprocal()
    before, after, total = first.exp(), last.exp(), (first + last).exp()
    if bool(mild.all()):
        return Factors(to_q, to_k, before, after, total, None, None)
    strong = (~mild).nonzero().squeeze(-1)
    tree = Tree(g.index_select(0, strong))
    to_q.index_copy_(0, strong, tree.prefix.exp())
    to_k.index_copy_(0, strong, tree.suffix.exp())
    before.index_fill_(0, strong, 1.0)
    after.index_fill_(0, strong, 1.0)
    return Factors(to_q, to_k, before, after, total, strong, tree)


class Tree:
    """Sums of gates over aligned blocks of 1, 2, 4, ..., C tokens.

    Attributes:
        levels: {h: [N, C, D]}; in a block of 2h tokens with middle m, the right half holds
            g_{m+1} + ... + g_t and the left half g_{s+1} + ... + g_m.
        prefix, suffix: [N, C, D] the same for the whole chunk: sums up to t, and after t.
    """

    def __init__(self, g: Tensor) -> None:
        N, C, D = g.shape
        prefix, suffix, total = g.clone(), torch.zeros_like(g), g
        self.levels: dict[int, Tensor] = {}
        h = 1
        while h < C:
            pre, suf = prefix.view(N, -1, 2, h, D), suffix.view(N, -1, 2, h, D)
            total = total.reshape(N, -1, 2, 1, D)
            self.levels[h] = torch.stack((suf[:, :, 0], pre[:, :, 1]), 2).view(N, C, D)
            pre[:, :, 1] += total[:, :, 0]
            suf[:, :, 0] += total[:, :, 1]
            total = total.sum(2)
            h *= 2
        self.prefix, self.suffix = prefix, suffix


@functools.lru_cache(maxsize=32)
def _level_mask(h: int, block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[block, block] mask of the pairs of level h: t in a right half, s in the left half beside it."""
    t, s = torch.arange(block, device=device).unsqueeze(1), torch.arange(block, device=device)
    same = t // (2 * h) == s // (2 * h)
    return (same & (t // h % 2 == 1) & (s // h % 2 == 0)).to(dtype)


def _blocks(P: Tensor, size: int) -> Tensor:
    """View [N, nb, size, size] of the diagonal blocks of P [N, C, C]."""
    N, C, _ = P.shape
    nb = C // size
    return P.view(N, nb, size, nb, size).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def exact_scores(q: Tensor, k: Tensor, tree: Tree) -> Tensor:
    """P [N, C, C], lower triangular, from q, k [N, C, K] by levels."""
    N, C, K = q.shape
    P = q.new_zeros(N, C, C)
    P.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    for h, level in tree.levels.items():
        e = level.exp()
        if 2 * h > _BLOCK:
            right = (q * e).view(N, -1, 2, h, K)[:, :, 1]
            left = (k * e).view(N, -1, 2, h, K)[:, :, 0]
            _blocks(P, 2 * h)[:, :, h:, :h] = right @ left.transpose(-1, -2)
        else:
            size = min(_BLOCK, C)
            right, left = (q * e).view(N, -1, size, K), (k * e).view(N, -1, size, K)
            scores = right @ left.transpose(-1, -2)
            _blocks(P, size).add_(scores.mul_(_level_mask(h, size, q.dtype, q.device)))
    return P


def exact_grads(
    q: Tensor, k: Tensor, tree: Tree, dP: Tensor, dg_prefix: Tensor, dg_suffix: Tensor, dg_total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``exact_scores`` and of the chunk's own sums of gates.

    Args:
        q, k: [N, C, K].
        tree: of the gates [N, C, D].
        dP: [N, C, C] lower triangular.
        dg_prefix, dg_suffix, dg_total: [N, C, D], [N, C, D], [N, D] gradients with respect to
            tree.prefix, tree.suffix and the sum of all gates; the first two are overwritten.

    Returns:
        dq [N, C, K], dk [N, C, K], dg [N, C, D]. Every dg is a plain sum over the pairs whose decay
        contains that gate; no large terms cancel, so a reset gets a gradient of exactly 0.
    """
    N, C, K = q.shape
    D = dg_prefix.shape[-1]
    diagonal = dP.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq, dk = diagonal * k, diagonal * q
    dg_total = dg_total.view(N, 1, 1, D)
    for h in sorted(tree.levels, reverse=True):
        e = tree.levels[h].exp()
        right, left = q * e, k * e
        if 2 * h > _BLOCK:
            block = _blocks(dP, 2 * h)[:, :, h:, :h]
            d_right, d_left = torch.zeros_like(right), torch.zeros_like(left)
            halves = [x.view(N, -1, 2, h, K) for x in (right, left, d_right, d_left)]
            halves[2][:, :, 1] = block @ halves[1][:, :, 0]
            halves[3][:, :, 0] = block.transpose(-1, -2) @ halves[0][:, :, 1]
        else:
            size = min(_BLOCK, C)
            block = _blocks(dP, size) * _level_mask(h, size, q.dtype, q.device)
            d_right = (block @ left.view(N, -1, size, K)).view(N, C, K)
            d_left = (block.transpose(-1, -2) @ right.view(N, -1, size, K)).view(N, C, K)
        # d_right is 0 on left halves and d_left on right halves: one array holds both.
        dq.addcmul_(d_right, e.expand_as(q))
        dk.addcmul_(d_left, e.expand_as(k))
        through = d_right.mul_(right).add_(d_left.mul_(left))
        if D == 1:
            through = through.sum(-1, keepdim=True)
        through = through.view(N, -1, 2, h, D)
        pre, suf = dg_prefix.view(N, -1, 2, h, D), dg_suffix.view(N, -1, 2, h, D)
        sums = torch.stack((pre[:, :, 1].sum(2), suf[:, :, 0].sum(2)), 2)
        dg_total = (dg_total.view(N, -1, 1, D) + sums).view(N, -1, 1, D)
        pre[:, :, 1] += through[:, :, 1]
        suf[:, :, 0] += through[:, :, 0]
    return dq, dk, dg_prefix + dg_total.view(N, C, D)


def mild_gate_grad(d_exponent: Tensor, d_before: Tensor, d_after: Tensor, d_total: Tensor) -> Tensor:
    """Gradient of mild tiles' gates [N, C, D].

    Args:
        d_exponent: [N, C, D] with respect to b_t - b_mid: q~ dq~ - k~ dk~.
        d_before, d_after, d_total: [N, D] with respect to the log-decays of the first half, of the
            second half and of the whole chunk. These are the terms that the states at the chunk's
            ends bring; without them dq, dk and dv stay right and dg is wrong.
    """
    N, C, D = d_exponent.shape
    dg = torch.matmul(_from_middle(C, d_exponent.dtype, d_exponent.device).T, d_exponent)
    dg[:, : C // 2] += (d_before + d_total).unsqueeze(1)
    dg[:, C // 2 :] += (d_after + d_total).unsqueeze(1)
    return dg
