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

Sizes and slots: see ``tiles``; of the widths in ``s`` those of the gradients.
"""

import triton
import triton.language as tl

from gla_kernels import decay, tiles


@triton.jit
def score_gradients(v, do, v_tile, do_tile, first_v, at, levels, s):
    """dP [C, C] on and below its diagonal, its transpose above: so the result is symmetric.

    From the tiles if they are whole (VB = BV), else from memory in blocks of VB channels.
    """
    t = tl.arange(0, s.C)
    dP = tl.full([s.C, s.C], 0.0, tl.float32)
    dPT = tl.full([s.C, s.C], 0.0, tl.float32)
    # A count the compiler does not know, for 1 too: what it sees as a product whose result goes
    # into a product, it gives to warps by rows alone; they are too few, and half of the warps
    # would repeat what the others do, in registers too.
    blocks = tl.where(levels > 0, s.grad_BV // s.grad_VB, 0)
    for block in tl.range(blocks, disable_licm=True):
        d = first_v + block * s.grad_VB + tl.arange(0, s.grad_VB)
        x = tiles.load_values(do, at, d, s) if do_tile is None else do_tile
        y = tiles.load_values(v, at, d, s) if v_tile is None else v_tile
        dP = tiles.product(x, tl.trans(y), dP, s)
        dPT = tiles.product(y, tl.trans(x), dPT, s)
    return tiles.rounded(tl.where(t[:, None] >= t[None, :], dP, dPT), s)


@triton.jit
def factored_gradients(x, y, dP, s):
    """Gradients of x and y [C, BK] through the scores x y^T, from the symmetric dP."""
    t = tl.arange(0, s.C)
    lower = tl.where(t[:, None] >= t[None, :], dP, 0.0)
    upper = tl.where(t[:, None] <= t[None, :], dP, 0.0)
    return tiles.product(lower, y, None, s), tiles.product(upper, x, None, s)


@triton.jit
def exact_gradients(q, k, g, dP, levels, s):
    """Through the scores of a strong tile: gradients of q, k and q~ dq~ - k~ dk~, [C, BK] each.

    At a level, q of right halves meets k of left halves, and the other way round: dP [C, C] is
    symmetric, so one product serves both.
    """
    t = tl.arange(0, s.C)
    dq = tl.zeros_like(q)
    dk = tl.zeros_like(q)
    through = tl.zeros_like(q)
    for level in tl.range(levels, disable_licm=True):
        e = tl.zeros_like(g)
        if levels > 0:  # always; as above, the compiler must not see one product in the other
            e = decay.level_decays(g, level, s)
        x, right, pairs = decay.level_tile(q, k, e, level)
        x = tiles.rounded(x, s)
        dx = tiles.product(tl.where(pairs, dP, 0.0), x, None, s)
        dq += tl.where(right, dx * e, 0.0)
        dk += tl.where(right, 0.0, dx * e)
        dx *= x.to(tl.float32)
        through += tl.where(right, dx, -dx)
    diagonal = tl.where(t[:, None] == t[None, :], dP, 0.0)
    dq += tiles.product(diagonal, k, None, s)
    dk += tiles.product(diagonal, q, None, s)
    return dq, dk, through


@triton.jit
def of_gate(x, s):
    """The gate's part of x [.., BK]: summed over channels, at once, for a gate a head."""
    if s.GK < s.K:  # kept a matrix: a sum of a vector does not compile for sm_100
        x = tl.sum(x, 1, keep_dims=True)
    return x


