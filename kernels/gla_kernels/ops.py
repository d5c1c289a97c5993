"""The kernels as operators of torch, with their gradients. Sizes: see ``launch``."""

from __future__ import annotations

import torch
from torch import Tensor

from gla_kernels import convolution, cross_entropy, norm_gate  # noqa: F401  register operators
from gla_kernels.launch import Call, backward, forward
from gla_kernels.support import refusal


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t.

    Args:
        q, k, v: [B, T, H, K], [B, T, G, K], [B, T, G, V]; fp32, bf16 or fp16.
        log_decay: None, [G], [B, T, G] or [B, T, G, K]; any of these dtypes.
        state: fp32 [N, H, K, V] to start from, or None.
        cu_seqlens: int [N + 1] offsets of packed documents (B = 1), or None.
        scale: factor of the output.
        segment: tokens a segment, a multiple of 64; None for the rule's choice.

    Returns:
        o [B, T, H, V] in v's dtype, the final state [N, H, K, V] fp32.

    Raises:
        ValueError: what the kernels do not support; the message names the form that does.
    """
    reason = refusal(q.device, q.dtype, v.dtype, q.shape[-1], v.shape[-1])
    if reason is not None:
        raise ValueError(f"impl: got 'triton', expected {reason}; fix impl='torch'")
    o, final, _ = torch.ops.gla_kernels.chunkwise(
        q, k, v, log_decay, state, cu_seqlens, scale, segment
    )
    return o, final


@torch.library.custom_op("gla_kernels::chunkwise", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    o, final, bounds = forward(call, None if state is None else state.contiguous())
    return o, final, q.new_empty(0) if bounds is None else bounds


@_forward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, segment):
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    o = v.new_empty(call.B, call.T, call.H, call.V)
    bounds = call.new_state(call.slots(call.L)) if call.segmented else q.new_empty(0)
    return o, call.new_state(call.N), bounds


@torch.library.custom_op("gla_kernels::chunkwise_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int | None,
    bounds: Tensor,
    grad_o: Tensor,
    grad_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    dq, dk, dv, dg, grad_initial = backward(
        call,
        None if state is None else state.contiguous(),
        bounds if bounds.numel() else None,
        grad_o,
        None if grad_final is None else grad_final.contiguous(),
    )
    dk, dv = _grouped(dk, k), _grouped(dv, v)
    if log_decay is None or dg is None:
        return dq, dk, dv, q.new_empty(0), grad_initial
    if not call.channels:
        dg = dg.sum(-1)
    if log_decay.dim() == 1:
        dg = dg.sum((0, 1), keepdim=True)
    groups = log_decay.shape[min(log_decay.dim() - 1, 2) if log_decay.dim() > 1 else 0]
    if dg.shape[2] != groups:
        dg = dg.unflatten(2, (groups, -1)).sum(3)
    return dq, dk, dv, dg.reshape(log_decay.shape).to(log_decay.dtype), grad_initial


def _grouped(grad: Tensor, x: Tensor) -> Tensor:
    """[B, T, H, D] -> shape and dtype of x [B, T, G, D]: the sum over a group's heads."""
    if grad.shape == x.shape:
        return grad
    return grad.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)


@_backward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, segment, bounds, grad_o, grad_final):
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dg = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    return dq, dk, dv, dg, q.new_empty(N, q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.segment = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_o, grad_final, _):
    *tensors, bounds = ctx.saved_tensors
    q, _, v, log_decay, state = tensors[:5]
    if grad_o is None:
        grad_o = v.new_zeros(*q.shape[:3], v.shape[3])
    dq, dk, dv, dg, dS = torch.ops.gla_kernels.chunkwise_backward(
        *tensors, ctx.scale, ctx.segment, bounds, grad_o, grad_final
    )
    gates = None if log_decay is None else dg
    return dq, dk, dv, gates, None if state is None else dS, None, None, None


_forward.register_autograd(_autograd, setup_context=_save)
