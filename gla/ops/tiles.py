"""What the chunkwise form's forward and backward share: a segment's tiles, scores, products.

Sizes: M = rows * count * H tiles of a segment, C tokens of a chunk, K and V dimensions of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gla.ops.decay import Factors, Levels, factors, factors_from_start
from gla.ops.layout import Layout, Segment
from gla.ops.memory import Buffers


class Tiles(NamedTuple):
    """The inputs of one segment, [M, C, K or V]; q, k already times their factors."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Factors | None
    levels: Levels | None  # of the strong tiles


def load_tiles(layout: Layout, s: Segment, inputs: list[Tensor], work: Buffers) -> Tiles:
    """Read q, k, v and, if there is one, the gate [B, T, G, 1 or K]."""
    M, C = s.rows * s.count * layout.H, layout.C
    q, k, v, *gates = inputs
    v = layout.load(v, s, work("v", M, C, v.shape[-1], dtype=work.product))
    if not gates:
        q, k = (
            layout.load(x, s, work(name, M, C, x.shape[-1], dtype=work.product))
            for name, x in (("q", q), ("k", k))
        )
        return Tiles(q, k, v, None, None)
    g = gates[0]
    f = factors_from_start(layout.tokens(g, s), C, layout.H, work)
    if f is None:
        f = factors(layout.load(g, s, work("g", M, C, g.shape[-1])), work)
    if f.to_q.dim() == 4:  # by tokens: applied before the tiles are cut
        q, k = (
            layout.load(x, s, work(name, M, C, x.shape[-1], dtype=work.product), factor)
            for name, x, factor in (("q~", q, f.to_q), ("k~", k, f.to_k))
        )
        return Tiles(q, k, v, f, None)
    q, k = (layout.load(x, s, work(n, M, C, x.shape[-1])) for n, x in (("q", q), ("k", k)))
    levels = f.strong and Levels(q, k, f.strong, work)
    q = torch.mul(q, f.to_q, out=work("q_scaled", *q.shape))
    k = torch.mul(k, f.to_k, out=work("k_scaled", *k.shape))
    q, k = work.narrow("q~", q), work.narrow("k~", k)
    return Tiles(q, k, v, f, levels)


def scores(tiles: Tiles, work: Buffers) -> Tensor:
    """P [M, C, C], lower triangular: by the factors, or exactly for the strong tiles."""
    M, C, _ = tiles.q.shape
    exact = tiles.levels and tiles.levels.scores()
    which = tiles.levels and tiles.levels.strong.which
    if exact is not None and which is None:
        return work.narrow("P", exact)
    P = work("P", M, C, C, dtype=work.product)
    torch.bmm(tiles.q, tiles.k.transpose(1, 2), out=P).tril_()
    if exact is not None and which is not None:
        P.index_copy_(0, which, exact.to(P.dtype))
    return P


def chunk_updates(work: Buffers, a: Tensor, b: Tensor, factor: Tensor | None) -> Tensor:
    """factor * (a^T b) [M, K, V] from a [M, C, K], b [M, C, V], factor [M, K or 1, 1].

    It lies in "updates" or, converted, in "scratch", which the next that uses these overwrites.
    """
    W = work("updates", a.shape[0], a.shape[2], b.shape[2], dtype=work.product)
    W = work.widen("scratch", torch.bmm(a.transpose(1, 2), b, out=W))
    return W if factor is None else W.mul_(factor)


def scaled(work: Buffers, name: str, states: Tensor, factor: Tensor | None) -> Tensor:
    """[rows, count, H, K, V] times factor [M, D, 1] per key channel -> [M, K, V] for a product."""
    flat = states.flatten(0, 2)
    if factor is None:
        return work.narrow(name, flat)
    wide = name if work.product == work.dtype else "scratch"
    return work.narrow(name, torch.mul(flat, factor, out=work(wide, *flat.shape)))
