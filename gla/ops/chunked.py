"""The chunkwise form in torch: training and prefill on any device.

A sequence is cut into chunks of C tokens. With the factors of ``gla.ops.decay`` (all 1 without a
gate), q~ = q * to_q and k~ = k * to_k, a chunk that starts from state S computes

    P  = tril(q~ k~^T)                           (exact_scores on strong tiles)
    o  = P v + q~ (before * S)                   times scale
    S' = total * S + after * (k~^T v)

four matrix products. Backward, from do (already times scale) and the gradient dS' of the state after
the chunk, with ten (S is recomputed from the segment's first state: k~^T v again, and P again):

    dP  = tril(do v^T)
    dv  = P^T do + k~ (after * dS')
    dq~ = dP k~ + do (before * S)^T              dq = dq~ * to_q
    dk~ = dP^T q~ + v (after * dS')^T            dk = dk~ * to_k
    dS  = total * dS' + before * (q~^T do)

    dg_u = sum over t >= u of (q~ dq~ - k~ dk~)_t + sum_v S' * dS'

The second term of dg is what the state after the chunk brings. The sum is restarted in every chunk,
from states that are at hand, so its error does not grow with T; ``decay`` states it per half chunk.

Chunks are worked on a segment at a time, small enough that its buffers stay in cache; only the state
before each segment is saved for backward. Time and memory are linear in T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gla.ops.decay import Factors, Tree, exact_grads, exact_scores, factors, floor_of, mild_gate_grad
from gla.ops.heads import gate_as_4d, gate_grad, wide_dtype
from gla.ops import memory
from gla.ops.layout import Layout, Segment, chunk_size_for


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
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    C = chunk_size or chunk_size_for(q.shape[1], N if cu_seqlens is not None else 1)
    o, final, _ = torch.ops.gla.chunked(q, k, v, log_decay, state, cu_seqlens, scale, C)
    return o, final


class _Strong(NamedTuple):
    """Tiles of a segment that take the exact path: which, their q and k before any factor, their sums."""

    index: Tensor
    q: Tensor
    k: Tensor
    tree: Tree


class _Tiles(NamedTuple):
    """The inputs of one segment, [M, C, K or V] fp32 or wider; q, k already times their factors."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Factors | None
    strong: _Strong | None


