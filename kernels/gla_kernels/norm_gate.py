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

from gla_kernels.support import contiguous, room_for

_TILE = 4096  # elements of a tile
_PROGRAMS = 1024  # at most, of the backward pass


@triton.jit(do_not_specialize=["R", "eps"])
def _forward_kernel(
    x, z, w, y, R, eps, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    at, mask, d = _places(tl.program_id(0), R, V, BR, BV)
    n, _, weight = _normalized(x, w, at, mask, d, eps, V)
    gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, (n * weight * gate * tl.sigmoid(gate)).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "eps"])
def _backward_kernel(
    x, z, w, dy, dx, dz, dw, R, eps, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    total = tl.zeros([BV], tl.float32)
    d = tl.arange(0, BV)
    for block in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        at, mask, d = _places(block, R, V, BR, BV)
        n, r, weight = _normalized(x, w, at, mask, d, eps, V)
        gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        total += tl.sum(grad * n * gate * sigmoid, 0)
        grad_z = grad * n * weight * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(dz + at, grad_z.to(dz.dtype.element_ty), mask=mask)
        dn = grad * weight * gate * sigmoid
        grad_x = r * (dn - n * (tl.sum(dn * n, 1) / V)[:, None])
        tl.store(dx + at, grad_x.to(dx.dtype.element_ty), mask=mask)
    tl.store(dw + tl.program_id(0) * V + d, total, mask=d < V)


@triton.jit
def _places(block, R, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """Offsets [BR, BV] of a block of rows, which of them exist, and their channels."""
    rows = tl.cast(block, tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BV)
    return rows[:, None] * V + d[None, :], (rows < R)[:, None] & (d < V)[None, :], d


@triton.jit
def _normalized(x, w, at, mask, d, eps, V: tl.constexpr):
    """n [BR, BV], r [BR, 1], the weight [1, BV]."""
    tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(tile * tile, 1) / V + eps)[:, None]
    return tile * r, r, tl.load(w + d, mask=d < V, other=0.0).to(tl.float32)[None, :]


def _sizes(x: Tensor, eps: float) -> tuple[Any, dict[str, Any]]:
    """Blocks of rows, and what both kernels take beside tensors."""
    V = x.shape[-1]
    R, BV = x.numel() // V, triton.next_power_of_2(V)
    BR = max(1, _TILE // BV)
    return -(-R // BR), dict(R=R, eps=eps, V=V, BR=BR, BV=BV, num_warps=8)


@torch.library.custom_op("gla_kernels::norm_gate", mutates_args=())
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
    blocks, sizes = _sizes(x, eps)
    if blocks:
        _forward_kernel[(blocks,)](*contiguous(x, z, weight), y, **sizes)
    return y


@norm_gate.register_fake
def _(x, z, weight, eps):
    return room_for(x)[0]


@torch.library.custom_op("gla_kernels::norm_gate_backward", mutates_args=())
def _backward(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dz = room_for(x, z)
    blocks, sizes = _sizes(x, eps)
    programs = min(_PROGRAMS, blocks)
    dw = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    if blocks:
        _backward_kernel[(programs,)](*contiguous(x, z, weight, dy), dx, dz, dw, **sizes)
    return dx, dz, dw.sum(0).to(weight.dtype)


@_backward.register_fake
def _(x, z, weight, eps, dy):
    return room_for(x, z, weight)


def _save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, dy):
    return *torch.ops.gla_kernels.norm_gate_backward(*ctx.saved_tensors, ctx.eps, dy), None


norm_gate.register_autograd(_autograd, setup_context=_save)
