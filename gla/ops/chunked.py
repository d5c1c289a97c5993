"""The chunkwise form in torch: training and prefill on any device.

A sequence is cut into chunks of C tokens. With the factors of ``gla.ops.decay`` (all 1 without a
gate), q~ = q * to_q and k~ = k * to_k, a chunk that starts from state S computes

    P  = tril(q~ k~^T)                           (exactly, on strong tiles: Levels)
    o  = P v + q~ (before * S)                   times scale
    S' = total * S + after * (k~^T v)

four matrix products. Backward, from do (already times scale) and the gradient dS' of the state
after the chunk, with ten (S is recomputed from the segment's first state: k~^T v and P again):

    dP  = tril(do v^T)
    dv  = P^T do + k~ (after * dS')
    dq~ = dP k~ + do (before * S)^T              dq = dq~ * to_q
    dk~ = dP^T q~ + v (after * dS')^T            dk = dk~ * to_k
    dS  = total * dS' + before * (q~^T do)

    dg_u = sum over t >= u of (q~ dq~ - k~ dk~)_t + sum_v S' * dS'
         = sum_v S * dS - sum over t < u of (q~ dq~ - k~ dk~)_t

The terms with the states are what tokens outside the chunk bring:

    sum_v S * dS   = through + sum over t of (q~ (do (before * S)^T))_t
    sum_v S' * dS' = through + sum over t of (k~ (v (after * dS')^T))_t
    through        = total * sum_v S * dS'

They are computed so, as the same products stand in dq~ and dk~: what cancels is rounded alike, and
dP k~ and dP^T q~ are not rounded at all, also where the other products are in bf16. The sums are
restarted in every chunk, so their error does not grow with T.

Chunks are worked on a segment at a time, small enough that its buffers stay in cache; only the
state before each segment is saved for backward. Time and memory are linear in T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla.ops.decay import Factors, mild_gate_grad, shared
from gla.ops.heads import gate_as_4d, gate_grad, product_dtype, wide_dtype
from gla.ops.layout import Layout, boundaries
from gla.ops.memory import Buffers, fresh, new_output
from gla.ops.once import refuse_double_backward, save_nothing
from gla.ops.scan import Scan, scan
from gla.ops.tiles import Tiles, chunk_updates, load_tiles, scaled, scores

Graded = tuple[Tensor, Tensor | float]  # a gradient's tiles, and a factor still to apply


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Chunkwise forward with a hand-written backward; arguments as in gated_linear_attention.

    Returns:
        o [B, T, H, V] in v's dtype, S_T [N, H, K, V] fp32 or wider.
    """
    o, final, _ = torch.ops.gla.chunked(
        q, k, v, log_decay, state, cu_seqlens, scale, chunk_size or 0
    )
    return o, final


