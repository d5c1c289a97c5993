"""Gradients of q, k and the gate: one pass over a segment with a block of the state in registers.

With q^ = scale * q exp(b_t), k^ = k exp(b_C - b_t) as in ``sweep``, S before and dS after a chunk
(the reversed sweep wrote dS), and the factored q~, k~ of ``decay``,

    dP   = do v^T                         below its diagonal: the diagonal is added by hand
    dq~  = dP k~,  dk~ = dP^T q~          on strong tiles level by level
    dq   = dq~ to_q + (do S^T) exp(b_t)   times scale
    dk   = dk~ to_k + (v dS^T) exp(b_C - b_t)

    dg_u = sum over t >= u of (q~ dq~ - k~ dk~)    pairs whose decay contains g_u; the others cancel
         + sum over t >= u of q^ (do S^T)          reads of the state after u
         + sum over s < u of k^ (v dS^T)           writes to the state before u
         + exp(b_C) * sum over V of S * dS         what passes through the chunk

The last three are sums of terms that all contain g_u. The first cancels exactly but for fp32
rounding, because the products used the very same rounded q~ and k~. All sums are over one chunk, so
the error does not grow with T.

A program holds channels [BK] of one head and all of V. S is kept transposed, [V, BK], so that no
accumulator has to be transposed for a product.

Sizes and slots: see ``tiles``.
"""

import triton
import triton.language as tl

