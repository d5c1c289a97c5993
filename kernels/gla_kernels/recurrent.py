"""The recurrent form: token after token, for decoding and very short sequences.

A program holds a [K, BV] block of one head's state in registers: it reads the state once, writes it
once, and reads the tokens in between. Its backward is that of the chunkwise form.

Sizes: see ``tiles``.
"""

import triton
import triton.language as tl

from gla_kernels import decay, tiles


@triton.jit
def load_token(rows, i, d):
    """Token i of the rows in fp32, [len(d)]; zero past D channels."""
    pointer, stride, D = rows
    x = tl.load(pointer + tl.cast(i, tl.int64) * stride + d, mask=d < D, other=0.0)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["scale", "T", "N", "H"])
def recurrent_kernel(
    q, k, v, g,              # [B, T, heads, K], [.., K], [.., V], [.., GK]
    out,                     # [B, T, H, V]
    initial, final,          # fp32 [N, H, K, V]; initial may be None
    cu, scale, T, N, H, BV: tl.constexpr, s: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // H
    head = tl.program_id(0) % H
    row, start, end = tiles.bounds_of(cu, n, T)
    d_k = tl.arange(0, s.BK)
    d_v = tl.program_id(1) * BV + tl.arange(0, BV)
    d_g = d_k if s.GK == s.K else tl.arange(0, 1)
    q_rows = tiles.rows_at(q, row, start, head)
    k_rows = tiles.rows_at(k, row, start, head)
    v_rows = tiles.rows_at(v, row, start, head)
    g_rows = tiles.rows_at(g, row, start, head)
    pointer, stride, _ = tiles.rows_at(out, row, start, head)

    S = tiles.load_state(initial, n, head, H, d_k[:, None], d_v[None, :], s)
    for i in range(end - start):
        q_t = load_token(q_rows, i, d_k) * scale
        k_t = load_token(k_rows, i, d_k)
        v_t = load_token(v_rows, i, d_v)
        if s.GK > 0:
            S *= decay.exp(load_token(g_rows, i, d_g))[:, None]
        S += k_t[:, None] * v_t[None, :]
        o = tl.sum(q_t[:, None] * S, 0)
        at = pointer + tl.cast(i, tl.int64) * stride + d_v
        tl.store(at, o.to(pointer.dtype.element_ty), mask=d_v < s.V)
    tiles.store_state(final, S, n, head, H, d_k[:, None], d_v[None, :], s)
