"""Short convolution with its state, and the SiLU behind it: one launch each way, decoding included.

    a_t = sum_{i < W} w_i u_{t-W+1+i}        y_t = silu(a_t)

u_p is token p of a sequence and, where p < 0, row p + W - 1 of the state before it; the state
after it is the last W - 1 of u. Backward, from dy and the gradient of that state:

    da_t = dy_t silu'(a_t)    dw_i = sum_t da_t u_{t-W+1+i}    du_p = sum_{i < W} w_i da_{p+W-1-i}

A program works on S tokens of one sequence. Backward, its tile begins W - 1 tokens before them and
ends W - 1 after, so that it finds all da that it needs by itself: a is computed once, not W times,
and da is shifted within the tile. Its sums for dw are added up by torch: the order is fixed.
Computed in fp32, rounded once. Sizes: see ``tiles``; C channels, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_kernels.support import SHORT, contiguous, room_for
from gla_kernels.tiles import find_segment

_TILE = 4096  # elements of a tile


@triton.jit(do_not_specialize=["T", "N"])
def _convolution_kernel(
    x, w, state, cu,      # [B, T, C], [W, C], [N, W - 1, C] or None, [N + 1] or None
    y, final,             # [B, T, C], [N, W - 1, C]
    T, N, C, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    n, token, start, length, c = _place(cu, T, N, S, BC)
    r = tl.arange(0, R)
    a = _sums(x, w, state, n, token, start, length, r, c, C, W)
    at = _tile(y, token + start, r, c, C)
    here = (start + r < length)[:, None] & (c < C)[None, :]
    tl.store(at, (a * tl.sigmoid(a)).to(y.dtype.element_ty), mask=here)
    if start == 0:
        last = length - (W - 1)
        for j in range(W - 1):
            row = j + tl.arange(0, 1)
            kept = _inputs(x, state, n, token, last, length, row, c, C, W)
            tl.store(_tile(final, n * (W - 1), row, c, C), kept, mask=(c < C)[None, :])


@triton.jit(do_not_specialize=["T", "N"])
def _convolution_backward_kernel(
    x, w, state, cu, dy, dfinal, dx, dw, dstate,  # as above; dw [slots, W, C] fp32
    T, N, C, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    n, token, start, length, c = _place(cu, T, N, S, BC)
    row = tl.arange(0, R)
    r = row - (W - 1)
    t = start + r
    channel = (c < C)[None, :]
    a = _sums(x, w, state, n, token, start, length, r, c, C, W)
    here = ((t >= 0) & (t < length))[:, None] & channel
    grad = tl.load(_tile(dy, token + start, r, c, C), mask=here, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(a)
    da = grad * sigmoid * (1 + a * (1 - sigmoid))
    own = ((r >= 0) & (r < S))[:, None]
    du = da * _weight(w, W - 1, c, C)
    sums = dw + tl.program_id(0).to(tl.int64) * W * C + c
    for i in tl.static_range(W):
        u = _inputs(x, state, n, token, start, length, r + (i - W + 1), c, C, W)
        tl.store(sums + i * C, tl.sum(tl.where(own, da * u, 0.0), 0), mask=c < C)
        if i < W - 1:
            later = tl.minimum(row + (W - 1 - i), R - 1)[:, None]
            du += _weight(w, i, c, C) * tl.gather(da, tl.broadcast_to(later, [R, BC]), 0)
    last = length - (W - 1)
    if dfinal is not None:
        kept = ((t >= last) & (t < length))[:, None] & channel
        du += tl.load(_tile(dfinal, n * (W - 1) + start - last, r, c, C), mask=kept, other=0.0)
    tl.store(_tile(dx, token + start, r, c, C), du.to(dx.dtype.element_ty), mask=own & here)
    before = (t < 0)[:, None] & channel
    tl.store(_tile(dstate, n * (W - 1) + start + (W - 1), r, c, C), du, mask=before)


@triton.jit
def _place(cu, T, N, S: tl.constexpr, BC: tl.constexpr):
    """Sequence, its first token of all, where in it the program starts, its length; channels."""
    # Sequences without tokens have a program each, for their states.
    n, row, j, here, end = find_segment(cu, tl.program_id(0), tl.maximum(T, 1), N, S)
    first = here - j * S
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    return n.to(tl.int64), row.to(tl.int64) * T + first, j * S, tl.minimum(end - first, T), c


@triton.jit
def _tile(pointer, row, r, c, C):
    """Pointers [len(r), len(c)] to rows ``row + r`` of C channels; far offsets in 64 bits."""
    return pointer + tl.cast(row, tl.int64) * C + (r[:, None] * C + c[None, :])


@triton.jit
def _sums(x, w, state, n, token, start, length, r, c, C, W: tl.constexpr):
    """a [len(r), len(c)] of the tokens start + r."""
    a = tl.zeros([r.shape[0], c.shape[0]], tl.float32)
    for i in tl.static_range(W):
        u = _inputs(x, state, n, token, start, length, r + (i - W + 1), c, C, W)
        a += u * _weight(w, i, c, C)
    return a


@triton.jit
def _weight(w, i, c, C):
    return tl.load(w + i * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _inputs(x, state, n, token, start, length, r, c, C, W: tl.constexpr):
    """u [len(r), len(c)] fp32 at start + r: tokens, the state before them, 0 where neither is."""
    p = start + r
    channel = (c < C)[None, :]
    u = tl.load(
        _tile(x, token + start, r, c, C),
        mask=((p >= 0) & (p < length))[:, None] & channel,
        other=0.0,
    )
    if state is not None:
        before = _tile(state, n * (W - 1) + start + (W - 1), r, c, C)
        mask = ((p < 0) & (p >= 1 - W))[:, None] & channel
        u += tl.load(before, mask=mask, other=0.0).to(u.dtype)  # one of the two is 0
    return u.to(tl.float32)


def _sizes(x: Tensor, weight: Tensor, cu: Tensor | None, halo: int) -> tuple[Any, dict[str, Any]]:
    """Grid and the kernel's sizes; ``halo`` tokens of a tile lie around those of a program."""
    (B, T, C), W = x.shape, weight.shape[0]
    N = B if cu is None else cu.shape[0] - 1
    R = max(SHORT if T <= SHORT else 64, triton.next_power_of_2(2 * halo))
    S, BC = R - halo, min(triton.next_power_of_2(C), max(16, _TILE // R))
    slots = N * triton.cdiv(max(T, 1), S) if cu is None else T // S + N
    return (slots, triton.cdiv(C, BC)), dict(T=T, N=N, C=C, W=W, S=S, R=R, BC=BC, num_warps=8)


@torch.library.custom_op("gla_kernels::short_convolution", mutates_args=())
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
    y, final = _empty(x, weight, state, cu_seqlens)
    grid, sizes = _sizes(x, weight, cu_seqlens, 0)
    if grid[0]:
        tensors = contiguous(x, weight, state, cu_seqlens)
        _convolution_kernel[grid](*tensors, y, final, **sizes)
    return y, final


@short_convolution.register_fake
def _empty(x, weight, state, cu_seqlens):
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = x.new_empty(N, weight.shape[0] - 1, x.shape[2], dtype=torch.float32)
    return *room_for(x), final


@torch.library.custom_op(
    "gla_kernels::short_convolution_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? state, Tensor? cu_seqlens, Tensor dy, "
    "Tensor? dfinal) -> (Tensor, Tensor, Tensor)",
)
def _backward(x, weight, state, cu_seqlens, dy, dfinal):
    dx, dstate = _empty(x, weight, state, cu_seqlens)
    grid, sizes = _sizes(x, weight, cu_seqlens, 2 * (weight.shape[0] - 1))
    dw = x.new_empty(grid[0], *weight.shape, dtype=torch.float32)
    if grid[0]:
        tensors = contiguous(x, weight, state, cu_seqlens, dy, dfinal)
        _convolution_backward_kernel[grid](*tensors, dx, dw, dstate, **sizes)
    return dx, dw.sum(0).to(weight.dtype), dstate


@_backward.register_fake
def _(x, weight, state, cu_seqlens, dy, dfinal):
    dx, dstate = _empty(x, weight, state, cu_seqlens)
    return dx, *room_for(weight), dstate


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
