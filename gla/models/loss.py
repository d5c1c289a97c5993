"""Cross entropy of a linear head without the logits of all tokens in memory.

Sizes: M tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_LOGITS = 2**22  # logits in memory at once, twice in fp32: 32 MiB


def linear_cross_entropy(
    h: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, fused: bool = False
) -> Tensor:
    """Sum over tokens of -log softmax(h W^T)[target], in fp32 or wider.

    The gradients are computed with the loss, chunk by chunk, so that no chunk is computed twice;
    they cost the memory of h and weight. Gradients of the gradient are refused.

    Args:
        h: [M, D].
        weight: [V, D].
        targets: [M] int64, below V.
        ignore_index: targets that count nothing.
        fused: what lies between the matrix products by the Triton kernel, which ``impl="triton"``
            of a layer has loaded. Chunks are larger then, in the same memory.

    Returns:
        The sum, a scalar; 0 if every target is ignored.
    """
    return _LinearCrossEntropy.apply(h, weight, targets, ignore_index, fused)


def _cross_entropy(
    x: Tensor, targets: Tensor, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Logits x [M, V], targets [M] -> losses [M], fp32 or wider, and the gradient of x if wanted.

    One name for x at all stages: what it was before is freed.
    """
    dtype, kept = x.dtype, targets != ignore_index
    index = targets.where(kept, 0).unsqueeze(1)
    x = x.to(torch.promote_types(dtype, torch.float32))
    x = x.log_softmax(-1)
    losses = -x.gather(1, index).squeeze(1).where(kept, 0)
    if not gradient:
        return losses, x
    x = x.exp_().scatter_add_(1, index, x.new_full((), -1).expand(index.shape))
    return losses, x.mul_(kept.unsqueeze(1)).to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, fused: bool
    ) -> Tensor:
        # Under autocast products run in its dtype; sums stay in fp32 or wider.
        narrow = torch.get_autocast_dtype(h.device.type)
        dtype = narrow if torch.is_autocast_enabled(h.device.type) else h.dtype
        wide = torch.promote_types(h.dtype, torch.float32)
        # The kernel works in place: one copy of the logits, so that as much memory holds more.
        more = 2 * wide.itemsize // dtype.itemsize if fused else 1
        rows = max(1, more * _CHUNK_LOGITS // weight.shape[0])
        w = weight.to(dtype)
        total = h.new_zeros((), dtype=wide)
        grad_h = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        grad_w = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        gradient = grad_h is not None or grad_w is not None
        with torch.autocast(h.device.type, enabled=False):
            for start in range(0, h.shape[0], rows):
                chunk = slice(start, start + rows)
                x, target = h[chunk].to(dtype), targets[chunk]
                if fused:
                    d_logits = F.linear(x, w)  # logits, until the kernel replaces them
                    losses = torch.ops.gla_kernels.cross_entropy(
                        d_logits, target, ignore_index, gradient
                    )
                else:
                    losses, d_logits = _cross_entropy(
                        F.linear(x, w), target, ignore_index, gradient
                    )
                total += losses.sum()
                if grad_h is not None:
                    grad_h[chunk] = d_logits @ w
                if grad_w is not None:
                    grad_w += d_logits.T @ x
                del d_logits  # before the next
        ctx.save_for_backward(grad_h, grad_w)
        ctx.dtypes = (h.dtype, weight.dtype)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        scaled = (
            None if g is None else (g * grads[0]).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return next(scaled), next(scaled), None, None, None
