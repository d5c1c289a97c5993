"""Linear maps as the mixers use them: initialization, and maps that stay in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O].

    The product with one row, of a decoded token on a CPU, is written as sums over products: the
    libraries' own runs on one core. A compiled graph makes one loop of it, in any dtype; without,
    the products are stored, which pays for fp32 weights of middle sizes.
    """
    fits = x.shape[-1] == weight.shape[-1]
    if not (fits and (is_one_compiled_row(x) or _is_one_eager_row(x, weight))):
        return F.linear(x, weight, bias)
    y = row_sums(x, weight)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def _is_one_row(x: Tensor) -> bool:
    one_row = x.numel() == x.shape[-1] and x.device.type == "cpu"
    return one_row and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


def is_one_compiled_row(x: Tensor) -> bool:
    """Whether products with x [..., I] are to be written as sums in a graph; see ``linear``."""
    return torch.compiler.is_compiling() and _is_one_row(x)


def _is_one_eager_row(x: Tensor, weight: Tensor) -> bool:
    wide = x.dtype == weight.dtype == torch.float32
    return wide and 1 << 15 < weight.numel() <= 1 << 22 and _is_one_row(x)


def row_sums(x: Tensor, weight: Tensor) -> Tensor:
    """x, one row of I numbers, times weight [O, I] of any dtype -> [O] in fp32 or wider."""
    wide = x.reshape(1, -1).to(torch.promote_types(x.dtype, torch.float32))
    if wide.dtype != x.dtype:
        # As strided, x is stored in fp32; else the compiler converts it for each row of weights.
        wide = wide.as_strided(wide.shape, wide.stride())
    return (weight.to(wide.dtype) * wide).sum(-1)


class Linear(nn.Linear):
    """``nn.Linear`` whose weights start as N(0, 0.02^2) and biases at 0.

    The initialization of the public GLA models (flash-linear-attention, ``initializer_range``).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(input, self.weight, self.bias)


class WideModule(nn.Module):
    """A module whose parameters and buffers stay in fp32 or wider, and are not decayed.

    For gates: a decay is multiplied with itself over thousands of tokens, so the 8 bits of bf16 are
    not enough. ``model.bfloat16()`` or ``.half()`` leaves them in fp32.
    """

    no_weight_decay = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WideModule:
        def keep_wide(x: Tensor) -> Tensor:
            moved = fn(x)
            narrow = moved.dtype.is_floating_point and moved.dtype.itemsize < 4
            return x.to(moved.device) if narrow else moved

        return super()._apply(keep_wide, recurse)


class WideLinear(WideModule, Linear):
    """A Linear that computes in fp32 or wider, under autocast too."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] in any float dtype -> [..., out_features] in the parameters' dtype."""
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(self.weight.dtype), self.weight, self.bias)
