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
from gla_kernels.support import SHORT, Config, config_for, device_of, segment_length
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
        self.scale, self.cu = scale, cu_seqlens
        self.wide = q.dtype == torch.float32 or v.dtype == torch.float32
        self.device = device_of(q.device)
        gated = log_decay is not None
        self.config: Config = config_for(self.device, self.K, self.V, self.wide, gated)
        self.L = segment or segment_length(self.device, self.config, self.B, self.T, self.H, self.V)
        self.q, self.k, self.v = (_rows(x, self.config.C) for x in (q, k, v))
        self.g, self.channels = None, False
        if log_decay is not None:
            self.g = _rows(_gate_as_4d(log_decay, q), self.config.C)
            self.channels = self.g.shape[-1] == self.K and log_decay.dim() == 4
        self.gate = 0 if self.g is None else (2 if self.channels else 1)
        self.product = torch.float32 if self.wide else torch.bfloat16
        exact_gates = self.g is not None and self.g.dtype == torch.bfloat16
        common = dict(K=self.K, V=self.V, GATE=self.gate)
        self.products = dict(
            common,
            C=self.config.C,
            num_stages=self.config.stages,
            PARTS=1 if exact_gates else (3 if self.wide else 2),
            DOT=triton.language.float32 if self.wide else triton.language.bfloat16,
            IP="tf32x3" if self.device.is_nvidia else "ieee",
        )
        self.common = common
        self.levels = self.config.C.bit_length() - 1

    @property
    def segmented(self) -> bool:
        return self.L < self.T

    def slots(self, tokens: int) -> int:
        """Room for one entry every ``tokens`` tokens of every sequence; see ``tiles``."""
        return self.T // tokens + self.N if self.cu is not None else self.N * -(-self.T // tokens)

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(slots, self.H, self.K, self.V, dtype=dtype, device=self.q.device)

    def sweep(
        self,
        w: Tensor,
        out: Tensor | None,
        initial: Tensor | None,
        final: Tensor | None,
        bounds: Tensor | None,
        decay: Tensor | None,
        chunks: Tensor | None,
        reverse: bool,
    ) -> None:
        """Launch ``sweep_kernel``; w [B, T, G, V] is v, or the gradient of o when ``reverse``."""
        grid = (self.slots(self.L) * self.H, triton.cdiv(self.V, self.config.BV))
        groups = (self.H // self.k.shape[2], self.H // w.shape[2], self._gate_group())
        small = out is None and self.config.BK <= 64  # only a small state to hold
        sweep_kernel[grid](
            self.q, self.k, w, self.g, out, initial, final, bounds, decay, chunks, self.cu,
            self.scale, self.T, self.N, self.L, self.H, self.levels,
            *_strides(self.q), *_strides(self.k), *_strides(w), *_strides(self.g), *groups,
            BK=self.config.BK, BV=self.config.BV, REVERSE=reverse, OUTPUT=out is not None,
            num_warps=4 if small else 8, **self.products,
        )  # fmt: skip

    def boundaries(self, w: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
        """States before every segment [slots, H, K, V] fp32 (``reverse``: gradients after it)."""
        bounds, decay = self.new_state(self.slots(self.L)), None
        if self.g is not None:
            size = (bounds.shape[0], self.H, self.g.shape[-1])
            decay = torch.empty(size, dtype=torch.float32, device=self.q.device)
        self.sweep(w, None, None, None, bounds, decay, None, reverse)
        grid = (self.N * self.H, triton.cdiv(self.K * self.V, _SCAN_BLOCK))
        scan_kernel[grid](
            bounds, decay, initial, self.cu, self.T, self.N, self.L, self.H,
            K=self.K, V=self.V, BLOCK=_SCAN_BLOCK, GATE=self.gate, REVERSE=reverse, num_warps=4,
        )  # fmt: skip
        return bounds

    def recurrent(self, initial: Tensor | None, out: Tensor, final: Tensor) -> None:
        """Launch ``recurrent_kernel``."""
        BV = max(16, min(self.config.BV, 4096 // self.config.BK))
        groups = (self.H // self.k.shape[2], self.H // self.v.shape[2], self._gate_group())
        recurrent_kernel[(self.N * self.H, triton.cdiv(self.V, BV))](
            self.q, self.k, self.v, self.g, out, initial, final, self.cu,
            self.scale, self.T, self.N, self.H,
            *_strides(self.q), *_strides(self.k), *_strides(self.v), *_strides(self.g), *groups,
            BK=self.config.BK, BV=BV, num_warps=4, **self.common,
        )  # fmt: skip

    def gradients(
        self,
        do: Tensor,
        dq: Tensor,
        dk: Tensor,
        dg: Tensor | None,
        initial: Tensor | None,
        bounds: Tensor | None,
        chunks: Tensor,
    ) -> None:
        """Launch ``gradients_kernel``."""
        blocks = triton.cdiv(self.K, self.config.grad_BK)
        groups = (self.H // self.k.shape[2], self.H // self.v.shape[2], self._gate_group())
        gradients_kernel[(self.slots(self.L) * self.H, blocks)](
            self.q, self.k, self.v, self.g, do, dq, dk, dg, initial, bounds, chunks, self.cu,
            self.scale, self.T, self.N, self.L, self.H, self.levels,
            *_strides(self.q), *_strides(self.k), *_strides(self.v), *_strides(self.g),
            *_strides(do), *groups,
            BK=self.config.grad_BK, BV=self.config.grad_BV, VB=self.config.grad_VB,
            num_warps=8, **(self.products | dict(num_stages=1)),
        )  # fmt: skip

    def _gate_group(self) -> int:
        return 1 if self.g is None else self.H // self.g.shape[2]


def forward(call: Call, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns o [B, T, H, V], the final state [N, H, K, V], the states before the segments.

    The last is None where sequences are not cut.
    """
    o = torch.empty(call.B, call.T, call.H, call.V, dtype=call.v.dtype, device=call.v.device)
    final = call.new_state(call.N)
    if call.T <= SHORT:
        call.recurrent(state, o, final)
        return o, final, None
    bounds = call.boundaries(call.v, state, False) if call.segmented else None
    call.sweep(call.v, o, state, final, bounds, None, None, False)
    return o, final, bounds


def backward(
    call: Call,
    state: Tensor | None,
    bounds: Tensor | None,
    grad_o: Tensor,
    grad_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Returns dq, dk, dv, dg and the gradient of the initial state [N, H, K, V] fp32.

    Gradients have a head for each of H and, with grouped heads, are fp32: the caller sums the
    groups. dg is [B, T, H, K] for a gate a channel, fp32 [B, T, H, blocks] to be summed for a
    gate a head.
    """
    do = _rows(grad_o, call.config.C)
    after = call.boundaries(do, grad_final, True) if call.segmented else None
    dv = call.q.new_empty(call.B, call.T, call.H, call.V, dtype=_grad_dtype(call.v, call.H))
    grad_initial = call.new_state(call.N)
    chunks = call.new_state(call.slots(call.config.C), call.product)
    call.sweep(do, dv, grad_final, grad_initial, after, None, chunks, True)
    dq = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    dk = torch.empty(call.q.shape, dtype=_grad_dtype(call.k, call.H), device=call.q.device)
    dg = None
    if call.g is not None:
        blocks = -(-call.K // call.config.grad_BK)
        size = (*call.q.shape[:3], call.K if call.channels else blocks)
        dtype = _grad_dtype(call.g, call.H) if call.channels else torch.float32
        dg = torch.empty(size, dtype=dtype, device=call.q.device)
    call.gradients(do, dq, dk, dg, state, bounds, chunks)
    return dq, dk, dv, dg, grad_initial


def _rows(x: Tensor, C: int) -> Tensor:
    """x [B, T, G, D] with adjacent channels and 32-bit offsets within a chunk; or a copy."""
    if (x.stride(3) == 1 or x.shape[3] == 1) and x.stride(1) * C < 2**31:
        return x
    return x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def _gate_as_4d(log_decay: Tensor, q: Tensor) -> Tensor:
    """[G], [B, T, G] or [B, T, G, K] -> view [B, T, G, 1 or K]."""
    if log_decay.dim() == 1:
        return log_decay.view(1, 1, -1, 1).expand(q.shape[0], q.shape[1], -1, 1)
    return log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay


def _grad_dtype(x: Tensor, H: int) -> torch.dtype:
    """dtype in which the gradient of x [B, T, G, D] is written, one head for each of H."""
    return x.dtype if x.shape[2] == H else torch.float32