def _load(layout: Layout, s: Segment, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> _Tiles:
    wide = wide_dtype(q.dtype)
    qt, kt, vt = (layout.load(x, s, wide) for x in (q, k, v))
    if g is None:
        return _Tiles(qt, kt, vt, None, None)
    f = factors(layout.load(g, s, wide).clamp_min_(floor_of(wide)))
    strong = None
    if f.strong is not None and f.tree is not None:
        strong = _Strong(f.strong, qt.index_select(0, f.strong), kt.index_select(0, f.strong), f.tree)
    return _Tiles(qt.mul_(f.to_q), kt.mul_(f.to_k), vt, f, strong)


def _scores(tiles: _Tiles) -> Tensor:
    P = torch.bmm(tiles.q, tiles.k.transpose(1, 2)).tril_()
    if tiles.strong is not None:
        x = tiles.strong
        P.index_copy_(0, x.index, exact_scores(x.q, x.k, x.tree))
    return P


class _Scan(NamedTuple):
    states: Tensor  # [count, rows * H, K, V] before each chunk
    updates: Tensor  # [count, rows * H, K, V] after * (k~^T v)


def _scan(layout: Layout, s: Segment, tiles: _Tiles, S: Tensor, initial: Tensor | None, final: Tensor | None):
    """Run the state over the chunks of a segment. S [rows * H, K, V] is the state before it.

    Returns:
        _Scan, and the state after the segment. Ends of sequences are written to ``final``.
    """
    K, V = S.shape[1:]
    W = torch.bmm(tiles.k.transpose(1, 2), tiles.v)
    if tiles.f is not None:
        W.mul_(tiles.f.after.unsqueeze(-1))
    W = W.view(s.count, -1, K, V)
    total = None if tiles.f is None else tiles.f.total.view(s.count, -1, tiles.f.total.shape[-1], 1)
    states = torch.empty_like(W)
    for j in range(s.count):
        chunk = s.first + j
        if chunk in layout.starts:
            S = _state_of(initial, layout.rows_of(layout.starts[chunk], s), S)
        states[j].copy_(S)
        after = torch.empty_like(S) if j == s.count - 1 else states[j + 1]
        S = torch.add(W[j], S, out=after) if total is None else torch.addcmul(W[j], S, total[j], out=after)
        if final is not None and chunk in layout.ends:
            rows = layout.rows_of(layout.ends[chunk], s)
            final[rows] = S.view(final[rows].shape)
    return _Scan(states, W), S


def _state_of(initial: Tensor | None, rows: slice, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if initial is None else initial[rows].reshape(like.shape)


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
    saved = q.new_zeros(layout.boundaries, B, H, K, V, dtype=wide)
    o = memory.empty((B, T, H, V), v.dtype, v.device)
    g = None if log_decay is None else gate_as_4d(log_decay, B, T)
    with torch.autocast(q.device.type, enabled=False):
        S = q.new_empty(0, dtype=wide)
        for s in layout.segments:
            if s.first == 0:
                S = q.new_zeros(s.rows * H, K, V, dtype=wide)
            tiles = _load(layout, s, q, k, v, g)
            rows = slice(s.row, s.row + s.rows)
            saved[s.index, rows] = S.view(s.rows, H, K, V)
            scan, S = _scan(layout, s, tiles, S, state, final)
            out = torch.bmm(_scores(tiles), tiles.v)
            out.baddbmm_(tiles.q, _scaled(scan.states, tiles.f and tiles.f.before))
            layout.store(out, s, o, scale)
    return o, final, saved


def _scaled(states: Tensor, factor: Tensor | None) -> Tensor:
    """[count, rows * H, K, V] times [M, D] per key channel -> [M, K, V]."""
    flat = states.flatten(0, 1)
    return flat if factor is None else flat * factor.unsqueeze(-1)


@_forward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, chunk_size):
    B, T, H, K = q.shape
    V, wide = v.shape[-1], wide_dtype(q.dtype)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    layout = Layout(q, V, cu_seqlens, chunk_size, read=False)
    o, final = v.new_empty(B, T, H, V), q.new_empty(N, H, K, V, dtype=wide)
    return o, final, q.new_empty(layout.boundaries, B, H, K, V, dtype=wide)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv, d log_decay (empty without a gate) and the gradient of the initial state."""
    B, T, H, K = q.shape
    V, wide = v.shape[-1], wide_dtype(q.dtype)
    layout = Layout(q, V, cu_seqlens, chunk_size)
    grad_initial = grad_final.clone()
    dq, dk, dv = (memory.empty(tuple(x.shape), x.dtype, x.device) for x in (q, k, v))
    g = None if log_decay is None else gate_as_4d(log_decay, B, T)
    dg = None if g is None else memory.empty(tuple(g.shape), wide, g.device)
    with torch.autocast(q.device.type, enabled=False):
        dS = q.new_empty(0, dtype=wide)
        for s in reversed(layout.segments):
            if s.first + s.count == layout.chunks:
                dS = q.new_zeros(s.rows * H, K, V, dtype=wide)
            tiles = _load(layout, s, q, k, v, g)
            do = layout.load(grad_o, s, wide).mul_(scale)
            S = saved[s.index, s.row : s.row + s.rows].reshape(s.rows * H, K, V)
            scan, _ = _scan(layout, s, tiles, S, state, None)
            dS_after, reads, dS = _reverse_scan(layout, s, tiles, do, dS, grad_final, grad_initial)
            grads = _segment_grads(tiles, do, scan, dS_after, reads)
            for tile, out in zip(grads, (dq, dk, dv, dg), strict=True):
                if tile is not None and out is not None:
                    layout.store(tile, s, out)
    if log_decay is None or dg is None:
        return dq, dk, dv, q.new_empty(0), grad_initial
    return dq, dk, dv, gate_grad(dg, log_decay), grad_initial


def _reverse_scan(layout, s, tiles, do, dS, grad_final, grad_initial):
    """Run the state's gradient backward over the chunks of a segment.

    Returns:
        [count, rows * H, K, V] gradients after each chunk, before * (q~^T do), and the gradient
        before the segment. Starts of sequences are written to ``grad_initial``.
    """
    K, V = dS.shape[1:]
    R = torch.bmm(tiles.q.transpose(1, 2), do)
    if tiles.f is not None:
        R.mul_(tiles.f.before.unsqueeze(-1))
    R = R.view(s.count, -1, K, V)
    total = None if tiles.f is None else tiles.f.total.view(s.count, -1, tiles.f.total.shape[-1], 1)
    after = torch.empty_like(R)
    for j in reversed(range(s.count)):
        chunk = s.first + j
        if chunk in layout.ends:
            dS = grad_final[layout.rows_of(layout.ends[chunk], s)].reshape(dS.shape)
        after[j].copy_(dS)
        before = torch.empty_like(dS) if j == 0 else after[j - 1]
        dS = torch.add(R[j], dS, out=before) if total is None else torch.addcmul(R[j], dS, total[j], out=before)
        if chunk in layout.starts:
            rows = layout.rows_of(layout.starts[chunk], s)
            grad_initial[rows] = dS.view(grad_initial[rows].shape)
    return after, R, dS


def _segment_grads(tiles: _Tiles, do: Tensor, scan: _Scan, dS: Tensor, reads: Tensor):
    """dq, dk, dv, dg of one segment's tiles; see the module's docstring. dg is None without a gate."""
    f = tiles.f
    S = _scaled(scan.states, f and f.before)
    dS_in = _scaled(dS, f and f.after)
    P = _scores(tiles)
    dv = torch.bmm(P.transpose(1, 2), do).baddbmm_(tiles.k, dS_in)
    dP = torch.bmm(do, tiles.v.transpose(1, 2)).tril_()
    dq = torch.bmm(do, S.transpose(1, 2))
    dk = torch.bmm(tiles.v, dS_in.transpose(1, 2))
    exact = None
    if f is not None and tiles.strong is not None:
        exact = _strong_grads(tiles, tiles.strong, f, dP, dq, dk, _through_state(scan.states, dS, f))
        dP.index_fill_(0, tiles.strong.index, 0.0)
    dq.baddbmm_(dP, tiles.k)
    dk.baddbmm_(dP.transpose(1, 2), tiles.q)
    if f is None:
        return dq, dk, dv, None
    through = _channels(torch.mul(tiles.q, dq).sub_(torch.mul(tiles.k, dk)), f)
    d_before = _channels((scan.states.flatten(0, 1) * reads.flatten(0, 1)).sum(-1), f)
    d_after = _channels((scan.updates.flatten(0, 1) * dS.flatten(0, 1)).sum(-1), f)
    dg = mild_gate_grad(through, d_before, d_after, _through_state(scan.states, dS, f))
    dq.mul_(f.to_q)
    dk.mul_(f.to_k)
    if exact is not None and tiles.strong is not None:
        dq.index_add_(0, tiles.strong.index, exact[0])
        dk.index_add_(0, tiles.strong.index, exact[1])
        dg.index_copy_(0, tiles.strong.index, exact[2])
    return dq, dk, dv, dg


def _strong_grads(tiles: _Tiles, x: _Strong, f: Factors, dP, dq, dk, through: Tensor):
    """dq and dk that the scores of the strong tiles bring, and the whole dg of these tiles.

    dq~, dk~ come in as the states brought them; ``through`` [M, D] is ``_through_state``.
    """
    i = x.index
    d_prefix = _channels(tiles.q[i] * dq[i], f)
    d_suffix = _channels(tiles.k[i] * dk[i], f)
    return exact_grads(x.q, x.k, x.tree, dP[i], d_prefix, d_suffix, through[i])


def _channels(x: Tensor, f: Factors) -> Tensor:
    """[..., K] -> [..., D]: summed over the key channels that share a gate."""
    return x if f.total.shape[-1] == x.shape[-1] else x.sum(-1, keepdim=True)


def _through_state(states: Tensor, dS: Tensor, f: Factors) -> Tensor:
    """[M, D] gradient of the log of the chunk's decay of the state: sum_v total * S * dS'."""
    return _channels((states * dS).sum(-1).flatten(0, 1) * f.total, f)


@_backward.register_fake
def _(q, k, v, log_decay, state, cu_seqlens, scale, chunk_size, saved, grad_o, grad_final):
    dg = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dg, grad_final.new_empty(grad_final.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])


def _autograd(ctx, grad_o, grad_final, _):
    *tensors, saved = ctx.saved_tensors
    dq, dk, dv, dg, dS = torch.ops.gla.chunked_backward(
        *tensors, ctx.scale, ctx.chunk_size, saved, grad_o, grad_final
    )
    log_decay, state = tensors[3], tensors[4]
    gates = None if log_decay is None else dg
    return dq, dk, dv, gates, None if state is None else dS, None, None, None


_forward.register_autograd(_autograd, setup_context=_save)
