"""The kernels as operators of torch, with their gradients. Sizes: see ``launch``."""

from __future__ import annotations

import torch
from torch import Tensor

from gla_kernels import convolution, cross_entropy, norm_gate  # noqa: F401  register operators
from gla_kernels.launch import Call, backward, forward
from gla_kernels.support import contiguous, refusal  # noqa: F401  what asks for the operators


@torch.library.custom_op("gla_kernels::chunkwise", mutates_args=())
def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t.

    Of calls that ``refusal`` takes.

    Args:
        q, k, v: [B, T, H, K], [B, T, G, K], [B, T, G, V]; fp32, bf16 or fp16.
        log_decay: None, [G], [B, T, G] or [B, T, G, K]; any of these dtypes.
        state: fp32 [N, H, K, V] to start from, or None.
        cu_seqlens: int [N + 1] offsets of packed documents (B = 1), or None.
        scale: factor of the output.
        segment: tokens a segment, a multiple of 64; None for the rule's choice.

    Returns:
        o [B, T, H, V] in v's dtype, the final state [N, H, K, V] fp32, and what the backward pass
        needs: the states before the segments.
    """
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    o, final, bounds = forward(call, *contiguous(state))
    return o, final, call.new_state(0) if bounds is None else bounds


@chunkwise.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, segment=None):
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    o = v.new_empty(call.B, call.T, call.H, call.V)
    slots = call.slots(call.L) if call.L < call.T else 0
    return o, call.new_state(call.N), call.new_state(slots)


@torch.library.custom_op(
    "gla_kernels::chunkwise_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? state, Tensor? cu_seqlens, "
    "float scale, SymInt? segment, Tensor bounds, Tensor grad_o, Tensor? grad_final) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    q, k, v, log_decay, state, cu_seqlens, scale, segment, bounds, grad_o, grad_final
):  # fmt: skip
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    state, grad_final = contiguous(state, grad_final)
    bounds = bounds if bounds.numel() else None
    dq, dk, dv, dg, grad_initial = backward(call, state, bounds, grad_o, grad_final)
    return dq, dk, dv, q.new_empty(0) if dg is None else dg, grad_initial


@_backward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, segment, bounds, grad_o, grad_final):
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dg = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    return dq, dk, dv, dg, call.new_state(call.N)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.segment = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_o, grad_final, _):
    *tensors, bounds = ctx.saved_tensors
    q, _, v, log_decay, state, _ = tensors
    if grad_o is None:
        grad_o = v.new_zeros(*q.shape[:3], v.shape[3])
    dq, dk, dv, dg, dS = torch.ops.gla_kernels.chunkwise_backward(
        *tensors, ctx.scale, ctx.segment, bounds, grad_o, grad_final
    )
    gates = None if log_decay is None else dg
    return dq, dk, dv, gates, None if state is None else dS, None, None, None


chunkwise.register_autograd(_autograd, setup_context=_save)
