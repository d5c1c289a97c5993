"""Linear maps as the mixers use them: initialization, and maps that stay in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02
# Weights between which a row is multiplied and added up outside of a graph; measured on two cores.
_SMALL, _CACHED = 1 << 15, 1 << 21


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O].

    The product with one row, of a decoded token on a CPU, is written out: the libraries' own runs
    on one core. A compiled graph makes one loop of sums over products, in any dtype; without, fp32
    weights of middle sizes are multiplied and added up, and large ones, whose products would not
    stay in the cache, go to the library in as many parts as there are threads, if O divides so.
    """
    if not is_one_row(x) or x.shape[-1] != weight.shape[-1]:
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        y = row_sums(x, weight)
    elif not x.dtype == weight.dtype == torch.float32 or weight.numel() < _SMALL:
        return F.linear(x, weight, bias)
    elif weight.numel() <= _CACHED:
        y = torch.linalg.vecdot(weight, x.reshape(1, -1))
    else:
        parts = math.gcd(weight.shape[0], torch.get_num_threads())
        y = torch.matmul(x.reshape(1, -1), weight.unflatten(0, (parts, -1)).mT).flatten()
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def is_one_row(x: Tensor) -> bool:
    """Whether products with x [..., I] may be written out; see ``linear``."""
    one_row = x.numel() == x.shape[-1] and x.device.type == "cpu"
    return one_row and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


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
            return linear(input.to(self.weight.dtype), self.weight, self.bias)
