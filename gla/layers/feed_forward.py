"""SwiGLU feed-forward layer (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gla.layers.linear import Linear


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)).

    Args:
        d_model: width of x and y.
        hidden: width in between.
    """

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, hidden)
        self.up_proj = Linear(d_model, hidden)
        self.down_proj = Linear(hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> y [..., d_model]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
