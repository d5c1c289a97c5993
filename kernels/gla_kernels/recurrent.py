"""The recurrent form: token after token, for decoding and very short sequences.

A program holds a [K, BV] block of one head's state in registers: it reads the state once, writes it
once, and reads the tokens in between. Its backward is that of the chunkwise form.

Sizes: see ``tiles``.
"""

import triton
import triton.language as tl

from gla_kernels.decay import CHANNEL_GATE, LOG2E, NO_GATE
from gla_kernels.tiles import bounds_of, load_state, rows_at, store_state


@triton.jit(do_not_specialize=["scale", "T", "N", "H", "k_group", "v_group", "g_group"])
def recurrent_kernel(
    q, k, v, g,              # [B, T, heads, K], [.., K], [.., V], [.., 1 or K] or None
    out,                     # [B, T, H, V] contiguous
    initial, final,          # fp32 [N, H, K, V]; initial may be None
    cu,                      # [N + 1] or None
    scale, T, N, H,
    k_group, v_group, g_group,   # heads that share one head of k, v, g
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // H
    head = tl.program_id(0) % H
    row, start, end = bounds_of(cu, n, T)
    d_k = tl.arange(0, BK)
    d_v = tl.program_id(1) * BV + tl.arange(0, BV)
    q_row = rows_at(q, row, start, head, q_b, q_t, q_h)
    k_row = rows_at(k, row, start, head // k_group, k_b, k_t, k_h)
    v_row = rows_at(v, row, start, head // v_group, v_b, v_t, v_h)
    out_row = rows_at(out, row, start, head, T.to(tl.int64) * H * V, H * V, V)
    if GATE != NO_GATE:
        GK: tl.constexpr = K if GATE == CHANNEL_GATE else 1
        d_g = tl.arange(0, BK if GATE == CHANNEL_GATE else 1)
        g_row = rows_at(g, row, start, head // g_group, g_b, g_t, g_h)

    S = load_state(initial, n, head, H, d_k[:, None], d_v[None, :], K, V)
    for i in range(end - start):
        t = tl.cast(i, tl.int64)
        q_t_ = tl.load(q_row + t * q_t + d_k, mask=d_k < K, other=0.0).to(tl.float32) * scale
        k_t_ = tl.load(k_row + t * k_t + d_k, mask=d_k < K, other=0.0).to(tl.float32)
        v_t_ = tl.load(v_row + t * v_t + d_v, mask=d_v < V, other=0.0).to(tl.float32)
        if GATE != NO_GATE:
            gate = tl.load(g_row + t * g_t + d_g, mask=d_g < GK, other=0.0).to(tl.float32)
            S *= tl.exp2(gate * LOG2E)[:, None]
        S += k_t_[:, None] * v_t_[None, :]
        o = tl.sum(q_t_[:, None] * S, 0)
        tl.store(out_row + t * (H * V) + d_v, o.to(out.dtype.element_ty), mask=d_v < V)
    store_state(final, S, n, head, H, d_k[:, None], d_v[None, :], K, V)
