"""Cross entropy of a chunk of logits, and their gradient in their place.

    loss = log sum_j exp(x_j) - x_target        dx_j = exp(x_j) / sum_k exp(x_k) - [j = target]

A program reads its rows once for the largest logit, the sum and the target's logit, then again
(from the cache, where a chunk fits) to replace each logit by its gradient. Computed in fp32,
rounded once. Sizes: M rows (tokens), V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gla_kernels.support import launch, operator, shapes_only

_TILE = 4096  # elements of a tile
_LOWEST = tl.constexpr(-3.4e38)  # finite: a block of logits that are -inf gives no inf - inf


@triton.jit(do_not_specialize=["M", "ignore_index"])
def cross_entropy_kernel(
    x, targets, losses,  # [M, V], int64 [M], fp32 [M]
    M, V, ignore_index, GRADIENT: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    target = tl.load(targets + row, mask=row < M, other=0)
    kept = (row < M) & (target != ignore_index)
    chosen = target.to(tl.int32)[:, None]
    x += row[:, None] * V
    d = tl.arange(0, BV)[None, :]
    top = tl.full([BM], _LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    picked = tl.zeros([BM], tl.float32)
    for start in range(0, V, BV):
        j = start + d
        tile = tl.load(x + j, mask=kept[:, None] & (j < V), other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(tile, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(tile - higher[:, None]), 1)
        picked += tl.sum(tl.where(j == chosen, tile, 0.0), 1)
        top = higher
    loss = tl.log(total) - (picked - top)
    loss = tl.where((target >= 0) & (target < V), loss, float("nan"))  # no such target
    tl.store(losses + row, tl.where(kept, loss, 0.0), mask=row < M)
    if GRADIENT:
        tl.debug_barrier()  # a row is read whole before any of it is replaced
        for start in range(0, V, BV):
            j = start + d
            tile = tl.load(x + j, mask=kept[:, None] & (j < V), other=0.0).to(tl.float32)
            p = tl.exp(tile - top[:, None]) / total[:, None]
            grad = tl.where(kept[:, None], tl.where(j == chosen, p - 1.0, p), 0.0)
            tl.store(x + j, grad.to(x.dtype.element_ty), mask=(row < M)[:, None] & (j < V))


@operator("cross_entropy", mutates=("logits",))
def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """-log softmax(logits)[target] of each row; the logits are overwritten.

    Args:
        logits: [M, V] contiguous, fp32, bf16 or fp16; afterwards the gradient of the sum of losses.
        targets: [M] int64; one that is no token, and not ignored, gives NaN.
        ignore_index: targets whose loss and gradients are 0.
        gradient: False leaves the logits as they are.

    Returns:
        [M] fp32.
    """
    M, V = logits.shape
    losses = logits.new_empty(M, dtype=torch.float32)
    if shapes_only(logits):
        return losses
    BV = min(triton.next_power_of_2(V), _TILE)
    BM = _TILE // BV
    launch(
        cross_entropy_kernel, (triton.cdiv(M, BM),), logits, targets.contiguous(), losses,
        M, V, ignore_index, GRADIENT=gradient, BM=BM, BV=BV, num_warps=8,
    )  # fmt: skip
    return losses
