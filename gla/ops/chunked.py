"""The chunkwise form in torch: training and prefill on any device.

A sequence is cut into chunks of C tokens. With the factors of ``gla.ops.decay`` (all 1 without a
gate), q~ = q * to_q and k~ = k * to_k, a chunk that starts from state S computes

    P  = tril(q~ k~^T)                           (exact_scores on strong tiles)
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

The second term of dg is what the state after the chunk brings. The sum is restarted in every chunk,
from states that are at hand, so its error does not grow with T; ``decay`` states it per half chunk.

Chunks are worked on a segment at a time, small enough that its buffers stay in cache; only the
state before each segment is saved for backward. Time and memory are linear in T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gla.ops.decay import Factors, Levels, factors, floor_of, mild_gate_grad, shared
from gla.ops.heads import gate_as_4d, gate_grad, product_dtype, wide_dtype
from gla.ops.layout import Layout, Segment, boundaries
from gla.ops.memory import Buffers, empty
from gla.ops.once import refuse_double_backward, save_nothing


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


class _Tiles(NamedTuple):
    """The inputs of one segment, [M, C, K or V]; q, k already times their factors."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Factors | None
    levels: Levels | None  # of the strong tiles


class _Scan(NamedTuple):
    """States before each chunk and what each chunk adds, [count, rows * H, K, V] fp32 or wider."""

    states: Tensor
    updates: Tensor


def _load(layout: Layout, s: Segment, inputs: list[Tensor], work: Buffers) -> _Tiles:
    """Read q, k, v and, if there is one, the gate [B, T, G, 1 or K]."""
    M, C = s.count * s.rows * layout.H, layout.C
    q, k, v, *gates = inputs
    v = layout.load(v, s, work("v", M, C, v.shape[-1], dtype=work.product))
    if not gates:
        q, k = (
            layout.load(x, s, work(name, M, C, x.shape[-1], dtype=work.product))
            for name, x in (("q", q), ("k", k))
        )
        return _Tiles(q, k, v, None, None)
    q, k, g = (
        layout.load(x, s, work(name, M, C, x.shape[-1]))
        for name, x in (("q", q), ("k", k), ("g", gates[0]))
    )
    f = factors(g.clamp_min_(floor_of(work.dtype)), work)
    levels = None
    if f.strong is not None and f.tree is not None:
        levels = Levels(q.index_select(0, f.strong), k.index_select(0, f.strong), f.tree)
    q, k = q.mul_(f.to_q), k.mul_(f.to_k)
    return _Tiles(work.narrow("q~", q), work.narrow("k~", k), v, f, levels)


def _scores(tiles: _Tiles, work: Buffers) -> Tensor:
    M, C, _ = tiles.q.shape
    P = torch.bmm(
        tiles.q, tiles.k.transpose(1, 2), out=work("P", M, C, C, dtype=work.product)
    ).tril_()
    if tiles.levels is not None and tiles.f is not None and tiles.f.strong is not None:
        P.index_copy_(0, tiles.f.strong, tiles.levels.scores().to(P.dtype))
    return P


def _product(work: Buffers, name: str, a: Tensor, b: Tensor, factor: Tensor | None) -> Tensor:
    """factor * (a^T b) [M, K, V] from a [M, C, K], b [M, C, V], factor [M, K or 1, 1]."""
    W = work(name, a.shape[0], a.shape[2], b.shape[2], dtype=work.product)
    W = work.widen(name + "_wide", torch.bmm(a.transpose(1, 2), b, out=W))
    return W if factor is None else W.mul_(factor)


def _scan(
    layout: Layout,
    s: Segment,
    tiles: _Tiles,
    S: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
    work: Buffers,
) -> tuple[_Scan, Tensor]:
    """Run the state over the chunks of a segment, from S [rows * H, K, V] before it.

    Returns:
        _Scan, and the state after the segment. Ends of sequences are written to ``final``.
    """
    W = _product(work, "W", tiles.k, tiles.v, tiles.f and tiles.f.after).unflatten(0, (s.count, -1))
    states = work("states", s.count + 1, *S.shape)
    states[0].copy_(S)
    decays = (
        [None] * s.count if tiles.f is None else tiles.f.total.unflatten(0, (s.count, -1)).unbind()
    )
    steps = zip(states[:-1].unbind(), states[1:].unbind(), W.unbind(), decays, strict=True)
    # The slot of the next chunk receives this one's end, unless another sequence starts there.
    for chunk, (before, after, update, decay) in enumerate(steps, s.first):
        if chunk in layout.starts:
            _read_state(initial, layout.rows_of(layout.starts[chunk], s), before)
        if decay is None:
            torch.add(update, before, out=after)
        else:
            torch.addcmul(update, before, decay, out=after)
        if final is not None and chunk in layout.ends:
            rows = layout.rows_of(layout.ends[chunk], s)
            final[rows] = after.view(final[rows].shape)
    return _Scan(states[:-1], W), states[-1]


