"""The recurrent form: one token after another. Decoding on any device, and the reference.

A single token is computed in fp32 (fp64 for fp64 inputs). More are computed in fp64 where the
device has it and rounded once at the end: in fp32 a sum over 65,536 tokens, or a gate near 1 that
is rounded the same way at each of them, loses digits that the chunkwise form keeps.

The state's memory is constant in T forward. Backward recomputes the states of ``_BLOCK`` tokens at
a time from the block's start, so it holds T / _BLOCK + _BLOCK states, not T. Sizes: see
gated_linear_attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla.ops.heads import expand_heads, gate_as_4d, gate_grad, reduce_heads, wide_dtype
from gla.ops.memory import fresh
from gla.ops.once import refuse_double_backward, save_nothing

_BLOCK = 64


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sequential forward with a sequential backward; arguments as in gated_linear_attention.

    Returns:
        o [B, T, H, V] in v's dtype, S_T [N, H, K, V] fp32 or wider.
    """
    if q.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled():
        return _one_token(q, k, v, log_decay, state, scale)
    return torch.ops.gla.recurrent(q, k, v, log_decay, state, cu_seqlens, scale)


def _one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Decoding, in operations that a compiler can fuse with those around it."""
    qw, kw, vw, gate = _widened(q, k, v, log_decay)
    # Contiguous, so that sums have one order wherever the state comes from.
    S = _initial(q, v, None, None) if state is None else state.contiguous()
    S = _step(S, kw[:, 0], vw[:, 0], None if gate is None else gate[:, 0])
    # A sum of products, and no matmul, which autocast would round.
    o = (qw[:, 0].unsqueeze(-1) * S).sum(-2) * scale
    return o.unsqueeze(1).to(v.dtype), S


def _sequences(T: int, rows: int, cu_seqlens: Tensor | None) -> list[tuple[slice, slice]]:
    """(rows of the state, tokens) of each loop: all rows at once, or document by document."""
    if cu_seqlens is None:
        return [(slice(0, rows), slice(0, T))]
    ends = cu_seqlens.tolist()
    return [(slice(n, n + 1), slice(ends[n], ends[n + 1])) for n in range(len(ends) - 1)]


def _work_dtype(q: Tensor) -> torch.dtype:
    """dtype of all arithmetic on q [B, T, H, K] and what goes with it."""
    exact = q.shape[1] > 1 and q.device.type != "mps"
    return torch.float64 if exact else wide_dtype(q.dtype)


def _widened(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None):
    """Inputs in the work's dtype with H heads, and the gate exp(g) [B, T, H, 1 or K] or None."""
    B, T, H, _ = q.shape
    wide = _work_dtype(q)
    q, k, v = (expand_heads(x, H).to(wide) for x in (q, k, v))
    if log_decay is None:
        return q, k, v, None
    return q, k, v, expand_heads(gate_as_4d(log_decay, B, T), H).to(wide).exp()


