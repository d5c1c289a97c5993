"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves rotated as in GPT-NeoX."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(q: Tensor, k: Tensor, position: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Turn each pair (x_i, x_{i + D/2}) by the angle position * base^(-2i / D).

    Args:
        q: [B, T, H, D] queries, D even.
        k: [B, T, G, D] keys.
        position: [B or 1, T] int64, tokens before this one in its document.
        base: the longest wavelength is 2 pi * base tokens.

    Returns:
        q and k turned, in their dtype, computed in fp32 or wider.
    """
    half = q.shape[-1] // 2
    # In fp32 the angle of token 1,000,000 would be wrong by 0.06 rad (MPS has no fp64).
    exact = torch.float32 if q.device.type == "mps" else torch.float64
    exponent = torch.arange(half, device=q.device, dtype=exact) / half
    angle = position.to(exact).unsqueeze(-1) * base**-exponent
    wide = torch.promote_types(q.dtype, torch.float32)
    angle = angle.remainder(2 * torch.pi).to(wide).unsqueeze(2)
    cos, sin = angle.cos(), angle.sin()

    def turn(x: Tensor) -> Tensor:
        a, b = x.to(wide).split(half, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    return turn(q), turn(k)