def _read_state(states: Tensor | None, rows: slice, out: Tensor) -> None:
    """Copy rows of [N, H, K, V], or zeros, into out [rows * H, K, V]."""
    if states is None:
        out.zero_()
    else:
        out.copy_(states[rows].reshape(out.shape))


def _scaled(work: Buffers, name: str, states: Tensor, factor: Tensor | None) -> Tensor:
    """[count, rows * H, K, V] times factor [M, D, 1] per key channel -> [M, K, V] for a product."""
    flat = states.flatten(0, 1)
    if factor is None:
        return work.narrow(name, flat)
    return torch.mul(flat, factor, out=work(name, *flat.shape, dtype=work.product))


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
    layout = Layout(q, V, cu_seqlens, chunk_size)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = q.new_zeros(N, H, K, V, dtype=wide) if state is None else state.clone()
    saved = q.new_zeros(boundaries(q, V, cu_seqlens, chunk_size), B, H, K, V, dtype=wide)
    o = empty((B, T, H, V), v.dtype, v.device)
    inputs = [q, k, v] if log_decay is None else [q, k, v, gate_as_4d(log_decay, B, T)]
    work = Buffers(wide, product_dtype(q, v), q.device)
    with torch.autocast(q.device.type, enabled=False):
        S = q.new_empty(0, dtype=wide)
        for s in layout.segments:
            if s.first == 0:
                S = q.new_zeros(s.rows * H, K, V, dtype=wide)
            saved[s.index, s.row : s.row + s.rows] = S.view(s.rows, H, K, V)
            tiles = _load(layout, s, inputs, work)
            scan, S = _scan(layout, s, tiles, S, state, final, work)
            out = torch.bmm(
                _scores(tiles, work), tiles.v, out=work("o", *tiles.v.shape, dtype=work.product)
            )
            out.baddbmm_(tiles.q, _scaled(work, "S", scan.states, tiles.f and tiles.f.before))
            layout.store(out, s, o, scale)
    return o, final, saved


@_forward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, chunk_size):
    B, T, H, K = q.shape
    V, wide = v.shape[-1], wide_dtype(q.dtype)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o, final = v.new_empty(B, T, H, V), q.new_empty(N, H, K, V, dtype=wide)
    saved = boundaries(q, V, cu_seqlens, chunk_size)
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
    layout = Layout(q, V, cu_seqlens, chunk_size)
    grad_initial = grad_final.clone()
    inputs = [q, k, v] if log_decay is None else [q, k, v, gate_as_4d(log_decay, B, T)]
    grads = [empty(tuple(x.shape), x.dtype, x.device) for x in (q, k, v)]
    product = product_dtype(q, v)
    if log_decay is not None and need_gate:
        grads.append(empty(tuple(inputs[3].shape), wide, q.device))
        # A gate's gradient is what is left of sums over the chunk: rounded to bf16, they would show
        # in it by 2 to 15 %.
        product = wide
    work = Buffers(wide, product, q.device)
    with torch.autocast(q.device.type, enabled=False):
        dS = q.new_empty(0, dtype=wide)
        for s in reversed(layout.segments):
            if s.first + s.count == layout.chunks:
                dS = q.new_zeros(s.rows * H, K, V, dtype=wide)
            tiles = _load(layout, s, inputs, work)
            do = layout.load(grad_o, s, work("do", *tiles.v.shape, dtype=work.product)).mul_(scale)
            S = saved[s.index, s.row : s.row + s.rows].flatten(0, 1)
            scan, _ = _scan(layout, s, tiles, S, state, None, work)
            back, dS = _reverse_scan(layout, s, tiles, do, dS, grad_final, grad_initial, work)
            for tile, out in zip(
                _gradients(tiles, do, scan, back, work, need_gate), grads, strict=True
            ):
                layout.store(tile, s, out)
    dg = gate_grad(grads[3], log_decay) if log_decay is not None and need_gate else q.new_empty(0)
    return grads[0], grads[1], grads[2], dg, grad_initial