def _step(S: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
    """S [N, H, K, V], k [N, H, K], v [N, H, V], gate [N, H, 1 or K] -> the next S."""
    S = S if gate is None else S * gate.unsqueeze(-1)
    return torch.addcmul(S, k.unsqueeze(-1), v.unsqueeze(-2))


def _initial(q: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """A fresh [N, H, K, V] tensor to run the recurrence from."""
    if state is not None:
        return fresh(state)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (N, q.shape[2], q.shape[3], v.shape[3])
    return q.new_zeros(shape, dtype=wide_dtype(q.dtype))


@torch.library.custom_op("gla::recurrent", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    final = _initial(q, v, state, cu_seqlens)
    o = v.new_empty(B, T, H, v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        qw, kw, vw, gate = _widened(q, k, v, log_decay)
        for rows, tokens in _sequences(T, B, cu_seqlens):
            S = final[rows].to(qw.dtype)
            for t in range(tokens.start, tokens.stop):
                S = _step(S, kw[:, t], vw[:, t], None if gate is None else gate[:, t])
                o[:, t] = torch.matmul(qw[:, t].unsqueeze(-2), S).squeeze(-2) * scale
            final[rows] = S
    return o, final


@_forward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale):
    B, T, H, K = q.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = v.new_empty(B, T, H, v.shape[-1])
    return o, q.new_empty(N, H, K, v.shape[-1], dtype=wide_dtype(q.dtype))


@torch.library.custom_op("gla::recurrent_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    grad_o: Tensor,
    grad_final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T = q.shape[:2]
    grad_state = fresh(grad_final)
    start = _initial(q, v, state, cu_seqlens)
    with torch.autocast(q.device.type, enabled=False):
        qw, kw, vw, gate = _widened(q, k, v, log_decay)
        do = grad_o.to(qw.dtype) * scale
        grads = [torch.empty_like(x) for x in (qw, kw, vw)]
        grad_g = None if gate is None else torch.empty_like(gate)
        for rows, tokens in _sequences(T, B, cu_seqlens):
            dS = grad_state[rows].to(qw.dtype)
            starts = _block_starts(tokens, start[rows].to(qw.dtype), kw, vw, gate)
            for first, S in reversed(starts):
                block = slice(first, min(first + _BLOCK, tokens.stop))
                dS = _block_backward(block, S, dS, qw, kw, vw, gate, do, grads, grad_g)
            grad_state[rows] = dS
    dq, dk, dv = (
        reduce_heads(d, x.shape[2]).to(x.dtype) for d, x in zip(grads, (q, k, v), strict=True)
    )
    if log_decay is None or grad_g is None:
        dg = q.new_empty(0)
    else:
        groups = log_decay.shape[0] if log_decay.dim() == 1 else log_decay.shape[2]
        dg = gate_grad(reduce_heads(grad_g, groups), log_decay)
    return dq, dk, dv, dg, grad_state


def _block_starts(tokens: slice, S: Tensor, k, v, gate) -> list[tuple[int, Tensor]]:
    """(first token, state before it) of every block of ``tokens``."""
    starts = []
    for t in range(tokens.start, tokens.stop):
        if (t - tokens.start) % _BLOCK == 0:
            starts.append((t, S))
        S = _step(S, k[:, t], v[:, t], None if gate is None else gate[:, t])
    return starts


def _block_backward(tokens, S, dS, q, k, v, gate, do, grads, grad_g):
    """Gradients of the tokens of one block, from the state before it and the gradient after it.

    Returns the gradient of the state before the block.
    """
    states = [S]
    for t in range(tokens.start, tokens.stop):
        states.append(_step(states[-1], k[:, t], v[:, t], None if gate is None else gate[:, t]))
    dq, dk, dv = grads
    for t in range(tokens.stop - 1, tokens.start - 1, -1):
        before, after = states[t - tokens.start], states[t - tokens.start + 1]
        dq[:, t] = (after @ do[:, t].unsqueeze(-1)).squeeze(-1)
        dS = dS + q[:, t].unsqueeze(-1) * do[:, t].unsqueeze(-2)
        dk[:, t] = (dS @ v[:, t].unsqueeze(-1)).squeeze(-1)
        dv[:, t] = (k[:, t].unsqueeze(-2) @ dS).squeeze(-2)
        if gate is not None:
            dS = dS * gate[:, t].unsqueeze(-1)
            through = (dS * before).sum(-1)
            grad_g[:, t] = through if gate.shape[-1] > 1 else through.sum(-1, keepdim=True)
    return dS


@_backward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, grad_o, grad_final):
    dg = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dg, grad_final.new_empty(grad_final.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, grad_o, grad_final):
    q, k, v, log_decay, state, cu_seqlens = ctx.saved_tensors
    dq, dk, dv, dg, dS = torch.ops.gla.recurrent_backward(
        q, k, v, log_decay, state, cu_seqlens, ctx.scale, grad_o, grad_final
    )
    need_gate, need_state = ctx.needs_input_grad[3:5]
    return dq, dk, dv, dg if need_gate else None, dS if need_state else None, None, None


_forward.register_autograd(_autograd, setup_context=_save)
_backward.register_autograd(refuse_double_backward, setup_context=save_nothing)
