"""Grouped heads, shapes of log_decay, dtypes of the work. Sizes: see gated_linear_attention."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, G, D] -> view [B, T, H, D]; query head h reads group h // (H / G)."""
    B, T, G, D = x.shape
    if G == heads:
        return x
    return x.unsqueeze(3).expand(B, T, G, heads // G, D).reshape(B, T, heads, D)


def reduce_heads(grad: Tensor, groups: int) -> Tensor:
    """[B, T, H, D] -> [B, T, G, D], the sum over the heads of each group."""
    B, T, H, D = grad.shape
    return grad if groups == H else grad.view(B, T, groups, H // groups, D).sum(3)


def gate_as_4d(log_decay: Tensor, batch: int, tokens: int) -> Tensor:
    """[G], [B, T, G] or [B, T, G, K] -> view [B, T, G, 1 or K]."""
    if log_decay.dim() == 1:
        return log_decay.view(1, 1, -1, 1).expand(batch, tokens, -1, 1)
    return log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay


def gate_grad(grad: Tensor, log_decay: Tensor) -> Tensor:
    """Gradient of ``gate_as_4d``: [B, T, G, 1 or K] -> shape and dtype of log_decay."""
    if log_decay.dim() == 1:
        grad = grad.sum((0, 1))
    return grad.reshape(log_decay.shape).to(log_decay.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays; everything narrower is computed and accumulated in fp32."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(q: Tensor, v: Tensor) -> torch.dtype:
    """What the matrix products of q [B, T, H, K] and v [B, T, G, V] read and write.

    bf16 where the device multiplies it natively (their sums are fp32 inside a product); states and
    factors stay fp32. fp16 is computed in fp32: its range is too small for the factors. So are bf16
    calls of fewer than 16 tokens, keys or values: there is no time to win, and too little is summed
    for the roundings to average out.
    """
    small = min(q.shape[1], q.shape[3], v.shape[3]) < 16
    if v.dtype != torch.bfloat16 or small:
        return wide_dtype(v.dtype)
    native = v.device.type == "cuda" or (
        v.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    )
    return torch.bfloat16 if native else torch.float32
