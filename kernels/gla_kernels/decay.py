"""Device code of the gate inside a chunk: what turns the recurrence into matrix products.

With b_t = g_1 + ... + g_t inside a chunk of C tokens, a chunk needs, per key channel,

    P[t, s] = sum_k q[t, k] k[s, k] exp(b_t - b_s)  for s <= t,
    q[t] exp(b_t) to read the state, k[s] exp(b_C - b_s) to write it, exp(b_C) to decay it.

*Mild tiles.* The middle of the chunk is the reference: exp(b_t - b_mid) goes to q, its reciprocal
to k. Taken only when no channel decays by more than MILD nats over either half of the chunk, so
that no exponent exceeds +MILD and nothing is clamped.

*Strong tiles* take the exact path, without any positive exponent. The pair (t, s) is handled at
the one level h = 1, 2, ..., C / 2 at which t lies in the right and s in the left half of the same
block of 2h tokens: with the block's middle m, exp(b_t - b_m) and exp(b_m - b_s) are at most 1,
and their product is right even when one of them underflows to 0. log2(C) masked products for C^2
K exponentials.

The choice is made per tile, from its gates, while the kernel runs.

On strong tiles all exponents are plain *sums* of gates, never differences of long sums: running
sums, and at each level the product of a matrix of 0 and 1 with the tile of gates, which is split
into bf16 parts so that every term is exact. Gates are floored at FLOOR first; an exponent with
such a gate gives exactly 0 in fp32 with or without the floor.

Gates are tiles [C, D] of natural logarithms, D = number of key channels, or 1 for a gate a head.
"""

import triton
import triton.language as tl

MILD = tl.constexpr(24.0)
FLOOR = tl.constexpr(-110.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """exp of fp32, as the power of two that the device computes."""
    return tl.exp2(x * LOG2E)


@triton.jit
def running_sums(x, REVERSE):
    """Sums of x [C, D] up to each token, or from it on."""
    if x.shape[1] == 1:  # as a vector: Triton 3.6 cannot scan one column for Hopper
        return tl.cumsum(tl.sum(x, 1), 0, reverse=REVERSE)[:, None]
    else:
        return tl.cumsum(x, 0, reverse=REVERSE)


@triton.jit
def halves(g):
    """Log-decay of the first and of the second half of the chunk, [D] each; is the tile mild?"""
    C: tl.constexpr = g.shape[0]
    early = (tl.arange(0, C) < C // 2)[:, None]
    first = tl.sum(tl.where(early, g, 0.0), 0)
    second = tl.sum(tl.where(early, 0.0, g), 0)
    return first, second, tl.min(tl.minimum(first, second), 0) >= -MILD


@triton.jit
def level_decays(g, level, s):
    """exp of b_t - b_m (right half of a block of 2h tokens) or b_m - b_t (left half), [C, D].

    To PARTS * 8 bits of every gate.
    """
    C: tl.constexpr = g.shape[0]
    PARTS: tl.constexpr = s.PARTS
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    m = ((t >> (level + 1)) << (level + 1)) + (1 << level) - 1
    weights = (((u > m) & (u <= t)) | ((u > t) & (u <= m))).to(tl.int32).to(tl.bfloat16)
    x = tl.broadcast_to(g, [C, 16]) if g.shape[1] == 1 else g  # the narrowest product there is
    total = tl.zeros(x.shape, tl.float32)
    for _ in tl.static_range(PARTS):
        part = x.to(tl.bfloat16)
        total = tl.dot(weights, part, total)
        x -= part.to(tl.float32)
    if g.shape[1] == 1:
        total = tl.max(total, 1, keep_dims=True)  # of 16 equal columns
    return exp(total)


@triton.jit
def level_tile(q, k, e, level):
    """A level: q of right halves and k of left halves, times decays e; masks of both.

    [C, D]; [C, 1] for right halves; [C, C] for pairs of this level.
    """
    t = tl.arange(0, q.shape[0])
    right = (((t >> level) & 1) == 1)[:, None]
    return tl.where(right, q, k) * e, right, ((t[:, None] ^ t[None, :]) >> level) == 1
