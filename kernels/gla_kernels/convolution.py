"""Short convolution with its state, and the SiLU behind it: one launch each way, decoding included.

    a_t = sum_{i < W} w_i u_{t-W+1+i}        y_t = silu(a_t)

u_p is token p of a sequence and, where p < 0, row p + W - 1 of the state before it; the state
after it is the last W - 1 of u. Backward, from dy and the gradient of that state:

    da_t = dy_t silu'(a_t)    dw_i = sum_t da_t u_{t-W+1+i}    du_p = sum_{i < W} w_i da_{p+W-1-i}

A program works on S tokens of one sequence. Its tile begins W - 1 tokens before them, so that the
first one has the state; backward it ends W - 1 after, so that it finds all da that it needs by
itself: a is computed once, not W times, and da is shifted within the tile. Its sums for dw are
added up by torch: the order is fixed. Computed in fp32, rounded once. Sizes: see ``tiles``; C
channels, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_kernels.support import contiguous, launch, operator, room_for, shapes_only
from gla_kernels.tiles import find_segment

_TILE = 4096  # elements of a tile


@triton.jit(do_not_specialize=["T", "N"])
def convolution_kernel(
    x, w, state, cu,      # [B, T, C], [W, C], [N, W - 1, C] or None, [N + 1] or None
    dy, dfinal,           # like out and out_state, or None; no dy: the forward pass
    out, out_state, dw,   # y and the state after it, or dx and dstate; fp32 [slots, W, C]
    T, N, C, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # Sequences without tokens have a program each, for their states.
    n, row, j, start, end = find_segment(cu, tl.program_id(0), tl.maximum(T, 1), N, S)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = tl.arange(0, R) - (W - 1)
    first = j * S
    length = tl.minimum(end - (start - first), T)
    t = first + r
    channel = (c < C)[None, :]
    here = ((t >= 0) & (t < length))[:, None] & channel
    own = ((r >= 0) & (r < S))[:, None]
    before = (t < 0)[:, None] & channel  # rows of the state, in the first program
    tokens = row.to(tl.int64) * T + start
    rows = n.to(tl.int64) * (W - 1) + first + (W - 1)
    last = length - (W - 1)
    kept = ((t >= last) & (t < length))[:, None] & channel  # rows of the state after the tokens

    a = tl.zeros([R, BC], tl.float32)
    for i in tl.static_range(W):
        u = _inputs(x, state, tokens, rows, first, r + (i - W + 1), length, c, C, W)
        a += u * _weight(w, i, c, C)
    sigmoid = tl.sigmoid(a)
    if dy is None:
        y = (a * sigmoid).to(out.dtype.element_ty)
        tl.store(_tile(out, tokens, r, c, C), y, mask=own & here)
        if first + S > last:
            tl.store(_tile(out_state, rows - length, r, c, C), u, mask=(own | before) & kept)
    else:
        grad = tl.load(_tile(dy, tokens, r, c, C), mask=here, other=0.0).to(tl.float32)
        da = grad * sigmoid * (1 + a * (1 - sigmoid))
        du = da * _weight(w, W - 1, c, C)
        sums = dw + tl.program_id(0).to(tl.int64) * W * C + c
        for i in tl.static_range(W):
            u = _inputs(x, state, tokens, rows, first, r + (i - W + 1), length, c, C, W)
            tl.store(sums + i * C, tl.sum(tl.where(own, da * u, 0.0), 0), mask=c < C)
            if i < W - 1:
                later = tl.minimum(tl.arange(0, R) + (W - 1 - i), R - 1)[:, None]
                du += _weight(w, i, c, C) * tl.gather(da, tl.broadcast_to(later, [R, BC]), 0)
        if dfinal is not None:
            du += tl.load(_tile(dfinal, rows - length, r, c, C), mask=kept, other=0.0)
        tl.store(_tile(out, tokens, r, c, C), du.to(out.dtype.element_ty), mask=own & here)
        tl.store(_tile(out_state, rows, r, c, C), du, mask=before)


@triton.jit
def _tile(pointer, row, r, c, C):
    """Pointers [len(r), len(c)] to rows ``row + r`` of C channels; far offsets in 64 bits."""
    return pointer + row * C + (r[:, None] * C + c[None, :])


@triton.jit
def _weight(w, i, c, C):
    return tl.load(w + i * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _inputs(x, state, tokens, rows, first, r, length, c, C, W: tl.constexpr):
    """u [len(r), len(c)] fp32 at first + r: tokens, the state before them, 0 where neither is."""
    p = first + r
    channel = (c < C)[None, :]
    mask = ((p >= 0) & (p < length))[:, None] & channel
    u = tl.load(_tile(x, tokens, r, c, C), mask=mask, other=0.0)
    if state is not None:
        mask = ((p < 0) & (p >= 1 - W))[:, None] & channel
        before = tl.load(_tile(state, rows, r, c, C), mask=mask, other=0.0)
        u += before.to(u.dtype)  # one of the two is 0
    return u.to(tl.float32)


def _run(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    cu: Tensor | None,
    dy: Tensor | None = None,
    dfinal: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after it and nothing; or the gradients of x, state and, in parts, the weight."""
    (B, T, C), W = x.shape, weight.shape[0]
    N = B if cu is None else cu.shape[0] - 1
    (out,), out_state = room_for(x), x.new_empty(N, W - 1, C, dtype=torch.float32)
    if shapes_only(x):
        return out, out_state, weight.new_empty(1, W, C)
    halo = W - 1 if dy is None else 2 * (W - 1)  # tokens of a tile around those of its program
    R = max(8 if T == 1 else 64, 1 << (2 * halo - 1).bit_length())
    S, BC = R - halo, min(triton.next_power_of_2(C), max(16, min(256, _TILE // R)))
    slots = N * -(-max(T, 1) // S) if cu is None else T // S + N
    dw = x.new_empty(0 if dy is None else slots, W, C, dtype=torch.float32)
    launch(
        convolution_kernel, (slots, triton.cdiv(C, BC)),
        *contiguous(x, weight, state, cu, dy, dfinal), out, out_state, dw,
        T=T, N=N, C=C, W=W, S=S, R=R, BC=BC, num_warps=8,
    )  # fmt: skip
    return out, out_state, dw


@operator("short_convolution")
def short_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution and SiLU.

    Args:
        x: [B, T, C], fp32, bf16 or fp16.
        weight: [W, C], the last row for the token itself.
        state: [N, W - 1, C] inputs before the first token, rounded to the dtype of x; None is 0.
        cu_seqlens: int [N + 1] offsets of packed documents (B = 1), or None.

    Returns:
        y [B, T, C] in the dtype of x, and the state after the last token, fp32.
    """
    return _run(x, weight, state, cu_seqlens)[:2]


@operator(
    "short_convolution_backward",
    "(Tensor x, Tensor weight, Tensor? state, Tensor? cu_seqlens, Tensor dy, Tensor? dfinal) "
    "-> (Tensor, Tensor, Tensor)",
)
def _backward(x, weight, state, cu_seqlens, dy, dfinal):
    dx, dstate, dw = _run(x, weight, state, cu_seqlens, dy, dfinal)
    return dx, dw.sum(0).to(weight.dtype), dstate


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _autograd(ctx, dy, dfinal):
    x, weight, state, cu_seqlens = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dw, dstate = torch.ops.gla_kernels.short_convolution_backward(
        x, weight, state, cu_seqlens, dy, dfinal
    )
    return dx, dw, None if state is None else dstate.to(state.dtype), None


short_convolution.register_autograd(_autograd, setup_context=_save)