@torch.library.custom_op("gla::chunked", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o, the final state, and the states before each segment [segments, B, H, K, V]."""
    B, T, H, K = q.shape
    V, wide = v.shape[-1], wide_dtype(q.dtype)
    layout = Layout(q, V, log_decay, cu_seqlens, chunk_size)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = q.new_zeros(N, H, K, V, dtype=wide) if state is None else fresh(state)
    saved = q.new_zeros(boundaries(q, V, log_decay, cu_seqlens, chunk_size), B, H, K, V, dtype=wide)
    o = new_output((B, T, H, V), v.dtype, v.device)
    inputs = [q, k, v] if log_decay is None else [q, k, v, gate_as_4d(log_decay, B, T)]
    work = Buffers(wide, product_dtype(q, v), q.device)
    with torch.autocast(q.device.type, enabled=False):
        S = q.new_empty(0, dtype=wide)
        for s in layout.segments:
            if s.first == 0:
                S = q.new_zeros(s.rows, H, K, V, dtype=wide)
            saved[s.index, s.row : s.row + s.rows] = S
            tiles = load_tiles(layout, s, inputs, work)
            W = chunk_updates(work, tiles.k, tiles.v, tiles.f and tiles.f.after)
            ahead = scan(layout, s, W, tiles.f and tiles.f.total, S, state, final, work)
            S = ahead.bound
            out = torch.bmm(
                scores(tiles, work), tiles.v, out=work("o", *tiles.v.shape, dtype=work.product)
            )
            out.baddbmm_(tiles.q, scaled(work, "S", ahead.states, tiles.f and tiles.f.before))
            layout.store(out, s, o, scale)
    return o, final, saved


@_forward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, chunk_size):
    B, T, H, K = q.shape
    V, wide = v.shape[-1], wide_dtype(q.dtype)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o, final = v.new_empty(B, T, H, V), q.new_empty(N, H, K, V, dtype=wide)
    saved = boundaries(q, V, log_decay, cu_seqlens, chunk_size)
    return o, final, q.new_empty(saved, B, H, K, V, dtype=wide)


@torch.library.custom_op("gla::chunked_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    saved: Tensor,
    grad_o: Tensor,
    grad_final: Tensor,
    need_gate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv, d log_decay (empty unless needed) and the initial state's gradient."""
    B, T, H, K = q.shape
    V, wide = v.shape[-1], wide_dtype(q.dtype)
    layout = Layout(q, V, log_decay, cu_seqlens, chunk_size)
    grad_initial = fresh(grad_final)
    inputs = [q, k, v] if log_decay is None else [q, k, v, gate_as_4d(log_decay, B, T)]
    grads = [new_output(tuple(x.shape), x.dtype, x.device) for x in (q, k, v)]
    product = product_dtype(q, v)
    if log_decay is not None and need_gate:
        if inputs[3].shape[3] == 1:
            # All channels share the gate: its gradient is a sum over them, in some calls smaller
            # than the roundings of its terms to bf16.
            product = wide
        # A gate fixed a head has one gradient for all tokens, summed before it is rounded.
        dtype = wide if log_decay.dim() == 1 else log_decay.dtype
        grads.append(new_output(tuple(inputs[3].shape), dtype, q.device))
    work = Buffers(wide, product, q.device)
    with torch.autocast(q.device.type, enabled=False):
        dS = q.new_empty(0, dtype=wide)
        for s in reversed(layout.segments):
            if s.first + s.count == layout.chunks:
                dS = q.new_zeros(s.rows, H, K, V, dtype=wide)
            tiles = load_tiles(layout, s, inputs, work)
            do = work("do", *tiles.v.shape, dtype=work.product)
            layout.load(grad_o, s, do, scale)
            f, S = tiles.f, saved[s.index, s.row : s.row + s.rows]
            W = chunk_updates(work, tiles.k, tiles.v, f and f.after)
            ahead = scan(layout, s, W, f and f.total, S, state, None, work)
            R = chunk_updates(work, tiles.q, do, f and f.before)
            total, ends = f and f.total, (grad_final, grad_initial)
            back = scan(layout, s, R, total, dS, *ends, work, reverse=True)
            dS = back.bound
            found = _gradients(tiles, do, ahead, back, work, need_gate)
            for (tile, factor), out in zip(found, grads, strict=True):
                layout.store(tile, s, out, factor)
    dg = gate_grad(grads[3], log_decay) if log_decay is not None and need_gate else q.new_empty(0)
    return grads[0], grads[1], grads[2], dg, grad_initial


def _gradients(
    tiles: Tiles, do: Tensor, ahead: Scan, back: Scan, work: Buffers, need_gate: bool
) -> list[Graded]:
    """dq, dk, dv and, where needed, dg of one segment's tiles, each with a factor still to apply.

    See the module's docstring.
    """
    q, k, v, f, levels = tiles
    S = scaled(work, "S", ahead.states, f and f.before)
    dS = scaled(work, "dS_in", back.states, f and f.after)
    P = scores(tiles, work)
    dv = torch.bmm(P.transpose(1, 2), do, out=work("dv", *v.shape, dtype=work.product)).baddbmm_(
        k, dS
    )
    dP = torch.bmm(do, v.transpose(1, 2), out=P)
    dq = torch.bmm(do, S.transpose(1, 2), out=work("dq", *q.shape, dtype=work.product))
    dk = torch.bmm(v, dS.transpose(1, 2), out=work("dk", *k.shape, dtype=work.product))
    if f is None:
        dP.tril_()
        return [(dq.baddbmm_(dP, k), 1.0), (dk.baddbmm_(dP.transpose(1, 2), q), 1.0), (dv, 1.0)]
    found: list[Graded]
    exact, which = None, None
    if levels is not None:
        exact, which = _exact_gradients(tiles, dq, dk, dP, ahead, back, work), levels.strong.which
        if which is None:
            dq = exact[0].addcmul_(work.widen("dq wide", dq), f.to_q)
            dk = exact[1].addcmul_(work.widen("dk wide", dk), f.to_k)
            found = [(dq, 1.0), (dk, 1.0), (dv, 1.0)]
            return [*found, (exact[2], 1.0)] if need_gate else found
        dP.index_fill_(0, which, 0.0)
    # A token's own score has no decay in it: its part of q~ dq~ and k~ dk~ is the same, and larger
    # than the rest. It is added after the gate's gradient is taken, which would have to cancel it.
    own = dP.diagonal(dim1=1, dim2=2).unsqueeze(-1).to(work.dtype, copy=True)
    dP.tril_(-1)
    # The gate's gradient is a difference of sums of q~ dq~ and k~ dk~: what comes to them now is
    # not rounded, and neither are they.
    q, k, dq, dk = (
        work.widen(f"{name} wide", x) for name, x in (("q", q), ("k", k), ("dq", dq), ("dk", dk))
    )
    ends = _at_ends(q, k, dq, dk, f, ahead, back, work) if need_gate else None
    dP = work.widen("scratch", dP)
    dq.baddbmm_(dP, k)
    dk.baddbmm_(dP.transpose(1, 2), q)
    found = [(dq, f.to_q), (dk, f.to_k), (dv, 1.0)]
    if ends is not None:
        D = f.total.shape[-2]
        inside = torch.mul(q, dq, out=work("x dx", *q.shape)).addcmul_(k, dk, value=-1)
        start, end = (shared(x, D) for x in ends)
        found.append((mild_gate_grad(shared(inside, D), start, end, work), 1.0))
    dq.addcmul_(own, k)
    dk.addcmul_(own, q)
    if exact is not None and which is not None:
        dq.mul_(f.to_q).index_add_(0, which, exact[0])
        dk.mul_(f.to_k).index_add_(0, which, exact[1])
        found[:2] = [(dq, 1.0), (dk, 1.0)]
        if need_gate:
            found[3][0].index_copy_(0, which, exact[2])
    return found


def _at_ends(
    q: Tensor,
    k: Tensor,
    dq: Tensor,
    dk: Tensor,
    f: Factors,
    ahead: Scan,
    back: Scan,
    work: Buffers,
) -> tuple[Tensor, Tensor]:
    """Sum over V of the state times its gradient, before and after each chunk, [M, K] each.

    dq and dk are what the states bring to them; see the module's docstring.
    """
    through = torch.mul(ahead.states, back.states, out=work("scratch", *ahead.states.shape)).sum(-1)
    through = through.flatten(0, 2) * f.total.squeeze(-1)
    x = torch.mul(q, dq, out=work("x dx", *q.shape))
    start = x.sum(1).add_(through)
    return start, torch.mul(k, dk, out=x).sum(1).add_(through)


def _exact_gradients(
    tiles: Tiles, dq: Tensor, dk: Tensor, dP: Tensor, ahead: Scan, back: Scan, work: Buffers
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk through the scores of the strong tiles, and their whole dg, in buffers.

    dq and dk are what the states bring to them, of all tiles.
    """
    assert tiles.f is not None and tiles.levels is not None
    levels = tiles.levels
    named = {
        "q": tiles.q,
        "k": tiles.k,
        "dq": dq,
        "dk": dk,
        "dP": dP,
        "total": tiles.f.total,
        "S": ahead.states.flatten(0, 2),
        "dS": back.states.flatten(0, 2),
    }
    picked = {
        name: work.widen(f"{name} picked wide", levels.strong.take(x, f"{name} picked", work))
        for name, x in named.items()
    }
    D, through = tiles.f.total.shape[-2], []
    for a, b in (("q", "dq"), ("k", "dk"), ("S", "dS")):
        out = work(f"{a} {b}", *picked[a].shape)
        through.append(torch.mul(picked[a], picked[b], out=out))
    d_total = shared(through[2].sum(-1) * picked["total"].squeeze(-1), D)
    lower = picked["dP"].tril_()
    return levels.gradients(lower, shared(through[0], D), shared(through[1], D), d_total)


@_backward.register_fake
def _(
    q, k, v, log_decay, state, cu_seqlens, scale, chunk_size, saved, grad_o, grad_final, need_gate
):
    dg = q.new_empty(0)
    if log_decay is not None and need_gate:
        dg = log_decay.new_empty(log_decay.shape)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dg, grad_final.new_empty(grad_final.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])


def _autograd(ctx, grad_o, grad_final, _):
    *tensors, saved = ctx.saved_tensors
    need_gate, need_state = ctx.needs_input_grad[3:5]
    dq, dk, dv, dg, dS = torch.ops.gla.chunked_backward(
        *tensors, ctx.scale, ctx.chunk_size, saved, grad_o, grad_final, need_gate
    )
    return dq, dk, dv, dg if need_gate else None, dS if need_state else None, None, None, None


_forward.register_autograd(_autograd, setup_context=_save)
_backward.register_autograd(refuse_double_backward, setup_context=save_nothing)
