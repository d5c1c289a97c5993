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
    running_sums,
    same_block,
)
from gla_kernels.tiles import (
    bounds_of,
    find_sequence,
    first_slot,
    load_gates,
    load_state,
    load_tile,
    rows_at,
    state_at,
    store_state,
    store_tile,
)

# Key channels of a block of scores.
KBLOCK = tl.constexpr(32)


@triton.jit
def scores(
    q, q_t, k, k_t, g, g_t, left, scale, levels,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr,
    GATE: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Scores of a chunk [C, C], lower triangular (REVERSE: transposed).

    q, k, g point to the chunk. Read in narrow blocks of channels, so that few registers are needed;
    each block is mild or strong for itself.
    """
    t = tl.arange(0, C)
    KB: tl.constexpr = KBLOCK if BK > KBLOCK else BK
    P = tl.zeros([C, C], tl.float32)
    for block in tl.range(BK // KB, disable_licm=True):
        d = block * KB + tl.arange(0, KB)
        q_tile = load_tile(q, q_t, left, d, K, C)
        k_tile = load_tile(k, k_t, left, d, K, C)
        if GATE == NO_GATE:
            a = (q_tile.to(tl.float32) * scale).to(DOT)
            P = pairs_of(a, k_tile.to(DOT), P, REVERSE, IP)
        else:
            d_g = d if GATE == 2 else tl.arange(0, 1)
            gates = load_gates(g, g_t, left, d_g, K if GATE == 2 else 1, C, 0)
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
                    right, left_, _ = level_tiles(x, y, gates, level, C, GATE, PARTS, DOT)
                    pairs = pairs_of(right, left_, tl.zeros([C, C], tl.float32), REVERSE, IP)
                    P += tl.where(same_block(level, C), pairs, 0.0)
    if REVERSE:
        P = tl.where(t[:, None] <= t[None, :], P, 0.0)
    else:
        P = tl.where(t[:, None] >= t[None, :], P, 0.0)
    return P


@triton.jit
def pairs_of(a, b, P, REVERSE: tl.constexpr, IP: tl.constexpr):
    """P + a b^T, or with the transpose of the product when REVERSE."""
    if REVERSE:
        P = tl.dot(b, tl.trans(a), P, input_precision=IP)
    else:
        P = tl.dot(a, tl.trans(b), P, input_precision=IP)
    return P


@triton.jit
def load_scaled(p, stride, left, d, K: tl.constexpr, C: tl.constexpr, e, scale, GATE: tl.constexpr):
    """Rows of q or k in fp32, times scale and exp(e)."""
    x = load_tile(p, stride, left, d, K, C).to(tl.float32) * scale
    if GATE != NO_GATE:
        x *= tl.exp2(e * LOG2E)
    return x


@triton.jit
def through_state(
    S, o, lasting, w_tile, q, q_t, k, k_t, g, g_t, left, scale, d,
    K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr,
    OUTPUT: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """A block of key channels d of the state: what it adds to o, and it after the chunk."""
    read = 0.0
    write = 0.0
    all_ = 0.0
    if GATE != NO_GATE:
        GK: tl.constexpr = K if GATE == 2 else 1
        d_g = d if GATE == 2 else tl.arange(0, 1)
        gates = load_gates(g, g_t, left, d_g, GK, C, 0)
        first, second = half_sums(gates, C)
        b = running_sums(gates, C, GATE, False)
        all_ = first + second
        if is_mild(first, second):
            rest = all_[None, :] - b
        else:
            after = load_gates(g, g_t, left, d_g, GK, C, 1)
            rest = running_sums(after, C, GATE, True)
        read = b
        write = rest
    if OUTPUT:
        if REVERSE:
            a = load_scaled(k, k_t, left, d, K, C, write, 1.0, GATE)
        else:
            a = load_scaled(q, q_t, left, d, K, C, read, scale, GATE)
        o = tl.dot(a.to(DOT), S.to(DOT), o, input_precision=IP)
    if GATE != NO_GATE:
        total = tl.exp2(all_ * LOG2E)
        S *= total[:, None]
        lasting *= total
    if REVERSE:
        b_ = load_scaled(q, q_t, left, d, K, C, read, scale, GATE)
    else:
        b_ = load_scaled(k, k_t, left, d, K, C, write, 1.0, GATE)
    S = tl.dot(tl.trans(b_.to(DOT)), w_tile, S, input_precision=IP)
    return S, o, lasting


@triton.jit(
    do_not_specialize=["scale", "T", "N", "L", "H", "levels", "k_group", "w_group", "g_group"]
)
def sweep_kernel(
    q, k, w, g,              # [B, T, heads, K], [.., K], [.., V], [.., 1 or K] or None
    out,                     # [B, T, H, V] contiguous, or None without OUTPUT
    initial, final,          # fp32 [N, H, K, V] or None: state before and after all segments
    bounds, decay,           # fp32 [slots, H, K, V], [slots, H, K] or None
    chunks,                  # [chunk slots, H, K, V] or None
    cu,                      # [N + 1] or None
    scale, T, N, L, H,
    levels,                  # log2(C); known only at run time, so that no loop is unrolled
    q_b, q_t, q_h, k_b, k_t, k_h, w_b, w_t, w_h, g_b, g_t, g_h,
    k_group, w_group, g_group,   # heads that share one head of k, w, g
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr,
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

    # The state is held in two halves of its key channels: their tiles need half of the registers.
    TWO: tl.constexpr = BK > 64
    KH: tl.constexpr = BK // 2 if TWO else BK
    d_0 = tl.arange(0, KH)
    d_1 = d_0 + KH
    d_v = tl.program_id(1) * BV + tl.arange(0, BV)
    q_rows = rows_at(q, row, first, head, q_b, q_t, q_h)
    k_rows = rows_at(k, row, first, head // k_group, k_b, k_t, k_h)
    w_rows = rows_at(w, row, first, head // w_group, w_b, w_t, w_h)
    g_rows = q_rows
    if GATE != NO_GATE:
        g_rows = rows_at(g, row, first, head // g_group, g_b, g_t, g_h)
    if OUTPUT:
        out_rows = rows_at(out, row, first, head, T.to(tl.int64) * H * V, H * V, V)

    S_0 = tl.zeros([KH, BV], tl.float32)
    S_1 = tl.zeros([KH, BV], tl.float32)
    if OUTPUT:
        if bounds is not None:
            at = state_at(bounds, slot, head, H, K, V)
            S_0 += load_state(at, d_0, d_v, K, V)
            if TWO:
                S_1 += load_state(at, d_1, d_v, K, V)
        elif initial is not None:
            at = state_at(initial, n, head, H, K, V)
            S_0 += load_state(at, d_0, d_v, K, V)
            if TWO:
                S_1 += load_state(at, d_1, d_v, K, V)
    lasting_0 = tl.full([KH if GATE == 2 else 1], 1.0, tl.float32)
    lasting_1 = lasting_0
    if chunks is not None:
        chunk_slot = first_slot(cu, n, T, C, PACKED) + j * (L // C)

    for i in tl.range(count, disable_licm=True):
        c = count - 1 - i if REVERSE else i
        token = tl.cast(c * C, tl.int64)
        left = stop - first - c * C
        q_c = q_rows + token * q_t
        k_c = k_rows + token * k_t
        g_c = g_rows + token * g_t
        if chunks is not None:
            kept = state_at(chunks, chunk_slot + c, head, H, K, V)
            store_state(kept, S_0, d_0, d_v, K, V)
            if TWO:
                store_state(kept, S_1, d_1, d_v, K, V)
        o = tl.zeros([C, BV], tl.float32)
        if OUTPUT:
            P = scores(
                q_c, q_t, k_c, k_t, g_c, g_t, left, scale, levels,
                K, BK, C, REVERSE, GATE, PARTS, DOT, IP,
            )  # fmt: skip
        w_tile = load_tile(w_rows + token * w_t, w_t, left, d_v, V, C).to(DOT)
        if OUTPUT:
            o = tl.dot(P.to(DOT), w_tile, o, input_precision=IP)
        S_0, o, lasting_0 = through_state(
            S_0, o, lasting_0, w_tile, q_c, q_t, k_c, k_t, g_c, g_t, left, scale, d_0,
            K, C, GATE, REVERSE, OUTPUT, DOT, IP,
        )  # fmt: skip
        if TWO:
            S_1, o, lasting_1 = through_state(
                S_1, o, lasting_1, w_tile, q_c, q_t, k_c, k_t, g_c, g_t, left, scale, d_1,
                K, C, GATE, REVERSE, OUTPUT, DOT, IP,
            )  # fmt: skip
        if OUTPUT:
            store_tile(out_rows + token * (H * V), o, H * V, left, d_v, V, C)

    if OUTPUT:
        if final is not None:
            if is_first if REVERSE else is_last:
                at = state_at(final, n, head, H, K, V)
                store_state(at, S_0, d_0, d_v, K, V)
                if TWO:
                    store_state(at, S_1, d_1, d_v, K, V)
    else:
        at = state_at(bounds, slot, head, H, K, V)
        store_state(at, S_0, d_0, d_v, K, V)
        if TWO:
            store_state(at, S_1, d_1, d_v, K, V)
        if GATE != NO_GATE:
            if tl.program_id(1) == 0:
                GK: tl.constexpr = K if GATE == 2 else 1
                d_g = d_0 if GATE == 2 else tl.arange(0, 1)
                lasting = decay + (slot.to(tl.int64) * H + head) * GK + d_g
                tl.store(lasting, lasting_0, mask=d_g < GK)
                if TWO and GATE == 2:
                    tl.store(lasting + KH, lasting_1, mask=d_1 < GK)


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