@triton.jit(do_not_specialize=["L", "levels", "scale", "T", "N", "H"])
def gradients_kernel(
    q, k, v, g, do,          # [B, T, heads, K], [.., K], [.., V], [.., GK], [.., V]
    dq, dk, dg,              # contiguous [B, T, H V / BV, K]; dg of a gate a head: [.., K / BK]
    initial,                 # fp32 [N, H, K, V] or None: state before the first segment
    bounds,                  # fp32 [slots, H, K, V] or None: state before every segment
    chunks,                  # [chunk slots, H, K, V]: gradient of the state after every chunk
    cu, L,
    levels,                  # log2(C); known only at run time, so that no loop is unrolled
    scale, T, N, H, s: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = s.C  # pyright: ignore[reportAttributeAccessIssue]
    K: tl.constexpr = s.K  # pyright: ignore[reportAttributeAccessIssue]
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    n, row, j, first, end = tiles.find_segment(cu, slot, T, N, L)
    if first >= end:
        return
    stop = tl.minimum(first + L, end)

    d_k = tl.program_id(1) * s.grad_BK + tl.arange(0, s.grad_BK)
    first_v = tl.program_id(2) * s.grad_BV
    d_v = first_v + tl.arange(0, s.grad_BV)
    # A gate a head: each block of channels writes its own part of the sum.
    GO: tl.constexpr = K if s.GK == K else (K + s.grad_BK - 1) // s.grad_BK
    d_go = d_k if s.GK == K else tl.program_id(1) + tl.arange(0, 1)
    outputs = H * tl.num_programs(2)
    output = head * tl.num_programs(2) + tl.program_id(2)

    before = (bounds, slot) if bounds is not None else (initial, n)
    S = tiles.load_state(*before, head, H, d_k[None, :], d_v[:, None], s)
    v_rows = tiles.rows_at(v, row, first, head)
    do_rows = tiles.rows_at(do, row, first, head)
    q_rows = tiles.rows_at(q, row, first, head)
    k_rows = tiles.rows_at(k, row, first, head)
    g_rows = tiles.rows_at(g, row, first, head)
    chunk_slot = tiles.first_slot(cu, n, T, C) + j * (L // C)

    for c in tl.range(tl.cdiv(stop - first, C), disable_licm=True):
        at = c * C, stop - first - c * C
        place = (row.to(tl.int64) * T + first) * outputs + output
        # All that the chunk needs is asked for at once, before anything waits for it. In blocks
        # of values: late, and again, as there are too few registers to hold it.
        do_tile = tiles.load_values(do_rows, at, d_v, s) if s.grad_VB == s.grad_BV else None
        v_tile = tiles.load_values(v_rows, at, d_v, s) if s.grad_VB == s.grad_BV else None
        q_tile = tiles.load_tile(q_rows, at, d_k, s)
        k_tile = tiles.load_tile(k_rows, at, d_k, s)
        if s.GK > 0:
            gates = tiles.load_gates(g_rows, at, d_k, 0, s)
        if s.grad_VB == s.grad_BV:
            dS = tiles.load_state(chunks, chunk_slot + c, head, H, d_k[None, :], d_v[:, None], s)
        dP = score_gradients(v_rows, do_rows, v_tile, do_tile, first_v, at, levels, s)
        q_tile = q_tile.to(tl.float32) * scale
        k_tile = k_tile.to(tl.float32)
        if s.GK == 0:
            dq_tile, dk_tile = factored_gradients(q_tile, k_tile, dP, s)
        else:
            early, late, mild = decay.halves(gates)
            if mild:
                b = decay.running_sums(gates, False)
                rest = (early + late)[None, :] - b
                to_q = decay.exp(b - early[None, :])
                x = tiles.rounded(q_tile * to_q, s)
                to_k = decay.exp(early[None, :] - b)
                y = tiles.rounded(k_tile * to_k, s)
                dq_tile, dk_tile = factored_gradients(x, y, dP, s)
                through = x.to(tl.float32) * dq_tile - y.to(tl.float32) * dk_tile
                dq_tile *= to_q
                dk_tile *= to_k
            else:
                dq_tile, dk_tile, through = exact_gradients(q_tile, k_tile, gates, dP, levels, s)
                b = decay.running_sums(gates, False)
                rest = decay.running_sums(tiles.load_gates(g_rows, at, d_k, 1, s), True)
        if s.grad_VB < s.grad_BV:
            do_tile = tiles.load_values(do_rows, at, d_v, s)
        from_S = tiles.product(do_tile, S, None, s)
        if s.GK > 0:
            from_S *= decay.exp(b)
            through = of_gate(through + q_tile * from_S, s)
        dq_tile = (dq_tile + from_S) * scale
        tiles.store_tile((dq + place * K, outputs * K, K), dq_tile, at, d_k, s)

        if s.grad_VB < s.grad_BV:
            v_tile = tiles.load_values(v_rows, at, d_v, s)
            dS = tiles.load_state(chunks, chunk_slot + c, head, H, d_k[None, :], d_v[:, None], s)
        from_dS = tiles.product(v_tile, dS, None, s)
        if s.GK > 0:
            write = decay.exp(rest)
            from_dS *= write
            written = of_gate(k_tile * from_dS, s)
            k_tile *= write
        dk_tile += from_dS
        tiles.store_tile((dk + place * K, outputs * K, K), dk_tile, at, d_k, s)
        if s.GK > 0:
            total = decay.exp(early + late)[None, :]
            passing = of_gate(tl.sum(S * dS.to(tl.float32), 0, keep_dims=True) * total, s)
            S *= total
        S = tiles.product(tl.trans(v_tile), k_tile, S, s)
        if s.GK > 0:
            dg_tile = decay.running_sums(through, True) + passing
            dg_tile += decay.running_sums(written, False) - written
            # A gate at the floor is a reset: nothing passes it.
            gates = tiles.load_gates(g_rows, at, d_k, 0, s)
            dg_tile = tl.where(gates > decay.FLOOR, dg_tile, 0.0)
            tiles.store_tile((dg + place * GO, outputs * GO, GO), dg_tile, at, d_go, s)
