"""Host code: allocates, and launches the kernels.

One pass: a sequence is one segment, whose state stays in registers. Forward one launch, backward
two. Segmented: what each segment adds to the state, a scan over segments, then all segments at
once. Forward three launches, backward four; the states before the segments are kept for the
backward.

Sizes: B rows, T tokens, H heads, G heads of k, v or the gate, K key dimension, V value dimension,
N sequences.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gla_kernels.gradients import gradients_kernel
from gla_kernels.recurrent import recurrent_kernel
from gla_kernels.support import SHORT, config_for, device_of, segment_length
from gla_kernels.sweep import scan_kernel, sweep_kernel

_SCAN_BLOCK = 1024


class Call:
    """One call of the op: its tensors as the kernels want them, sizes, configuration.

    Args:
        q, k, v: [B, T, H, K], [B, T, G, K], [B, T, G, V].
        log_decay: None, [G], [B, T, G] or [B, T, G, K].
        cu_seqlens: [N + 1] or None.
        scale: factor of q.
        segment: tokens a segment, a multiple of the longest chunk (64); None for the rule's.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        segment: int | None = None,
    ) -> None:
        self.B, self.T, self.H, self.K = q.shape
        self.V = v.shape[-1]
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.scale, self.cu, self.log_decay = scale, cu_seqlens, log_decay
        device = device_of(q.device)
        dtype = q.dtype if q.dtype == v.dtype else torch.float32
        self.config = config_for(device, self.K, self.V, dtype, log_decay is not None)
        C = self.config.C
        self.L = segment or segment_length(device, self.config, self.B, self.T, self.H, self.V)
        self.q, self.k, self.v = (_rows(x, C) for x in (q, k, v))
        self.g = None if log_decay is None else _rows(_gate_as_4d(log_decay, q), C)
        self.gate = 0 if log_decay is None else 2 if log_decay.dim() == 4 else 1  # see ``decay``
        wide = dtype == torch.float32
        self.product = torch.float32 if wide else torch.bfloat16
        exact_gates = self.g is not None and self.g.dtype == torch.bfloat16
        self.sizes: dict[str, int] = dict(K=self.K, V=self.V, GATE=self.gate)
        if device.is_nvidia:  # or some spill a few bytes so that one more program fits
            self.sizes |= dict(maxnreg=255)
        self.products = dict(
            self.sizes,
            C=C,
            PARTS=1 if exact_gates else (3 if wide else 2),
            DOT=triton.language.float32 if wide else triton.language.bfloat16,
            IP="tf32x3" if device.is_nvidia else "ieee",
        )

    def slots(self, tokens: int) -> int:
        """Room for one entry every ``tokens`` tokens of every sequence; see ``tiles``."""
        return self.T // tokens + self.N if self.cu is not None else self.N * -(-self.T // tokens)

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty(slots, self.H, self.K, self.V, dtype=dtype)

    def arguments(self, w: Tensor) -> tuple[float | int, ...]:
        """What kernels over q, k, w and the gate take: sizes, heads that share one, strides."""
        tensors = (self.k, w, self.g)
        groups = (1 if x is None else self.H // x.shape[2] for x in tensors)
        strides = (n for x in (self.q, *tensors) for n in _strides(x))
        return self.scale, self.T, self.N, self.H, *groups, *strides

    def sweep(
        self,
        w: Tensor,
        reverse: bool,
        out: Tensor | None = None,
        initial: Tensor | None = None,
        final: Tensor | None = None,
        bounds: Tensor | None = None,
        decay: Tensor | None = None,
        chunks: Tensor | None = None,
    ) -> None:
        """Launch ``sweep_kernel``; w [B, T, G, V] is v, or the gradient of o when ``reverse``."""
        config = self.config
        small = out is None and config.BK <= 64  # only a small state to hold
        grid = (self.slots(self.L) * self.H, triton.cdiv(self.V, config.BV))
        sweep_kernel[grid](
            self.q, self.k, w, self.g, out, initial, final, bounds, decay, chunks, self.cu,
            self.L, config.C.bit_length() - 1, *self.arguments(w),
            BK=config.BK, KS=config.KS, BV=config.BV, REVERSE=reverse,
            num_warps=4 if small else 8, num_stages=config.stages, **self.products,
        )  # fmt: skip

    def boundaries(self, w: Tensor, initial: Tensor | None, reverse: bool) -> Tensor | None:
        """States before every segment [slots, H, K, V] fp32 (``reverse``: gradients after it).

        None where sequences are not cut.
        """
        if self.L >= self.T:
            return None
        bounds, decay = self.new_state(self.slots(self.L)), None
        if self.g is not None:
            decay = bounds.new_empty(bounds.shape[0], self.H, self.g.shape[-1])
        self.sweep(w, reverse, bounds=bounds, decay=decay)
        grid = (self.N * self.H, triton.cdiv(self.K * self.V, _SCAN_BLOCK))
        scan_kernel[grid](
            bounds, decay, initial, self.cu, self.T, self.N, self.L, self.H,
            BLOCK=_SCAN_BLOCK, REVERSE=reverse, num_warps=4, **self.sizes,
        )  # fmt: skip
        return bounds


def forward(call: Call, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns o [B, T, H, V], the final state [N, H, K, V], the states before the segments.

    The last is None where sequences are not cut.
    """
    o = call.v.new_empty(call.B, call.T, call.H, call.V)
    final = call.new_state(call.N)
    if call.T <= SHORT:
        BK = call.config.BK
        BV = max(16, min(triton.next_power_of_2(call.V), 4096 // BK))
        recurrent_kernel[(call.N * call.H, triton.cdiv(call.V, BV))](
            call.q, call.k, call.v, call.g, o, state, final, call.cu, *call.arguments(call.v),
            BK=BK, BV=BV, num_warps=4, **call.sizes,
        )  # fmt: skip
        return o, final, None
    bounds = call.boundaries(call.v, state, False)
    call.sweep(call.v, False, o, state, final, bounds)
    return o, final, bounds


def backward(
    call: Call,
    state: Tensor | None,
    bounds: Tensor | None,
    grad_o: Tensor,
    grad_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Returns dq, dk, dv, dg and the gradient of the initial state [N, H, K, V] fp32.

    Where programs write parts of a gradient, for each head of a group or block of channels, the
    parts are fp32 and added up here.
    """
    config = call.config
    do = _rows(grad_o, config.C)
    after = call.boundaries(do, grad_final, True)
    dv = _parts(call.v, call, call.H, call.V)
    grad_initial = call.new_state(call.N)
    chunks = call.new_state(call.slots(config.C), call.product)
    call.sweep(do, True, dv, grad_final, grad_initial, after, None, chunks)
    blocks = -(-call.K // config.grad_BK), -(-call.V // config.grad_BV)
    heads = call.H * blocks[1]
    dq, dk = (_parts(x, call, heads, call.K) for x in (call.q, call.k))
    dg, gate = None, call.log_decay
    if gate is not None:
        dg = _parts(gate, call, heads, call.K if call.gate == 2 else blocks[0])
    gradients_kernel[(call.slots(call.L) * call.H, *blocks)](
        call.q, call.k, call.v, call.g, do, dq, dk, dg, state, bounds, chunks, call.cu,
        call.L, config.C.bit_length() - 1, *call.arguments(call.v), *_strides(do),
        BK=config.grad_BK, BV=config.grad_BV, VB=config.grad_VB,
        num_warps=8, num_stages=1, **call.products,
    )  # fmt: skip
    dq, dk, dv = _summed(dq, call.q), _summed(dk, call.k), _summed(dv, call.v)
    return dq, dk, dv, None if gate is None or dg is None else _summed(dg, gate), grad_initial


def _parts(x: Tensor, call: Call, heads: int, channels: int) -> Tensor:
    """Room for the gradient of x [B, T, heads, channels]: in its dtype, or for parts of it."""
    shape = (call.B, call.T, heads, channels)
    return x.new_empty(shape, dtype=x.dtype if x.shape == shape else torch.float32)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x ([B, T, G, D], [B, T, G] or [G]) from its parts [B, T, heads, channels]."""
    if grad.shape == x.shape:
        return grad
    G, D = x.shape[min(2, x.dim() - 1)], x.shape[3] if x.dim() == 4 else 1
    grad = grad.unflatten(3, (D, -1)).unflatten(2, (G, -1)).sum((3, 5))
    if x.dim() == 1:
        grad = grad.sum((0, 1))
    return grad.reshape(x.shape).to(x.dtype)


def _rows(x: Tensor, C: int) -> Tensor:
    """x [B, T, G, D] with adjacent channels and 32-bit offsets within a chunk; or a copy."""
    if (x.stride(3) == 1 or x.shape[3] == 1) and x.stride(1) * C < 2**31:
        return x
    return x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _gate_as_4d(log_decay: Tensor, q: Tensor) -> Tensor:
    """[G], [B, T, G] or [B, T, G, K] -> view [B, T, G, 1 or K]."""
    if log_decay.dim() == 1:
        return log_decay.view(1, 1, -1, 1).expand(q.shape[0], q.shape[1], -1, 1)
    return log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay
