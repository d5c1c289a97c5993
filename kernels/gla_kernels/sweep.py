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
    LOG2E,
    NO_GATE,
    half_sums,
    is_mild,
    level_tiles,
    mild_factors,
    same_block,
    strong_factors,
)
from gla_kernels.tiles import (
    bounds_of,
    find_sequence,
    first_slot,
    load_gates,
    load_tile,
    rows_at,
    state_at,
    state_offsets,
    store_tile,
)


@triton.jit
def exact_scores(
    q, q_t, k, k_t, g, g_t, left, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr, REVERSE: tl.constexpr,
    GATE: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Scores of a strong tile [C, C], lower triangular (REVERSE: transposed).

    q, k, g point to the chunk. Read in narrow blocks of channels, so that few registers are needed.
    """
    t = tl.arange(0, C)
    KB: tl.constexpr = 32 if BK > 32 else BK
    P = tl.zeros([C, C], tl.float32)
    for block in range(BK // KB):
        d = block * KB + tl.arange(0, KB)
        d_g = d if GATE == 2 else tl.arange(0, 1)
        q_tile = load_tile(q, q_t, left, d, K, C).to(tl.float32) * scale
        k_tile = load_tile(k, k_t, left, d, K, C).to(tl.float32)
        gates = load_gates(g, g_t, left, d_g, K if GATE == 2 else 1, C, 0)
        P += tl.where(t[:, None] == t[None, :], tl.sum(q_tile * k_tile, 1)[:, None], 0.0)
        for level in range(LOG_C):
            right, left_, _ = level_tiles(q_tile, k_tile, gates, level, C, GATE, PARTS, DOT)
            if REVERSE:
                pairs = tl.dot(left_, tl.trans(right), input_precision=IP)
            else:
                pairs = tl.dot(right, tl.trans(left_), input_precision=IP)
            P += tl.where(same_block(level, C), pairs, 0.0)
    return P


@triton.jit
def scores(q, k, C: tl.constexpr, REVERSE: tl.constexpr, IP: tl.constexpr):
    """tril(q k^T), or its transpose when REVERSE."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    if REVERSE:
        P = tl.where(t <= s, tl.dot(k, tl.trans(q), input_precision=IP), 0.0)
    else:
        P = tl.where(t >= s, tl.dot(q, tl.trans(k), input_precision=IP), 0.0)
    return P


@triton.jit(do_not_specialize=["scale", "T", "N", "L", "H", "k_group", "w_group", "g_group"])
def sweep_kernel(
    q, k, w, g,              # [B, T, heads, K], [.., K], [.., V], [.., 1 or K] or None
    out,                     # [B, T, H, V] contiguous, or None without OUTPUT
    initial, final,          # fp32 [N, H, K, V] or None: state before and after all segments
    bounds, decay,           # fp32 [slots, H, K, V], [slots, H, K] or None
    chunks,                  # [chunk slots, H, K, V] or None
    cu,                      # [N + 1] or None
    scale, T, N, L, H,
    q_b, q_t, q_h, k_b, k_t, k_h, w_b, w_t, w_h, g_b, g_t, g_h,
    k_group, w_group, g_group,   # heads that share one head of k, w, g
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, LOG_C: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr,
    REVERSE: tl.constexpr, OUTPUT: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu is not None
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    n = find_sequence(cu, slot, T, N, L, PACKED)
    row, start, end = bounds_of(cu, n, T, PACKED)
    j = slot - first_slot(cu, n, T, L, PACKED)
    first = start + j * L
    is_first = j == 0
    is_last = first + L >= end
    if (first >= end) & (j > 0):
        return
    if not OUTPUT:
        if is_first if REVERSE else is_last:
            return
    stop = tl.minimum(first + L, end)
    count = tl.cdiv(stop - first, C)

    d_k = tl.arange(0, BK)
    d_v = tl.program_id(1) * BV + tl.arange(0, BV)
    q_rows = rows_at(q, row, first, head, q_b, q_t, q_h)
    k_rows = rows_at(k, row, first, head // k_group, k_b, k_t, k_h)
    w_rows = rows_at(w, row, first, head // w_group, w_b, w_t, w_h)
    if GATE != NO_GATE:
        GD: tl.constexpr = BK if GATE == 2 else 1
        GK: tl.constexpr = K if GATE == 2 else 1
        d_g = tl.arange(0, GD)
        g_rows = rows_at(g, row, first, head // g_group, g_b, g_t, g_h)
        lasting = tl.full([GD], 1.0, tl.float32)
    if OUTPUT:
        out_rows = rows_at(out, row, first, head, T.to(tl.int64) * H * V, H * V, V)

    cell, cells = state_offsets(d_k, d_v, K, V, False)
    S = tl.zeros([BK, BV], tl.float32)
    if OUTPUT:
        if bounds is not None:
            S += tl.load(state_at(bounds, slot, head, H, K, V) + cell, mask=cells, other=0.0)
        elif initial is not None:
            S += tl.load(state_at(initial, n, head, H, K, V) + cell, mask=cells, other=0.0)
    if chunks is not None:
        chunk_slot = first_slot(cu, n, T, C, PACKED) + j * (L // C)

    for i in range(count):
        c = count - 1 - i if REVERSE else i
        token = tl.cast(c * C, tl.int64)
        left = stop - first - c * C
        q_tile = load_tile(q_rows + token * q_t, q_t, left, d_k, K, C).to(tl.float32) * scale
        k_tile = load_tile(k_rows + token * k_t, k_t, left, d_k, K, C).to(tl.float32)
        w_tile = load_tile(w_rows + token * w_t, w_t, left, d_v, V, C).to(DOT)
        if chunks is not None:
            at = state_at(chunks, chunk_slot + c, head, H, K, V)
            tl.store(at + cell, S.to(chunks.dtype.element_ty), mask=cells)
        if GATE == NO_GATE:
            if OUTPUT:
                P = scores(q_tile.to(DOT), k_tile.to(DOT), C, REVERSE, IP)
        else:
            gates = load_gates(g_rows + token * g_t, g_t, left, d_g, GK, C, 0)
            first_half, second_half = half_sums(gates, C)
            if is_mild(first_half, second_half):
                to_q, to_k, read, write = mild_factors(gates, first_half, second_half)
                if OUTPUT:
                    P = scores((q_tile * to_q).to(DOT), (k_tile * to_k).to(DOT), C, REVERSE, IP)
            else:
                gates_next = load_gates(g_rows + token * g_t, g_t, left, d_g, GK, C, 1)
                read, write = strong_factors(gates, gates_next)
                if OUTPUT:
                    P = exact_scores(
                        q_rows + token * q_t,
                        q_t,
                        k_rows + token * k_t,
                        k_t,
                        g_rows + token * g_t,
                        g_t,
                        left,
                        scale,
                        K,
                        BK,
                        C,
                        LOG_C,
                        REVERSE,
                        GATE,
                        PARTS,
                        DOT,
                        IP,
                    )
            q_tile *= read
            k_tile *= write
            total = tl.exp2((first_half + second_half) * LOG2E)
        a = (k_tile if REVERSE else q_tile).to(DOT)
        b = (q_tile if REVERSE else k_tile).to(DOT)
        if OUTPUT:
            o = tl.dot(a, S.to(DOT), input_precision=IP)
        if GATE != NO_GATE:
            S *= total[:, None]
            if not OUTPUT:
                lasting *= total
        S = tl.dot(tl.trans(b), w_tile, S, input_precision=IP)
        if OUTPUT:
            o += tl.dot(P.to(DOT), w_tile, input_precision=IP)
            store_tile(out_rows + token * (H * V), o, H * V, left, d_v, V, C)

    if OUTPUT:
        if final is not None:
            if is_first if REVERSE else is_last:
                tl.store(state_at(final, n, head, H, K, V) + cell, S, mask=cells)
    else:
        tl.store(state_at(bounds, slot, head, H, K, V) + cell, S, mask=cells)
        if GATE != NO_GATE:
            if tl.program_id(1) == 0:
                tl.store(decay + (slot.to(tl.int64) * H + head) * GK + d_g, lasting, mask=d_g < GK)


@triton.jit(do_not_specialize=["T", "N", "L", "H"])
def scan_kernel(
    bounds, decay,           # fp32 [slots, H, K, V], [slots, H, 1 or K] or None
    initial,                 # fp32 [N, H, K, V] or None
    cu, T, N, L, H,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds by the state before it (REVERSE: the gradient after it)."""
    PACKED: tl.constexpr = cu is not None
    n = tl.program_id(0) // H
    head = tl.program_id(0) % H
    _, start, end = bounds_of(cu, n, T, PACKED)
    count = tl.maximum(tl.cdiv(end - start, L), 1)
    base = first_slot(cu, n, T, L, PACKED)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    S = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        S += tl.load(state_at(initial, n, head, H, K, V) + e, mask=e < K * V, other=0.0)
    for i in range(count):
        slot = base + (count - 1 - i if REVERSE else i)
        at = state_at(bounds, slot, head, H, K, V) + e
        # What the last segment of the direction adds, nobody reads: its slot was not written.
        more = (e < K * V) & (i < count - 1)
        added = tl.load(at, mask=more, other=0.0)
        tl.store(at, S, mask=e < K * V)
        if GATE == NO_GATE:
            S += added
        else:
            GK: tl.constexpr = K if GATE == 2 else 1
            d_g = e // V if GATE == 2 else e * 0
            lasting = tl.load(
                decay + (slot.to(tl.int64) * H + head) * GK + d_g, mask=more, other=0.0
            )
            S = S * lasting + added
