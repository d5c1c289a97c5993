"""Linear maps whose weights are 8-bit integers.

    W[o, i] ≈ scale[o] · integer[o, i],   scale[o] = max_i |W[o, i]| / 127

Each row has its own scale (symmetric absolute maximum, as in LLM.int8(), arXiv 2208.07339).
Activations are not rounded to integers.

Sizes: I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla.layers.linear import is_one_row, row_sums

# Rows up to which the integer product, which reads the weights once and packs nothing, is faster
# than widening the weights first; measured on two cores with AVX-512. One row of a compiled graph
# is written as sums, as in ``gla.layers.linear``: the compiler reads the integers as they are.
FEW_ROWS = 16
_MULTIPLE = 32  # of inputs and outputs: the integer product reads past the end of others


class Int8Linear(nn.Module):
    """y = x (scale · weight)^T + bias.

    Args:
        weight: [O, I], any float dtype.
        bias: [O] or None.

    Attributes:
        weight: [O', I] int8, O' ≥ O a multiple of 32; the rows from O on are 0.
        scale: [O'] bf16.
        bias: [O] or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features = weight.shape[0]
        wide = F.pad(weight.detach().float(), (0, 0, 0, -weight.shape[0] % _MULTIPLE))
        # Rounded first, so that its rounding is no error of its own.
        scale = (wide.abs().amax(1) / 127).bfloat16()
        divisor = scale.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        integers = (wide / divisor).round().clamp(-127, 127)
        self.register_buffer("weight", integers.to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> y [..., O]."""
        rows = x.reshape(-1, x.shape[-1])
        fits = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.shape[-1] % _MULTIPLE == 0
        if torch.compiler.is_compiling() and is_one_row(x):
            y = (row_sums(x, self.weight) * self.scale).to(x.dtype).unsqueeze(0)
        elif fits and 0 < rows.shape[0] <= FEW_ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        else:
            y = F.linear(rows, self.weight.to(x.dtype) * self.scale.to(x.dtype).unsqueeze(1))
        y = y[:, : self.out_features]
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)
