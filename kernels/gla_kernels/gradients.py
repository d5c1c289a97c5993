"""Gradients of q, k and the gate: one pass over a segment with a block of the state in registers.

With q^ = scale * q exp(b_t), k^ = k exp(b_C - b_t) as in ``sweep``, S before and dS after a chunk
(the reversed sweep wrote dS), and the factored q~, k~ of ``decay``,

    dP   = do v^T                         on and below its diagonal
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

A program holds channels [BK] of one head and values [BV], all of them where there is room, and
reads v and do once where it can. All that it writes is a sum over values: with V / BV programs for
one place, each writes its part, as if it were a head of its own, and the parts are added up. S is
kept transposed, [BV, BK], so that no accumulator has to be transposed for a product.

Sizes and slots: see ``tiles``.
"""

import triton
import triton.language as tl

from gla_kernels.decay import (
    CHANNEL_GATE,
    FLOOR,
    HEAD_GATE,
    LOG2E,
    NO_GATE,
    half_sums,
    is_mild,
    level_decays,
    level_tile,
    running_sums,
)
from gla_kernels.tiles import (
    find_segment,
    first_slot,
    load_gates,
    load_state,
    load_tile,
    rows_at,
    store_tile,
)


@triton.jit
def score_gradients(
    v, v_t, do, do_t, v_tile, do_tile, first_v, left, levels, V: tl.constexpr,
    BV: tl.constexpr, VB: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """dP [C, C] on and below its diagonal, its transpose above: so the result is symmetric.

    From the tiles if they are whole (VB = BV), else from memory in blocks of VB channels.
    """
    t = tl.arange(0, C)
    dP = tl.zeros([C, C], tl.float32)
    dPT = tl.zeros([C, C], tl.float32)
    # A count the compiler does not know, for 1 too: what it sees as a product whose result goes
    # into a product, it gives to warps by rows alone; they are too few, and half of the warps
    # would repeat what the others do, in registers too.
    blocks = tl.where(levels > 0, BV // VB, 0)
    for block in tl.range(blocks, disable_licm=True):
        d = first_v + block * VB + tl.arange(0, VB)
        x = do_tile if VB == BV else load_tile(do, do_t, left, d, V, C).to(DOT)
        y = v_tile if VB == BV else load_tile(v, v_t, left, d, V, C).to(DOT)
        dP = tl.dot(x, tl.trans(y), dP, input_precision=IP)
        dPT = tl.dot(y, tl.trans(x), dPT, input_precision=IP)
    return tl.where(t[:, None] >= t[None, :], dP, dPT).to(DOT)


@triton.jit
def factored_gradients(x, y, dP, C: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr):
    """Gradients of x and y [C, BK] through the scores x y^T, from the symmetric dP."""
    t = tl.arange(0, C)
    lower = tl.where(t[:, None] >= t[None, :], dP, 0.0).to(DOT)
    upper = tl.where(t[:, None] <= t[None, :], dP, 0.0).to(DOT)
    return tl.dot(lower, y, input_precision=IP), tl.dot(upper, x, input_precision=IP)


@triton.jit
def exact_gradients(
    q, k, g, dP, levels, C: tl.constexpr,
    GATE: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Through the scores of a strong tile: gradients of q, k and q~ dq~ - k~ dk~, [C, BK] each.

    At a level, q of right halves meets k of left halves, and the other way round: dP [C, C] is
    symmetric, so one product serves both.
    """
    t = tl.arange(0, C)
    dq = tl.zeros_like(q)
    dk = tl.zeros_like(q)
    through = tl.zeros_like(q)
    for level in tl.range(levels, disable_licm=True):
        e = tl.zeros_like(g)
        if levels > 0:  # always; as above, the compiler must not see one product in the other
            e = level_decays(g, level, C, GATE, PARTS)
        x, right, pairs = level_tile(q, k, e, level, C)
        x = x.to(DOT)
        dx = tl.dot(tl.where(pairs, dP, 0.0).to(DOT), x, input_precision=IP)
        dq += tl.where(right, dx * e, 0.0)
        dk += tl.where(right, 0.0, dx * e)
        dx *= x.to(tl.float32)
        through += tl.where(right, dx, -dx)
    diagonal = tl.where(t[:, None] == t[None, :], dP, 0.0).to(DOT)
    dq += tl.dot(diagonal, k.to(DOT), input_precision=IP)
    dk += tl.dot(diagonal, q.to(DOT), input_precision=IP)
    return dq, dk, through


@triton.jit
def of_gate(x, GATE: tl.constexpr):
    """The gate's part of x [.., BK]: summed over channels, at once, for a gate a head."""
    if GATE == HEAD_GATE:  # kept a matrix: a sum of a vector does not compile for sm_100
        x = tl.sum(x, 1, keep_dims=True)
    return x


@triton.jit(
    do_not_specialize=["scale", "T", "N", "L", "H", "levels", "k_group", "v_group", "g_group"]
)
def gradients_kernel(
    q, k, v, g, do,          # [B, T, heads, K], [.., K], [.., V], [.., 1 or K] or None, [.., V]
    dq, dk, dg,              # contiguous [B, T, H V / BV, K]; dg of a gate a head: [.., K / BK]
    initial,                 # fp32 [N, H, K, V] or None: state before the first segment
    bounds,                  # fp32 [slots, H, K, V] or None: state before every segment
    chunks,                  # [chunk slots, H, K, V]: gradient of the state after every chunk
    cu,                      # [N + 1] or None
    L,
    levels,                  # log2(C); known only at run time, so that no loop is unrolled
    scale, T, N, H,
    k_group, v_group, g_group,   # heads that share one head of k, v, g
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr,
    DOT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    n, row, j, first, end = find_segment(cu, slot, T, N, L)
    if first >= end:
        return
    stop = tl.minimum(first + L, end)

    d_k = tl.program_id(1) * BK + tl.arange(0, BK)
    first_v = tl.program_id(2) * BV
    d_v = first_v + tl.arange(0, BV)
    v_rows = rows_at(v, row, first, head // v_group, v_b, v_t, v_h)
    do_rows = rows_at(do, row, first, head, do_b, do_t, do_h)
    if GATE != NO_GATE:
        # A gate a head: each block of channels writes its own part of the sum.
        GO: tl.constexpr = K if GATE == CHANNEL_GATE else (K + BK - 1) // BK
        d_go = d_k if GATE == CHANNEL_GATE else tl.program_id(1) + tl.arange(0, 1)
    outputs = H * tl.num_programs(2)
    output = head * tl.num_programs(2) + tl.program_id(2)

    if bounds is not None:
        S = load_state(bounds, slot, head, H, d_k[None, :], d_v[:, None], K, V)
    else:
        S = load_state(initial, n, head, H, d_k[None, :], d_v[:, None], K, V)
    chunk_slot = first_slot(cu, n, T, C) + j * (L // C)

    for c in tl.range(tl.cdiv(stop - first, C), disable_licm=True):
        token = tl.cast(c * C, tl.int64)
        left = stop - first - c * C
        place = (row.to(tl.int64) * T + first + c * C) * outputs + output
        v_c = v_rows + token * v_t
        do_c = do_rows + token * do_t
        q_c = rows_at(q, row, first + c * C, head, q_b, q_t, q_h)
        k_c = rows_at(k, row, first + c * C, head // k_group, k_b, k_t, k_h)
        # All that the chunk needs is asked for at once, before anything waits for it. In blocks
        # of values: late, and again, as there are too few registers to hold it.
        do_tile = load_tile(do_c, do_t, left, d_v, V, C).to(DOT) if VB == BV else None
        v_tile = load_tile(v_c, v_t, left, d_v, V, C).to(DOT) if VB == BV else None
        q_read = load_tile(q_c, q_t, left, d_k, K, C)
        k_read = load_tile(k_c, k_t, left, d_k, K, C)
        if GATE != NO_GATE:
            g_c = rows_at(g, row, first + c * C, head // g_group, g_b, g_t, g_h)
            gates = load_gates(g_c, g_t, left, d_k, K, C, GATE, 0)
        if VB == BV:
            dS = load_state(chunks, chunk_slot + c, head, H, d_k[None, :], d_v[:, None], K, V)
        dP = score_gradients(
            v_c, v_t, do_c, do_t, v_tile, do_tile, first_v, left, levels, V, BV, VB, C, DOT, IP
        )
        q_tile = q_read.to(tl.float32) * scale
        k_tile = k_read.to(tl.float32)
        if GATE == NO_GATE:
            dq_tile, dk_tile = factored_gradients(q_tile.to(DOT), k_tile.to(DOT), dP, C, DOT, IP)
        else:
            first_half, second_half = half_sums(gates, C)
            if is_mild(first_half, second_half):
                b = running_sums(gates, C, GATE, False)
                rest = (first_half + second_half)[None, :] - b
                to_q = tl.exp2((b - first_half[None, :]) * LOG2E)
                x = (q_tile * to_q).to(DOT)
                to_k = tl.exp2((first_half[None, :] - b) * LOG2E)
                y = (k_tile * to_k).to(DOT)
                dq_tile, dk_tile = factored_gradients(x, y, dP, C, DOT, IP)
                through = x.to(tl.float32) * dq_tile - y.to(tl.float32) * dk_tile
                dq_tile *= to_q
                dk_tile *= to_k
            else:
                dq_tile, dk_tile, through = exact_gradients(
                    q_tile, k_tile, gates, dP, levels, C, GATE, PARTS, DOT, IP
                )
                b = running_sums(gates, C, GATE, False)
                after = load_gates(g_c, g_t, left, d_k, K, C, GATE, 1)
                rest = running_sums(after, C, GATE, True)
        if VB < BV:
            do_tile = load_tile(do_c, do_t, left, d_v, V, C).to(DOT)
        from_S = tl.dot(do_tile, S.to(DOT), input_precision=IP)
        if GATE != NO_GATE:
            from_S *= tl.exp2(b * LOG2E)
            through = of_gate(through + q_tile * from_S, GATE)
        dq_tile = (dq_tile + from_S) * scale
        store_tile(dq + place * K, dq_tile, outputs * K, left, d_k, K, C)

        if VB < BV:
            v_tile = load_tile(v_c, v_t, left, d_v, V, C).to(DOT)
            dS = load_state(chunks, chunk_slot + c, head, H, d_k[None, :], d_v[:, None], K, V)
        from_dS = tl.dot(v_tile, dS, input_precision=IP)
        if GATE != NO_GATE:
            write = tl.exp2(rest * LOG2E)
            from_dS *= write
            written = of_gate(k_tile * from_dS, GATE)
            k_tile *= write
        dk_tile += from_dS
        store_tile(dk + place * K, dk_tile, outputs * K, left, d_k, K, C)
        if GATE != NO_GATE:
            total = tl.exp2((first_half + second_half) * LOG2E)[None, :]
            passing = of_gate(tl.sum(S * dS.to(tl.float32), 0, keep_dims=True) * total, GATE)
            S *= total
        S = tl.dot(tl.trans(v_tile), k_tile.to(DOT), S, input_precision=IP)
        if GATE != NO_GATE:
            dg_tile = running_sums(through, C, GATE, True) + passing
            dg_tile += running_sums(written, C, GATE, False) - written
            # A gate at the floor is a reset: nothing passes it.
            gates = load_gates(g_c, g_t, left, d_k, K, C, GATE, 0)
            dg_tile = tl.where(gates > FLOOR, dg_tile, 0.0)
            store_tile(dg + place * GO, dg_tile, outputs * GO, left, d_go, GO, C)
