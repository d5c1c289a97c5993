"""The sweep: one pass over a segment, its state in registers. Forward, and half of the backward.

With the scores P of ``decay``, q^ = scale * q exp(b_t) and k^ = k exp(b_C - b_t), each chunk
computes

    forward   o  = P v + q^ S          S  <- exp(b_C) S + k^^T v         from the first chunk on
    REVERSE   dv = P^T do + k^ dS      dS <- exp(b_C) dS + q^^T do       from the last chunk back

which is one kernel, with v or do as w. Reversed, it also writes dS after every chunk, in the dtype
of the products, for ``gradients``.

Without OUTPUT it computes only what a segment adds to the state and by how much it decays it;
``scan_kernel`` then turns these into the state before each segment.

Sizes and slots: see ``tiles``.
"""

import triton
import triton.language as tl

from gla_kernels.decay import (
    CHANNEL_GATE,
    LOG2E,
    NO_GATE,
    half_sums,
    is_mild,
    level_decays,
    level_tile,
    running_sums,
)
from gla_kernels.tiles import (
    bounds_of,
    find_segment,
    first_slot,
    load_gates,
    load_state,
    load_tile,
    rows_at,
    store_state,
    store_tile,
)


@triton.jit
def scores(
    rows, left, scale, levels,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr,
    GATE: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Scores of a chunk [C, C], lower triangular (REVERSE: transposed).

    ``rows``: pointers to q, k, g of the chunk, each with its stride. Read in narrow blocks of
    channels, so that few registers are needed; each block is mild or strong for itself.
    """
    q, q_t, k, k_t, g, g_t = rows
    t = tl.arange(0, C)
    most: tl.constexpr = 64 if GATE == NO_GATE else 32
    KB: tl.constexpr = most if BK > most else BK
    P = tl.zeros([C, C], tl.float32)
    for block in tl.range(BK // KB, disable_licm=True):
        d = block * KB + tl.arange(0, KB)
        q_tile = load_tile(q, q_t, left, d, K, C)
        k_tile = load_tile(k, k_t, left, d, K, C)
        if GATE == NO_GATE:
            a = (q_tile.to(tl.float32) * scale).to(DOT)
            P = pairs_of(a, k_tile.to(DOT), P, REVERSE, IP)
        else:
            gates = load_gates(g, g_t, left, d, K, C, GATE, 0)
            first, second = half_sums(gates, C)
            if is_mild(first, second):
                e = (running_sums(gates, C, GATE, False) - first[None, :]) * LOG2E
                a = (q_tile.to(tl.float32) * scale * tl.exp2(e)).to(DOT)
                b = (k_tile.to(tl.float32) * tl.exp2(-e)).to(DOT)
                P = pairs_of(a, b, P, REVERSE, IP)
            else:
                x = q_tile.to(tl.float32) * scale
                y = k_tile.to(tl.float32)
                P += tl.where(t[:, None] == t[None, :], tl.sum(x * y, 1)[:, None], 0.0)
                for level in tl.range(levels, disable_licm=True):
                    e = level_decays(gates, level, C, GATE, PARTS)
                    a, _, pairs = level_tile(x, y, e, level, C)
                    a = a.to(DOT)  # times its transpose: of a pair, one is q and the other k
                    P += tl.where(pairs, tl.dot(a, tl.trans(a), input_precision=IP), 0.0)
    if REVERSE:
        P = tl.where(t[:, None] <= t[None, :], P, 0.0)
    else:
        P = tl.where(t[:, None] >= t[None, :], P, 0.0)
    return P


@triton.jit
def pairs_of(a, b, P, REVERSE: tl.constexpr, IP: tl.constexpr):
    """P + a b^T, or with the transpose of the product when REVERSE."""
    x, y = (b, a) if REVERSE else (a, b)
    return tl.dot(x, tl.trans(y), P, input_precision=IP)


@triton.jit
def load_scaled(source, left, d, K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr):
    """Rows of q or k in fp32, times a scale and exp(e)."""
    pointer, stride, scale, e = source
    x = load_tile(pointer, stride, left, d, K, C).to(tl.float32) * scale
    if GATE != NO_GATE:
        x *= tl.exp2(e * LOG2E)
    return x


@triton.jit
def through_state(
    S, o, lasting, w_tile, rows, left, scale, d,
    K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr,
    OUTPUT: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """A block of key channels d of the state: what it adds to o, and it after the chunk."""
    q, q_t, k, k_t, g, g_t = rows
    if GATE == NO_GATE:
        b = 0.0
        rest = 0.0
        all_ = 0.0
    else:
        gates = load_gates(g, g_t, left, d, K, C, GATE, 0)
        first, second = half_sums(gates, C)
        b = running_sums(gates, C, GATE, False)
        all_ = first + second
        if is_mild(first, second):
            rest = all_[None, :] - b
        else:
            rest = running_sums(load_gates(g, g_t, left, d, K, C, GATE, 1), C, GATE, True)
    if REVERSE:
        reads = (k, k_t, 1.0, rest)
        writes = (q, q_t, scale, b)
    else:
        reads = (q, q_t, scale, b)
        writes = (k, k_t, 1.0, rest)
    if OUTPUT:
        a = load_scaled(reads, left, d, K, C, GATE).to(DOT)
        o = tl.dot(a, S.to(DOT), o, input_precision=IP)
    if GATE != NO_GATE:
        total = tl.exp2(all_ * LOG2E)
        S *= total[:, None]
        lasting *= total
    a = load_scaled(writes, left, d, K, C, GATE).to(DOT)
    S = tl.dot(tl.trans(a), w_tile, S, input_precision=IP)
    return S, o, lasting


@triton.jit
def store_parts(
    pointer, S, slot, head, H, d_v, K: tl.constexpr, V: tl.constexpr, KS: tl.constexpr
):  # fmt: skip
    """Write all parts of a state, KS key channels each."""
    for p in tl.static_range(len(S)):
        d = p * KS + tl.arange(0, KS)
        store_state(pointer, S[p], slot, head, H, d[:, None], d_v[None, :], K, V)


@triton.jit(
    do_not_specialize=["scale", "T", "N", "L", "H", "levels", "k_group", "w_group", "g_group"]
)
def sweep_kernel(
    q, k, w, g,              # [B, T, heads, K], [.., K], [.., V], [.., 1 or K] or None
    out,                     # [B, T, H, V] contiguous, or None: see OUTPUT
    initial, final,          # fp32 [N, H, K, V] or None: state before and after all segments
    bounds, decay,           # fp32 [slots, H, K, V], [slots, H, K] or None
    chunks,                  # [chunk slots, H, K, V] or None
    cu,                      # [N + 1] or None
    L,
    levels,                  # log2(C); known only at run time, so that no loop is unrolled
    scale, T, N, H,
    k_group, w_group, g_group,   # heads that share one head of k, w, g
    q_b, q_t, q_h, k_b, k_t, k_h, w_b, w_t, w_h, g_b, g_t, g_h,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    OUTPUT: tl.constexpr = out is not None
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    n, row, j, first, end = find_segment(cu, slot, T, N, L)
    if (first >= end) & (j > 0):
        return
    ends = j == 0 if REVERSE else first + L >= end  # nothing of the sequence comes after it
    if not OUTPUT:
        if ends:
            return
    stop = tl.minimum(first + L, end)
    count = tl.cdiv(stop - first, C)

    d_v = tl.program_id(1) * BV + tl.arange(0, BV)
    q_rows = rows_at(q, row, first, head, q_b, q_t, q_h)
    k_rows = rows_at(k, row, first, head // k_group, k_b, k_t, k_h)
    g_rows = q_rows
    if GATE != NO_GATE:
        g_rows = rows_at(g, row, first, head // g_group, g_b, g_t, g_h)

    # The state is held in parts of its key channels: their tiles need fewer registers.
    S = ()
    lasting = ()
    for p in tl.static_range(BK // KS):
        d = p * KS + tl.arange(0, KS)
        if OUTPUT and bounds is not None:
            part = load_state(bounds, slot, head, H, d[:, None], d_v[None, :], K, V)
        else:
            part = load_state(initial, n, head, H, d[:, None], d_v[None, :], K, V)
        S += (part,)
        lasting += (tl.full([KS if GATE == CHANNEL_GATE else 1], 1.0, tl.float32),)
    if chunks is not None:
        chunk_slot = first_slot(cu, n, T, C) + j * (L // C)

    for i in tl.range(count, disable_licm=True):
        c = count - 1 - i if REVERSE else i
        token = tl.cast(c * C, tl.int64)
        left = stop - first - c * C
        rows = (q_rows + token * q_t, q_t, k_rows + token * k_t, k_t, g_rows + token * g_t, g_t)
        if chunks is not None:
            store_parts(chunks, S, chunk_slot + c, head, H, d_v, K, V, KS)
        o = tl.zeros([C, BV], tl.float32)
        if OUTPUT:
            P = scores(rows, left, scale, levels, K, BK, C, REVERSE, GATE, PARTS, DOT, IP)
        w_rows = rows_at(w, row, first + c * C, head // w_group, w_b, w_t, w_h)
        w_tile = load_tile(w_rows, w_t, left, d_v, V, C).to(DOT)
        if OUTPUT:
            o = tl.dot(P.to(DOT), w_tile, o, input_precision=IP)
        before = S
        lasted = lasting
        S = ()
        lasting = ()
        for p in tl.static_range(BK // KS):
            part, o, lasts = through_state(
                before[p], o, lasted[p], w_tile, rows, left, scale, p * KS + tl.arange(0, KS),
                K, C, GATE, REVERSE, OUTPUT, DOT, IP,
            )  # fmt: skip
            S += (part,)
            lasting += (lasts,)
        if OUTPUT:
            place = (row.to(tl.int64) * T + first + c * C) * H + head
            store_tile(out + place * V, o, H * V, left, d_v, V, C)

    if not OUTPUT:
        store_parts(bounds, S, slot, head, H, d_v, K, V, KS)
        if GATE != NO_GATE:
            if tl.program_id(1) == 0:
                GK: tl.constexpr = K if GATE == CHANNEL_GATE else 1
                at = decay + (slot.to(tl.int64) * H + head) * GK
                for p in tl.static_range(BK // KS if GATE == CHANNEL_GATE else 1):
                    d_g = p * KS + tl.arange(0, KS if GATE == CHANNEL_GATE else 1)
                    tl.store(at + d_g, lasting[p], mask=d_g < GK)
    elif final is not None:
        if ends:
            store_parts(final, S, n, head, H, d_v, K, V, KS)


@triton.jit(do_not_specialize=["T", "N", "L", "H"])
def scan_kernel(
    bounds, decay,           # fp32 [slots, H, K, V], [slots, H, 1 or K] or None
    initial,                 # fp32 [N, H, K, V] or None
    cu, T, N, L, H,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds by the state before it (REVERSE: the gradient after it)."""
    n = tl.program_id(0) // H
    head = tl.program_id(0) % H
    _, start, end = bounds_of(cu, n, T)
    count = tl.maximum(tl.cdiv(end - start, L), 1)
    base = first_slot(cu, n, T, L)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    S = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        state = initial + (n.to(tl.int64) * H + head) * (K * V)
        S += tl.load(state + e, mask=e < K * V, other=0.0)
    for i in range(count):
        slot = base + (count - 1 - i if REVERSE else i)
        place = slot.to(tl.int64) * H + head
        at = bounds + place * (K * V) + e
        # What the last segment of the direction adds, nobody reads: its slot was not written.
        more = (e < K * V) & (i < count - 1)
        added = tl.load(at, mask=more, other=0.0)
        tl.store(at, S, mask=e < K * V)
        if GATE == NO_GATE:
            S += added
        else:
            GK: tl.constexpr = K if GATE == CHANNEL_GATE else 1
            d_g = e // V if GATE == CHANNEL_GATE else e * 0
            lasting = tl.load(decay + place * GK + d_g, mask=more, other=0.0)
            S = S * lasting + added
