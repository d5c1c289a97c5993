"""Decay inside a chunk: the factors that turn the gated recurrence into matrix products.

Within a chunk of C tokens let ``b_t = g_1 + ... + g_t`` per key channel. The chunk needs

    P[t, s] = sum_k q[t, k] k[s, k] exp(b_t - b_s)     for s <= t      scores among its tokens
    q[t] exp(b_t), k[s] exp(b_C - b_s), exp(b_C)                        to read and update the state

``b_t - b_s`` is never positive, but as a matrix product it has to be split over q and k.

*Mild tiles.* ``exp(b_t)`` goes to q and its reciprocal to k, if in no tile (one chunk of one head)
of a segment any channel decays by more than ``MILD`` = 16 nats. Otherwise the middle of the chunk
is the reference, ``exp(b_t - b_mid)`` goes to q, and a tile takes this path if no channel decays by
more than MILD over either half. So no exponent exceeds +16, and nothing is clamped.

*Strong tiles* take the exact path, which has no positive exponent at all. A pair (t, s) is handled
at the one level h = C/2, ..., 2, 1 where t lies in the right and s in the left half of the same
block of 2h tokens: with the block's middle m, ``exp(b_t - b_m)`` and ``exp(b_m - b_s)`` are both at
most 1, and their product is exact even when one of them underflows to 0. Both are products of at
most log2(C) exponentials of *sums* of gates, built bottom-up by ``Tree``, never of differences of
long sums, so gates of -1e4 or -inf cost no precision. A level is one product of C/2 right rows with
C/2 left rows, masked to the blocks: log2(C) quarter products, and 2 C K exponentials in all, in
place of C^2 K / 2.

Gates are floored (``floor_of``) where the start is not the reference: every exponent that contains
such a gate gives exactly 0 in the working precision with or without the floor, so no value changes
and -inf is no special case.

Sizes: N tiles, C tokens of a chunk, K key dimension, D = K (a gate per channel) or 1 (per head).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gla.ops.memory import Buffers, multiply

MILD = 16.0
_BITS = 1 / math.log(2)  # exp2 takes 0.4 of the time of exp


def floor_of(dtype: torch.dtype) -> float:
    """A log-decay whose exponential, times anything at most 1, is exactly 0 in dtype."""
    return -750.0 if dtype == torch.float64 else -110.0


def decay_of(x: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x) for x <= 0, with results below the smallest normal number flushed to 0, as a GPU does.

    Subnormal factors are worth nothing and slow a CPU's exponentials and products several times.
    """
    smallest = -708.0 if x.dtype == torch.float64 else -87.0
    return torch.threshold(x, smallest, -math.inf, out=out).exp_()


def _flushed(x: Tensor, out: Tensor) -> Tensor:
    """Products of decays in out, those below the smallest normal number as 0."""
    return torch.threshold(x, torch.finfo(x.dtype).tiny, 0.0, out=out)


class Strong(NamedTuple):
    """The tiles of a segment that take the exact path.

    Attributes:
        which: [M] their numbers among the segment's tiles, or None where all of them do.
        tree: their decays over parts of a chunk.
    """

    which: Tensor | None
    tree: Tree

    def take(self, x: Tensor, name: str, work: Buffers) -> Tensor:
        """Their part [M, ...] of x [N, ...]: x itself, or a copy in the buffer of this name."""
        return _take(x, self.which, name, work)


def _take(x: Tensor, which: Tensor | None, name: str, work: Buffers) -> Tensor:
    if which is None:
        return x
    out = work(name, len(which), *x.shape[1:], dtype=x.dtype)
    return torch.index_select(x, 0, which, out=out)


class Factors(NamedTuple):
    """What scales q, k and the state in one tile; all exponents at most MILD.

    Attributes:
        to_q, to_k: q~ = q * to_q, k~ = k * to_k. [N, C, D], or by tokens [rows, count * C, H, D].
        before: [N, D, 1] scales the state that q~ reads, or None for 1.
        after: [N, D, 1] scales k~^T v on its way into the state, or None for 1.
        total: [N, D, 1] decay of the state over the chunk.
        strong: the tiles that take the exact path, or None.
    """

    to_q: Tensor
    to_k: Tensor
    before: Tensor | None
    after: Tensor | None
    total: Tensor
    strong: Strong | None


