"""Host code of a call: its configuration and sizes, and the launches that both passes share.

One pass: a sequence is one segment, whose state stays in registers. Forward one launch, backward
two. Segmented: what each segment adds to the state, a scan over segments, then all segments at
once. Forward three launches, backward four; the states before the segments are kept for the
backward.

Sizes: B rows, T tokens, H heads, G heads of k, v or the gate, K key dimension, V value dimension,
N sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gla_kernels.support import config_for, contiguous, device_of, launch, segment_length
from gla_kernels.sweep import scan_kernel, sweep_kernel

Rows = tuple[Any, ...] | None  # how kernels take a tensor of tokens; see ``tiles``
_SCAN_BLOCK = 1024


class Call:
    """One call of the op: its tensors, its sizes, its configuration.

    Args:
        q, k, v: [B, T, H, K], [B, T, G, K], [B, T, G, V].
        log_decay: None, [G], [B, T, G] or [B, T, G, K].
        cu_seqlens: [N + 1] or None.
        scale: factor of q.
        segment: tokens a segment, a multiple of the longest chunk (64); None for the rule's.
    """

    def __init__(self, q, k, v, log_decay, cu_seqlens, scale, segment) -> None:
        self.B, self.T, self.H = q.shape[:3]
        self.K, self.V = int(q.shape[3]), int(v.shape[3])  # never symbols: kernels depend on them
        self.q, self.cu, g = q, *contiguous(cu_seqlens), log_decay
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if g is not None and g.dim() == 1:
            g = g.view(1, 1, -1, 1).expand(self.B, self.T, -1, 1)
        elif g is not None and g.dim() == 3:
            g = g.unsqueeze(-1)
        device = device_of(q.device)
        dtype = q.dtype if q.dtype == v.dtype else torch.float32
        gate = (0, torch.float32) if g is None else (int(g.shape[3]), g.dtype)
        self.config = config_for(device, self.K, self.V, dtype, *gate)
        self.L = segment or segment_length(device, self.config, self.B, self.T, self.H)
        self.rows = [self.rows_of(x) for x in (q, k, v, q if g is None else g)]
        self.sizes = scale, self.T, self.N, self.H
        self.segments = self.cu, self.L, self.config.C.bit_length() - 1, *self.sizes
        # Without a limit, some spill a few bytes so that one more program fits.
        self.options = dict(s=self.config, **(dict(maxnreg=255) if device.is_nvidia else {}))

    def rows_of(self, x: Tensor | None) -> Rows:
        """Of x [B, T, heads, D], its channels adjacent."""
        if x is None:
            return None
        if (x.stride(3) != 1 and x.shape[3] > 1) or x.stride(1) * self.config.C >= 2**31:
            x = x.contiguous()  # offsets within a chunk have 32 bits
        D = triton.language.constexpr(int(x.shape[3]))
        return x, *x.stride()[:3], self.H // x.shape[2], D

    def slots(self, tokens: int) -> int:
        """Room for one entry every ``tokens`` tokens of every sequence; see ``tiles``."""
        return self.T // tokens + self.N if self.cu is not None else self.N * -(-self.T // tokens)

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty(slots, self.H, self.K, self.V, dtype=dtype)

    def sweep(self, w: Rows, reverse: bool, out: Tensor | None = None, **states: Any) -> None:
        """Launch ``sweep_kernel``; w: rows of v, or of the gradient of o when ``reverse``."""
        config, (q, k, _, g) = self.config, self.rows
        launch(
            sweep_kernel, (self.slots(self.L) * self.H, triton.cdiv(self.V, config.BV)),
            q, k, w, g, *self.segments, REVERSE=reverse, out=self.rows_of(out), **states,
            num_warps=8 if out is not None or config.BK > 64 else 4,  # or a small state to hold
            num_stages=config.stages, **self.options,
        )  # fmt: skip

    def boundaries(self, w: Rows, initial: Tensor | None, reverse: bool) -> Tensor | None:
        """States before every segment [slots, H, K, V] fp32 (``reverse``: gradients after it).

        None where sequences are not cut.
        """
        if self.L >= self.T:
            return None
        bounds = self.new_state(self.slots(self.L))
        lasts = bounds.new_empty(*bounds.shape[:2], self.config.GK) if self.config.GK else None
        self.sweep(w, reverse, bounds=bounds, lasts=lasts)
        launch(
            scan_kernel, (self.N * self.H, triton.cdiv(self.K * self.V, _SCAN_BLOCK)),
            bounds, lasts, initial, self.cu, self.T, self.N, self.L, self.H,
            BLOCK=_SCAN_BLOCK, REVERSE=reverse, num_warps=4, **self.options,
        )  # fmt: skip
        return bounds

    def parts(self, x: Tensor, heads: int, channels: int) -> Tensor:
        """Room for the gradient of x [B, T, heads, channels]: in its dtype, or for parts of it."""
        shape = (self.B, self.T, heads, channels)
        return x.new_empty(shape, dtype=x.dtype if x.shape == shape else torch.float32)


def summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x ([B, T, G, D], [B, T, G] or [G]) from its parts [B, T, heads, channels]."""
    if grad.shape == x.shape:
        return grad
    G, D = x.shape[min(2, x.dim() - 1)], x.shape[3] if x.dim() == 4 else 1
    grad = grad.unflatten(3, (D, -1)).unflatten(2, (G, -1)).sum((3, 5))
    if x.dim() == 1:
        grad = grad.sum((0, 1))
    return grad.reshape(x.shape).to(x.dtype)
