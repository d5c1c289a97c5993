"""The op's two passes, as operators of torch. Sizes: see ``launch``."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gla_kernels import convolution, cross_entropy, norm_gate  # noqa: F401  register operators
from gla_kernels.gradients import gradients_kernel
from gla_kernels.launch import Call, summed
from gla_kernels.recurrent import recurrent_kernel
from gla_kernels.support import SHORT, contiguous, launch, operator, room_for, shapes_only
from gla_kernels.support import refusal as refusal


@operator("chunkwise")
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
        needs: the states before the segments, none where sequences are not cut.
    """
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    o, final = v.new_empty(call.B, call.T, call.H, call.V), call.new_state(call.N)
    if shapes_only(q):
        return o, final, call.new_state(call.slots(call.L) if call.L < call.T else 0)
    (state,) = contiguous(state)
    bounds = None
    if call.T <= SHORT:
        BV = max(16, min(triton.next_power_of_2(call.V), 4096 // call.config.BK))
        launch(
            recurrent_kernel, (call.N * call.H, triton.cdiv(call.V, BV)),
            *call.rows, call.rows_of(o), state, final, call.cu, *call.sizes,
            BV=BV, num_warps=4, **call.options,
        )  # fmt: skip
    else:
        bounds = call.boundaries(call.rows[2], state, False)
        call.sweep(call.rows[2], False, o, initial=state, final=final, bounds=bounds)
    return o, final, call.new_state(0) if bounds is None else bounds


@operator(
    "chunkwise_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? state, Tensor? cu_seqlens, "
    "float scale, SymInt? segment, Tensor bounds, Tensor do, Tensor? dS) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(q, k, v, log_decay, state, cu_seqlens, scale, segment, bounds, do, dS):
    """Gradients of q, k, v, log_decay (empty without it) and the initial state.

    Where programs write parts of a gradient, for each head of a group or block of channels, the
    parts are fp32 and added up here.
    """
    call = Call(q, k, v, log_decay, cu_seqlens, scale, segment)
    if shapes_only(q):
        gate = q.new_empty(0) if log_decay is None else log_decay
        return *room_for(q, k, v, gate), call.new_state(call.N)
    config, do_rows, bounds = call.config, call.rows_of(do), bounds if bounds.numel() else None
    state, dS = contiguous(state, dS)
    after = call.boundaries(do_rows, dS, True)
    dv, dS_0 = call.parts(v, call.H, call.V), call.new_state(call.N)
    chunks = call.new_state(call.slots(config.C), torch.float32 if config.wide else torch.bfloat16)
    call.sweep(do_rows, True, dv, initial=dS, final=dS_0, bounds=after, chunks=chunks)
    blocks = -(-call.K // config.grad_BK), -(-call.V // config.grad_BV)
    heads = call.H * blocks[1]
    dq, dk = (call.parts(x, heads, call.K) for x in (q, k))
    channels = call.K if config.GK == call.K else blocks[0]
    dg = None if log_decay is None else call.parts(log_decay, heads, channels)
    launch(
        gradients_kernel, (call.slots(call.L) * call.H, *blocks),
        *call.rows, do_rows, dq, dk, dg, state, bounds, chunks, *call.segments,
        num_warps=8, num_stages=1, **call.options,
    )  # fmt: skip
    dg = q.new_empty(0) if log_decay is None or dg is None else summed(dg, log_decay)
    return summed(dq, q), summed(dk, k), summed(dv, v), dg, dS_0


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.segment = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _autograd(ctx, do, dS, _):
    *tensors, bounds = ctx.saved_tensors
    q, _, v, log_decay, state, _ = tensors
    do = v.new_zeros(*q.shape[:3], v.shape[3]) if do is None else do
    dq, dk, dv, dg, dS = torch.ops.gla_kernels.chunkwise_backward(
        *tensors, ctx.scale, ctx.segment, bounds, do, dS
    )
    gates = None if log_decay is None else dg
    return dq, dk, dv, gates, None if state is None else dS, None, None, None


chunkwise.register_autograd(_autograd, setup_context=_save)
