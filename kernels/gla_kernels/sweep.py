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

from gla_kernels import decay, tiles


@triton.jit
def scores(q, k, g, at, scale, levels, REVERSE, s):
    """Scores of a chunk [C, C], lower triangular (REVERSE: transposed), from its rows.

    Read in narrow blocks of channels, so that few registers are needed; each block is mild or
    strong for itself.
    """
    t = tl.arange(0, s.C)
    P = tl.full([s.C, s.C], 0.0, tl.float32)
    for block in tl.range(s.BK // s.KB, disable_licm=True):
        d = block * s.KB + tl.arange(0, s.KB)
        x = tiles.load_tile(q, at, d, s).to(tl.float32) * scale
        y = tiles.load_tile(k, at, d, s).to(tl.float32)
        if s.GK == 0:
            P = pairs_of(x, y, P, REVERSE, s)
        else:
            gates = tiles.load_gates(g, at, d, 0, s)
            first, late, mild = decay.halves(gates)  # noqa: RUF059  not _: it has a type
            if mild:
                e = decay.running_sums(gates, False) - first[None, :]
                P = pairs_of(x * decay.exp(e), y * decay.exp(-e), P, REVERSE, s)
            else:
                P += tl.where(t[:, None] == t[None, :], tl.sum(x * y, 1)[:, None], 0.0)
                for level in tl.range(levels, disable_licm=True):
                    e = decay.level_decays(gates, level, s)
                    a, _, pairs = decay.level_tile(x, y, e, level)
                    a = tiles.rounded(a, s)  # and transposed: of a pair, one is q, the other k
                    P += tl.where(pairs, tiles.product(a, tl.trans(a), None, s), 0.0)
    row, column = (t[None, :], t[:, None]) if REVERSE else (t[:, None], t[None, :])
    return tl.where(row >= column, P, 0.0)


@triton.jit
def pairs_of(a, b, P, REVERSE, s):
    """P + a b^T, or with the transpose of the product when REVERSE."""
    x, y = (b, a) if REVERSE else (a, b)
    return tiles.product(x, tl.trans(tiles.rounded(y, s)), P, s)


@triton.jit
def load_scaled(rows, scale, e, at, d, s):
    """Rows of q or k, times a scale and exp(e), in the dtype of products."""
    x = tiles.load_tile(rows, at, d, s).to(tl.float32) * scale
    if s.GK > 0:
        x *= decay.exp(e)
    return tiles.rounded(x, s)


@triton.jit
def through_state(S, o, w, q, k, g, at, scale, d, REVERSE, OUTPUT, s):
    """A block of key channels d of the state: it after the chunk, o with what it adds, the chunk's
    decay of it. w: a tile; q, k, g: rows."""
    if s.GK == 0:
        b, rest, total = 0.0, 0.0, tl.full([1], 1.0, tl.float32)
    else:
        gates = tiles.load_gates(g, at, d, 0, s)
        first, second, mild = decay.halves(gates)
        b = decay.running_sums(gates, False)
        if mild:
            rest = (first + second)[None, :] - b
        else:
            rest = decay.running_sums(tiles.load_gates(g, at, d, 1, s), True)
        total = decay.exp(first + second)
    if OUTPUT:
        read = (k, 1.0, rest) if REVERSE else (q, scale, b)
        o = tiles.product(load_scaled(*read, at, d, s), S, o, s)
    S *= total[:, None]
    written = (q, scale, b) if REVERSE else (k, 1.0, rest)
    S = tiles.product(tl.trans(load_scaled(*written, at, d, s)), w, S, s)
    return S, o, total


@triton.jit
def store_parts(pointer, S, slot, head, H, d_v, s):
    """Write all parts of a state, KS key channels each."""
    for p in tl.static_range(len(S)):
        d = p * s.KS + tl.arange(0, s.KS)
        tiles.store_state(pointer, S[p], slot, head, H, d[:, None], d_v[None, :], s)


@triton.jit(do_not_specialize=["L", "levels", "scale", "T", "N", "H"])
def sweep_kernel(
    q, k, w, g,              # [B, T, heads, K], [.., K], [.., V], [.., GK]
    cu, L,
    levels,                  # log2(C); known only at run time, so that no loop is unrolled
    scale, T, N, H, REVERSE: tl.constexpr, s: tl.constexpr,
    out=None,                # [B, T, H, V], or None: see OUTPUT
    initial=None, final=None,    # fp32 [N, H, K, V]: state before and after all segments
    bounds=None, lasts=None,     # fp32 [slots, H, K, V], [slots, H, GK]
    chunks=None,             # [chunk slots, H, K, V]
):  # fmt: skip
    C: tl.constexpr = s.C  # pyright: ignore[reportAttributeAccessIssue]
    OUTPUT: tl.constexpr = out is not None
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    n, row, j, first, end = tiles.find_segment(cu, slot, T, N, L)
    ends = j == 0 if REVERSE else first + L >= end  # nothing of the sequence comes after it
    if ((first >= end) & (j > 0)) | (ends & (not OUTPUT)):
        return
    stop = tl.minimum(first + L, end)
    count = tl.cdiv(stop - first, C)
    d_v = tl.program_id(1) * s.BV + tl.arange(0, s.BV)

    q_rows = tiles.rows_at(q, row, first, head)
    k_rows = tiles.rows_at(k, row, first, head)
    g_rows = tiles.rows_at(g, row, first, head)

    # The state is held in parts of its key channels: their tiles need fewer registers.
    S, lasting = (), ()
    before = (bounds, slot) if OUTPUT and bounds is not None else (initial, n)
    for p in tl.static_range(s.BK // s.KS):
        d = p * s.KS + tl.arange(0, s.KS)
        S += (tiles.load_state(*before, head, H, d[:, None], d_v[None, :], s),)
        lasting += (tl.full([s.KS if s.GK == s.K else 1], 1.0, tl.float32),)
    if chunks is not None:
        chunk_slot = tiles.first_slot(cu, n, T, C) + j * (L // C)

    for i in tl.range(count, disable_licm=True):
        c = count - 1 - i if REVERSE else i
        at = c * C, stop - first - c * C
        if chunks is not None:
            store_parts(chunks, S, chunk_slot + c, head, H, d_v, s)
        P = scores(q_rows, k_rows, g_rows, at, scale, levels, REVERSE, s) if OUTPUT else None
        w_tile = tiles.load_values(tiles.rows_at(w, row, first, head), at, d_v, s)
        o = tiles.product(P, w_tile, None, s) if OUTPUT else 0.0
        held, lasted = S, lasting
        S, lasting = (), ()
        for p in tl.static_range(s.BK // s.KS):
            d = p * s.KS + tl.arange(0, s.KS)
            part, o, total = through_state(
                held[p], o, w_tile, q_rows, k_rows, g_rows, at, scale, d, REVERSE, OUTPUT, s
            )
            S += (part,)
            lasting += (lasted[p] * total,)
        if OUTPUT:
            tiles.store_tile(tiles.rows_at(out, row, first, head), o, at, d_v, s)

    if not OUTPUT:
        store_parts(bounds, S, slot, head, H, d_v, s)
        if lasts is not None:
            if tl.program_id(1) == 0:
                for p in tl.static_range(s.BK // s.KS if s.GK == s.K else 1):
                    d_g = p * s.KS + tl.arange(0, s.KS if s.GK == s.K else 1)
                    place = lasts + (slot.to(tl.int64) * H + head) * s.GK + d_g
                    tl.store(place, lasting[p], mask=d_g < s.GK)
    elif final is not None:
        if ends:
            store_parts(final, S, n, head, H, d_v, s)


@triton.jit(do_not_specialize=["T", "N", "L", "H"])
def scan_kernel(
    bounds, lasts,           # fp32 [slots, H, K, V], [slots, H, GK] or None
    initial,                 # fp32 [N, H, K, V] or None
    cu, T, N, L, H, BLOCK: tl.constexpr, REVERSE: tl.constexpr, s: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds by the state before it (REVERSE: the gradient after it)."""
    n = tl.program_id(0) // H
    head = tl.program_id(0) % H
    _, start, end = tiles.bounds_of(cu, n, T)
    count = tl.maximum(tl.cdiv(end - start, L), 1)
    base = tiles.first_slot(cu, n, T, L)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < s.K * s.V
    S = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        at = initial + (n.to(tl.int64) * H + head) * (s.K * s.V) + e
        S += tl.load(at, mask=inside, other=0.0)
    for i in range(count):
        place = (base + (count - 1 - i if REVERSE else i)).to(tl.int64) * H + head
        at = bounds + place * (s.K * s.V) + e
        # What the last segment of the direction adds, nobody reads: its slot was not written.
        more = inside & (i < count - 1)
        added = tl.load(at, mask=more, other=0.0)
        tl.store(at, S, mask=inside)
        if lasts is not None:
            d_g = e // s.V if s.GK == s.K else e * 0
            S *= tl.load(lasts + place * s.GK + d_g, mask=more, other=0.0)
        S += added
