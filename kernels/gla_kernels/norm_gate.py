"""RMSNorm of each head and the swish gate behind it, in one pass over memory each way.

    y = n w silu(z)        n = x r        r = 1 / sqrt(mean(x^2) + eps)

Backward, from dy: with s = silu(z) and dn = dy w s,

    dx = r (dn - n mean(dn n))      dz = dy n w silu'(z)      dw = sum over rows of dy n s

Each program sums dw over its rows, and torch sums the programs: the order is fixed. Computed in
fp32, rounded once. Sizes: R rows (tokens and heads), V channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_kernels.support import contiguous, launch, operator, room_for, shapes_only

_TILE = 4096  # elements of a tile
_PROGRAMS = 1024  # at most, of the backward pass


@triton.jit(do_not_specialize=["R", "eps"])
def norm_gate_kernel(
    x, z, w,                         # [R, V], [R, V], [V]
    R, eps, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    y=None,                          # [R, V]: the forward pass
    dy=None, dx=None, dz=None, dw=None,  # [R, V], [R, V], [R, V], fp32 [programs, V]: backward
):  # fmt: skip
    d = tl.arange(0, BV)
    weight = tl.load(w + d, mask=d < V, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BV], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BR + tl.arange(0, BR)
        at, mask = row[:, None] * V + d[None, :], (row < R)[:, None] & (d < V)[None, :]
        tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(tile * tile, 1) / V + eps)[:, None]
        n, sigmoid = tile * r, tl.sigmoid(gate)
        if y is not None:
            tl.store(y + at, (n * weight * gate * sigmoid).to(y.dtype.element_ty), mask=mask)
        else:
            grad = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(grad * n * gate * sigmoid, 0)
            grad_z = grad * n * weight * sigmoid * (1 + gate * (1 - sigmoid))
            tl.store(dz + at, grad_z.to(dz.dtype.element_ty), mask=mask)
            dn = grad * weight * gate * sigmoid
            grad_x = r * (dn - n * (tl.sum(dn * n, 1) / V)[:, None])
            tl.store(dx + at, grad_x.to(dx.dtype.element_ty), mask=mask)
    if dw is not None:
        tl.store(dw + tl.program_id(0) * V + d, total, mask=d < V)


@operator("norm_gate")
def norm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, times silu(z).

    Args:
        x, z: [..., V], any of fp32, bf16 and fp16.
        weight: [V].
        eps: added to the mean square.

    Returns:
        [..., V] in the dtype of x.
    """
    (y,) = room_for(x)
    if shapes_only(x):
        return y
    blocks, sizes = _sizes(x, eps)
    launch(norm_gate_kernel, (blocks,), *contiguous(x, z, weight), y=y, **sizes)
    return y


@operator(
    "norm_gate_backward",
    "(Tensor x, Tensor z, Tensor weight, float eps, Tensor dy) -> (Tensor, Tensor, Tensor)",
)
def _backward(x, z, weight, eps, dy):
    dx, dz = room_for(x, z)
    if shapes_only(x):
        return dx, dz, *room_for(weight)
    blocks, sizes = _sizes(x, eps)
    dw = x.new_empty(min(_PROGRAMS, blocks), x.shape[-1], dtype=torch.float32)
    *inputs, dy = contiguous(x, z, weight, dy)
    launch(norm_gate_kernel, dw.shape[:1], *inputs, dy=dy, dx=dx, dz=dz, dw=dw, **sizes)
    return dx, dz, dw.sum(0).to(weight.dtype)


def _sizes(x: Tensor, eps: float) -> tuple[Any, dict[str, Any]]:
    """Blocks of rows, and the kernel's sizes."""
    V = x.shape[-1]
    R, BV = x.numel() // V, triton.next_power_of_2(V)
    BR = max(1, _TILE // BV)
    return -(-R // BR), dict(R=R, eps=eps, V=V, BR=BR, BV=BV, num_warps=8)


def _save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, dy):
    return *torch.ops.gla_kernels.norm_gate_backward(*ctx.saved_tensors, ctx.eps, dy), None


norm_gate.register_autograd(_autograd, setup_context=_save)