def _reverse_scan(
    layout: Layout,
    s: Segment,
    tiles: _Tiles,
    do: Tensor,
    dS: Tensor,
    grad_final: Tensor,
    grad_initial: Tensor,
    work: Buffers,
) -> tuple[_Scan, Tensor]:
    """Run the state's gradient backward over the chunks of a segment.

    Returns:
        _Scan of the gradients after each chunk and what each chunk's reads add to them, and the
        gradient before the segment. Starts of sequences are written to ``grad_initial``.
    """
    R = _product(work, "R", tiles.q, do, tiles.f and tiles.f.before).unflatten(0, (s.count, -1))
    slots = work("dS", s.count + 1, *dS.shape)
    slots[-1].copy_(dS)
    decays = (
        [None] * s.count if tiles.f is None else tiles.f.total.unflatten(0, (s.count, -1)).unbind()
    )
    steps = list(zip(slots[:-1].unbind(), slots[1:].unbind(), R.unbind(), decays, strict=True))
    for j in reversed(range(s.count)):
        before, after, update, decay = steps[j]
        chunk = s.first + j
        if chunk in layout.ends:
            _read_state(grad_final, layout.rows_of(layout.ends[chunk], s), after)
        if decay is None:
            torch.add(update, after, out=before)
        else:
            torch.addcmul(update, after, decay, out=before)
        if chunk in layout.starts:
            rows = layout.rows_of(layout.starts[chunk], s)
            grad_initial[rows] = before.view(grad_initial[rows].shape)
    return _Scan(slots[1:], R), slots[0]


def _gradients(
    tiles: _Tiles, do: Tensor, scan: _Scan, back: _Scan, work: Buffers, need_gate: bool
) -> list[Tensor]:
    """dq, dk, dv and, where needed, dg of one segment's tiles; see the module's docstring."""
    q, k, v, f, levels = tiles
    S = _scaled(work, "S", scan.states, f and f.before)
    dS = _scaled(work, "dS_in", back.states, f and f.after)
    P = _scores(tiles, work)
    dv = torch.bmm(P.transpose(1, 2), do, out=work("dv", *v.shape, dtype=work.product)).baddbmm_(
        k, dS
    )
    dP = torch.bmm(do, v.transpose(1, 2), out=P).tril_()
    dq = torch.bmm(do, S.transpose(1, 2), out=work("dq", *q.shape, dtype=work.product))
    dk = torch.bmm(v, dS.transpose(1, 2), out=work("dk", *k.shape, dtype=work.product))
    if f is None:
        return [dq.baddbmm_(dP, k), dk.baddbmm_(dP.transpose(1, 2), q), dv]
    D = f.total.shape[-2]
    d_total = shared((scan.states * back.states).flatten(0, 1).sum(-1) * f.total.squeeze(-1), D)
    exact, strong = None, f.strong
    if levels is not None and strong is not None:
        picked = [x[strong].to(work.dtype) for x in (q, dq, k, dk)]
        d_exact = dP[strong].to(work.dtype)
        exact = _exact_gradients(levels, picked, d_exact, d_total[strong])
        dP.index_fill_(0, strong, 0.0)
    # A token's own score has no decay in it: its part of q~ dq~ and k~ dk~ is the same, and larger
    # than the rest. It is added after the gate's gradient is taken, which would have to cancel it.
    own = dP.diagonal(dim1=1, dim2=2).unsqueeze(-1).to(work.dtype, copy=True)
    dP.tril_(-1)
    dq = work.widen("dq_wide", dq.baddbmm_(dP, k))
    dk = work.widen("dk_wide", dk.baddbmm_(dP.transpose(1, 2), q))
    q, k = work.widen("q", q), work.widen("k", k)
    through = torch.mul(q, dq, out=work("through", *q.shape)).sub_(k * dk)
    dq.addcmul_(own, k)
    dk.addcmul_(own, q)
    d_before = shared((scan.states * back.updates).flatten(0, 1).sum(-1), D)
    d_after = shared((scan.updates * back.states).flatten(0, 1).sum(-1), D)
    dg = mild_gate_grad(shared(through, D), d_before, d_after, d_total)
    dq.mul_(f.to_q)
    dk.mul_(f.to_k)
    if exact is not None and strong is not None:
        dq.index_add_(0, strong, exact[0])
        dk.index_add_(0, strong, exact[1])
        dg.index_copy_(0, strong, exact[2])
    return [dq, dk, dv, dg] if need_gate else [dq, dk, dv]


def _exact_gradients(
    levels: Levels, picked: list[Tensor], dP: Tensor, d_total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk through the scores of the strong tiles, and their whole dg.

    ``picked`` are q~, dq~, k~, dk~ [M, C, K]: q and k times their factors, and what the states
    bring to them.
    """
    (q, dq, k, dk), D = picked, d_total.shape[-1]
    return levels.gradients(dP, shared(q * dq, D), shared(k * dk, D), d_total)


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