from gla_kernels.decay import (
    FLOOR,
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
def exact_gradients(
    q, k, g, lower, upper, C: tl.constexpr, LOG_C: tl.constexpr,
    GATE: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Through the scores of a strong tile: gradients of q, k and q~ dq~ - k~ dk~, [C, BK] each.

    lower, upper: dP [C, C] below its diagonal, and the transpose of that.
    """
    dq = tl.zeros_like(q)
    dk = tl.zeros_like(q)
    through = tl.zeros_like(q)
    t = tl.arange(0, C)
    for level in range(LOG_C):
        right, left, e = level_tiles(q, k, g, level, C, GATE, PARTS, DOT)
        half = (t >> level) & 1
        pairs = same_block(level, C) & (half[:, None] > half[None, :])
        d_right = tl.dot(tl.where(pairs, lower, 0.0).to(DOT), left, input_precision=IP)
        pairs = same_block(level, C) & (half[:, None] < half[None, :])
        d_left = tl.dot(tl.where(pairs, upper, 0.0).to(DOT), right, input_precision=IP)
        dq += d_right * e
        dk += d_left * e
        through += right.to(tl.float32) * d_right - left.to(tl.float32) * d_left
    return dq, dk, through


@triton.jit(do_not_specialize=["scale", "T", "N", "L", "H", "k_group", "v_group", "g_group"])
def gradients_kernel(
    q, k, v, g, do,          # [B, T, heads, K], [.., K], [.., V], [.., 1 or K] or None, [.., V]
    dq, dk, dg,              # [B, T, H, K] contiguous; a gate a head: dg [B, T, H, K / BK]
    initial,                 # fp32 [N, H, K, V] or None: state before the first segment
    bounds,                  # fp32 [slots, H, K, V] or None: state before every segment
    chunks,                  # [chunk slots, H, K, V]: gradient of the state after every chunk
    cu,                      # [N + 1] or None
    scale, T, N, L, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    k_group, v_group, g_group,   # heads that share one head of k, v, g
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, LOG_C: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr,
    DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu is not None
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    n = find_sequence(cu, slot, T, N, L, PACKED)
    row, start, end = bounds_of(cu, n, T, PACKED)
    j = slot - first_slot(cu, n, T, L, PACKED)
    first = start + j * L
    if first >= end:
        return
    stop = tl.minimum(first + L, end)

    d_k = tl.program_id(1) * BK + tl.arange(0, BK)
    d_v = tl.arange(0, BV)
    q_rows = rows_at(q, row, first, head, q_b, q_t, q_h)
    k_rows = rows_at(k, row, first, head // k_group, k_b, k_t, k_h)
    v_rows = rows_at(v, row, first, head // v_group, v_b, v_t, v_h)
    do_rows = rows_at(do, row, first, head, do_b, do_t, do_h)
    wide = T.to(tl.int64) * H
    dq_rows = rows_at(dq, row, first, head, wide * K, H * K, K)
    dk_rows = rows_at(dk, row, first, head, wide * K, H * K, K)
    if GATE != NO_GATE:
        # A gate a head: each block of channels writes its own part of the sum.
        GK: tl.constexpr = K if GATE == 2 else 1
        GO: tl.constexpr = K if GATE == 2 else (K + BK - 1) // BK
        d_g = d_k if GATE == 2 else tl.arange(0, 1)
        d_go = d_k if GATE == 2 else tl.program_id(1) + tl.arange(0, 1)
        g_rows = rows_at(g, row, first, head // g_group, g_b, g_t, g_h)
        dg_rows = rows_at(dg, row, first, head, wide * GO, H * GO, GO)

    cell, cells = state_offsets(d_k, d_v, K, V, True)
    S = tl.zeros([BV, BK], tl.float32)
    if bounds is not None:
        S += tl.load(state_at(bounds, slot, head, H, K, V) + cell, mask=cells, other=0.0)
    elif initial is not None:
        S += tl.load(state_at(initial, n, head, H, K, V) + cell, mask=cells, other=0.0)
    chunk_slot = first_slot(cu, n, T, C, PACKED) + j * (L // C)
    t = tl.arange(0, C)

    for c in range(tl.cdiv(stop - first, C)):
        token = tl.cast(c * C, tl.int64)
        left = stop - first - c * C
        v_tile = load_tile(v_rows + token * v_t, v_t, left, d_v, V, C).to(DOT)
        do_tile = load_tile(do_rows + token * do_t, do_t, left, d_v, V, C).to(DOT)
        dP = tl.dot(do_tile, tl.trans(v_tile), input_precision=IP)
        dPT = tl.dot(v_tile, tl.trans(do_tile), input_precision=IP)
        lower = tl.where(t[:, None] > t[None, :], dP, 0.0).to(DOT)
        upper = tl.where(t[:, None] < t[None, :], dPT, 0.0).to(DOT)
        diagonal = tl.sum(tl.where(t[:, None] == t[None, :], dP, 0.0), 1)[:, None]
        q_tile = load_tile(q_rows + token * q_t, q_t, left, d_k, K, C).to(tl.float32) * scale
        k_tile = load_tile(k_rows + token * k_t, k_t, left, d_k, K, C).to(tl.float32)
        if GATE == NO_GATE:
            dq_tile = tl.dot(lower, k_tile.to(DOT), input_precision=IP)
            dk_tile = tl.dot(upper, q_tile.to(DOT), input_precision=IP)
        else:
            gates = load_gates(g_rows + token * g_t, g_t, left, d_g, GK, C, 0)
            first_half, second_half = half_sums(gates, C)
            if is_mild(first_half, second_half):
                to_q, to_k, read, write = mild_factors(gates, first_half, second_half)
                a = (q_tile * to_q).to(DOT)
                b = (k_tile * to_k).to(DOT)
                dq_tile = tl.dot(lower, b, input_precision=IP)
                dk_tile = tl.dot(upper, a, input_precision=IP)
                through = a.to(tl.float32) * dq_tile - b.to(tl.float32) * dk_tile
                dq_tile *= to_q
                dk_tile *= to_k
            else:
                gates_next = load_gates(g_rows + token * g_t, g_t, left, d_g, GK, C, 1)
                read, write = strong_factors(gates, gates_next)
                dq_tile, dk_tile, through = exact_gradients(
                    q_tile, k_tile, gates, lower, upper, C, LOG_C, GATE, PARTS, DOT, IP
                )
        dq_tile += diagonal * k_tile
        dk_tile += diagonal * q_tile

        from_S = tl.dot(do_tile, S.to(DOT), input_precision=IP)
        at = state_at(chunks, chunk_slot + c, head, H, K, V)
        dS = tl.load(at + cell, mask=cells, other=0.0)
        from_dS = tl.dot(v_tile, dS, input_precision=IP)
        if GATE != NO_GATE:
            from_S *= read
            from_dS *= write
            through += q_tile * from_S
            written = k_tile * from_dS
            total = tl.exp2((first_half + second_half) * LOG2E)
            passing = tl.sum(S * dS.to(tl.float32), 0) * total
            S *= total[None, :]
            if GATE == 1:
                passing = tl.sum(passing, 0, keep_dims=True)
                through = tl.sum(through, 1, keep_dims=True)
                written = tl.sum(written, 1, keep_dims=True)
            dg_tile = tl.cumsum(through, 0, reverse=True) + passing[None, :]
            dg_tile += tl.cumsum(written, 0) - written
            # A gate at the floor is a reset: nothing passes it.
            dg_tile = tl.where(gates > FLOOR, dg_tile, 0.0)
            store_tile(dg_rows + token * (H * GO), dg_tile, H * GO, left, d_go, GO, C)
            k_tile *= write
        S = tl.dot(tl.trans(v_tile), k_tile.to(DOT), S, input_precision=IP)
        dq_tile = (dq_tile + from_S) * scale
        dk_tile += from_dS
        store_tile(dq_rows + token * (H * K), dq_tile, H * K, left, d_k, K, C)
        store_tile(dk_rows + token * (H * K), dk_tile, H * K, left, d_k, K, C)