def _add_up(x: Tensor, reverse: bool = False) -> Tensor:
    """Running sums of x [N, C, D] over its tokens, in place; from the last one on if ``reverse``.

    By halving: each block's half takes what the other half ends with. At most log2(C) numbers are
    added one after another, so 63 small gates after a large one do not all round the same way.
    """
    h = 1
    while h < x.shape[1]:
        left, right = halves(x, h)
        if reverse:
            left += right[:, :, :1]
        else:
            right += left[:, :, -1:]
        h *= 2
    return x


def _from_middle(x: Tensor, out: Tensor) -> Tensor:
    """b_t - b_mid in out, from gates x [N, C, D]: sums start at the middle, so nothing cancels."""
    half = x.shape[1] // 2
    torch.neg(x[:, 1:half], out=out[:, : half - 1])
    out[:, half - 1] = 0.0
    out[:, half:] = x[:, half:]
    _add_up(out[:, :half], reverse=True)
    _add_up(out[:, half:])
    return out


def factors_from_start(g: Tensor, C: int, H: int, work: Buffers) -> Factors | None:
    """Factors with the chunks' starts as reference; None where a channel decays too much for that.

    Args:
        g: gates in the order of the tokens [rows, count * C, G, D], G a divisor of H.
        C, H: tokens of a chunk, heads.
        work: to_q and to_k will lie in it.
    """
    rows, tokens, G, D = g.shape
    chunks = (rows * tokens // C, C, G * D)
    x, to_k = (work(name, *chunks) for name in ("to_q_tokens", "to_k_tokens"))
    multiply(g, _BITS, out=x.view(g.shape))
    total = _add_up(x)[:, -1]
    if not bool(total.min() >= -MILD * _BITS):  # so written that NaN is too much
        return None
    torch.reciprocal(x.exp2_(), out=to_k)
    to_q, to_k = (_to_heads(y.view(rows, tokens, G, D), H) for y in (x, to_k))
    total = _to_heads(total.view(rows, tokens // C, G, D), H).reshape(-1, D, 1)
    return Factors(to_q, to_k, None, total, total, None)


def _to_heads(x: Tensor, H: int) -> Tensor:
    """[..., G, D] -> [..., H, D]: each of G heads for H / G."""
    return x if x.shape[2] == H else x.repeat_interleave(H // x.shape[2], 2)


def factors(g: Tensor, work: Buffers) -> Factors:
    """Factors of N tiles from their gates g [N, C, D], which are floored in place.

    to_q and to_k lie in ``work``.
    """
    N, C, D = g.shape
    x = _from_middle(g.clamp_min_(floor_of(g.dtype)), work("to_q", N, C, D))
    decays = torch.stack((g[:, 0] - x[:, 0], x[:, -1]))  # of the chunks' halves
    total = decay_of(decays.sum(0)).unsqueeze(-1)
    mild = (decays >= -MILD).all(-1).all(0)
    if not bool(mild.any()):
        tree = Tree(g, work)
        return Factors(tree.prefix, tree.suffix, None, None, total, Strong(None, tree))
    before, after = decay_of(decays).unsqueeze(-1)
    to_k = torch.reciprocal(x.exp_(), out=work("to_k", N, C, D))
    which = (~mild).nonzero().squeeze(-1)
    if not len(which):
        return Factors(x, to_k, before, after, total, None)
    tree = Tree(_take(g, which, "g_strong", work), work)
    x.index_copy_(0, which, tree.prefix)
    to_k.index_copy_(0, which, tree.suffix)
    before[which] = after[which] = 1.0
    return Factors(x, to_k, before, after, total, Strong(which, tree))


class Tree:
    """Decays over parts of aligned blocks of 2, 4, ..., C tokens, from gates g [N, C, D].

    Attributes:
        left, right: {h: [N, C/2h, h, D]}; in a block of 2h tokens with middle m, the right half
            holds exp(g_{m+1} + ... + g_t) and the left half exp(g_{s+1} + ... + g_m).
        prefix, suffix: [N, C, D] decays of the whole chunk up to t, and after t.
    """

    def __init__(self, g: Tensor, work: Buffers) -> None:
        N, C, D = g.shape
        # Decays of blocks are exponentials of sums: multiplied up from single tokens' decays, 64
        # factors that all round the same way would be off by 2e-6.
        total, decay = g, decay_of(g, out=work("prefix", N, C, D))
        self.prefix, self.suffix = decay, work("suffix", N, C, D).fill_(1.0)
        self.left: dict[int, Tensor] = {}
        self.right: dict[int, Tensor] = {}
        h = 1
        while h < C:
            suffix, prefix = halves(self.suffix, h)[0], halves(self.prefix, h)[1]
            self.left[h] = _flushed(suffix, out=work(f"left {h}", *suffix.shape))
            self.right[h] = _flushed(prefix, out=work(f"right {h}", *prefix.shape))
            left, right = decay.view(N, -1, 2, 1, D).unbind(2)
            suffix *= right  # before the prefixes: at h = 1 the decays lie in them
            prefix *= left
            h *= 2
            if h < C:
                left, right = total.view(N, -1, 2, 1, D).unbind(2)
                total = torch.add(left, right, out=work(f"total {h}", *left.shape))
                decay = decay_of(total, out=work(f"decay {h}", *total.shape))
        for x in (self.prefix, self.suffix):
            _flushed(x, out=x)


def halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Views [N, C/2h, h, D] of the left and right halves of x [N, C, D]'s blocks of 2h tokens."""
    left, right = x.unflatten(1, (-1, 2, h)).unbind(2)
    return left, right


def level_pairs(P: Tensor, h: int) -> Tensor:
    """View [N, C/2h, h, C/2h, h] of P [N, C, C]: rows of right halves, columns of left halves."""
    N, C, _ = P.shape
    return P.view(N, C // (2 * h), 2, h, C // (2 * h), 2, h)[:, :, 1, :, :, 0]


@functools.lru_cache(maxsize=64)
def _same_block(C: int, h: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Mask of ``level_pairs``, [C/2h, 1, C/2h, 1]: row and column of the same block."""
    return torch.eye(C // (2 * h), dtype=dtype, device=device).view(C // (2 * h), 1, -1, 1)


class Levels:
    """q and k of the strong tiles at every level: what the exact scores and their gradients share.

    Args:
        q, k: [M, C, K], of all tiles of the segment.
        strong: which of them are strong, N, and their decays.
    """

    def __init__(self, q: Tensor, k: Tensor, strong: Strong, work: Buffers) -> None:
        self.q, self.k = strong.take(q, "q_strong", work), strong.take(k, "k_strong", work)
        self.strong, self.tree, self.work = strong, strong.tree, work
        right, left = self.tree.right.items(), self.tree.left.items()
        self.right = {h: self._at(h, "q", halves(self.q, h)[1], e) for h, e in right}
        self.left = {h: self._at(h, "k", halves(self.k, h)[0], e) for h, e in left}

    def _at(self, h: int, name: str, x: Tensor, decay: Tensor) -> Tensor:
        return torch.mul(x, decay, out=self.work(f"{name} {h}", *x.shape))

    def scores(self) -> Tensor:
        """The exact P [N, C, C], lower triangular, in a buffer."""
        N, C, K = self.q.shape
        P = self.work("P_exact", N, C, C).zero_()
        own = torch.mul(self.q, self.k, out=self.work("own", N, C, K))
        P.diagonal(dim1=1, dim2=2).copy_(own.sum(-1))
        pairs = self.work("pairs", N, C // 2, C // 2)
        for h, right in self.right.items():
            left = self.left[h].flatten(1, 2).transpose(1, 2)
            torch.bmm(right.flatten(1, 2), left, out=pairs)
            into = level_pairs(P, h)
            into.addcmul_(pairs.view(into.shape), _same_block(C, h, P.dtype, P.device))
        return P.tril_()  # NaN and infinity of later tokens, times the mask's 0

    def gradients(
        self, dP: Tensor, d_prefix: Tensor, d_suffix: Tensor, d_total: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients through ``scores`` and through the sums of the chunk's gates, in buffers.

        Args:
            dP: [N, C, C], lower triangular.
            d_prefix, d_suffix, d_total: [N, C, D], [N, C, D], [N, D] with respect to the logarithms
                of tree.prefix and tree.suffix, and the sum of all gates; the first two are
                overwritten.

        Returns:
            dq [N, C, K], dk [N, C, K], dg [N, C, D]. Every dg is a plain sum over the pairs whose
            decay contains that gate; no large terms cancel, and a reset gets exactly 0.
        """
        (N, C, K), D, work = self.q.shape, d_prefix.shape[-1], self.work
        diagonal = dP.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        dq = torch.mul(diagonal, self.k, out=work("dq_exact", N, C, K))
        dk = torch.mul(diagonal, self.q, out=work("dk_exact", N, C, K))
        block = work("pairs", N, C // 2, C // 2)
        d_right, d_left = (work(name, N, C // 2, K) for name in ("d_right", "d_left"))
        total = d_total.view(N, 1, 1, D)
        for h in sorted(self.right, reverse=True):
            right, left = self.right[h], self.left[h]
            pairs = level_pairs(dP, h)
            same = _same_block(C, h, dP.dtype, dP.device)
            torch.mul(pairs, same, out=block.view(pairs.shape))
            torch.bmm(block, left.flatten(1, 2), out=d_right)
            torch.bmm(block.transpose(1, 2), right.flatten(1, 2), out=d_left)
            halves(dq, h)[1].addcmul_(d_right.view_as(right), self.tree.right[h])
            halves(dk, h)[0].addcmul_(d_left.view_as(left), self.tree.left[h])
            prefix, suffix = halves(d_prefix, h)[1], halves(d_suffix, h)[0]
            sums = work(f"sums {h}", N, C // (2 * h), 2, D)
            torch.sum(prefix, 2, out=sums[:, :, 0])
            torch.sum(suffix, 2, out=sums[:, :, 1])
            total = sums.add_(total.view(N, -1, 1, D))
            for out, x, y in ((prefix, d_right, right), (suffix, d_left, left)):
                if D == K:
                    out.addcmul_(x.view_as(y), y)
                else:
                    out += shared(x.view_as(y).mul_(y), D)
        return dq, dk, d_prefix.add_(total.view(N, C, D))


def shared(x: Tensor, D: int) -> Tensor:
    """[..., K] -> [..., D]: summed over the key channels that share a gate when D is 1."""
    return x if D == x.shape[-1] else x.sum(-1, keepdim=True)


def mild_gate_grad(d_exponent: Tensor, d_start: Tensor, d_end: Tensor, work: Buffers) -> Tensor:
    """Gradient of mild tiles' gates [N, C, D], in a buffer.

    In the right half d_end plus the sum of d_exponent over t >= u, in the left half d_start minus
    the sum over t < u, which is the same and cancels less.

    Args:
        d_exponent: [N, C, D], q~ dq~ - k~ dk~.
        d_start, d_end: [N, D], sum over V of the state times its gradient before and after the
            chunk: S dS and S' dS'. Without them dq, dk and dv stay right and dg is wrong.
    """
    N, C, D = d_exponent.shape
    half, dg = C // 2, work("dg", N, C, D)
    dg[:, 0] = d_start
    torch.neg(d_exponent[:, : half - 1], out=dg[:, 1:half])
    dg[:, half:] = d_exponent[:, half:]
    dg[:, -1] += d_end
    _add_up(dg[:, :half])
    _add_up(dg[:, half:], reverse=True)
    return dg
