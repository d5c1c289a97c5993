"""Root mean square normalization (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 or wider.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def gated(self, x: Tensor, z: Tensor, fused: bool) -> Tensor:
        """Normalize x and multiply with silu(z).

        Args:
            x, z: [..., dim].
            fused: by the Triton kernel, which ``impl="triton"`` of the op has loaded.

        Returns:
            [..., dim].
        """
        if fused:
            return torch.ops.gla_kernels.norm_gate(x, z, self.weight, self.eps)
        return self(x) * F.silu(z)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> y [..., dim] in the dtype of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return y.to(x.dtype)
