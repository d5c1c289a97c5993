"""``causal=False``: every position reads the state of its whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from gla.ops.heads import expand_heads, wide_dtype
from gla.ops.memory import fresh


def whole_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o_t = scale * S^T q_t with S = S_0 + sum_s k_s v_s^T; two matrix products, plain autograd.

    Shapes as in ``gated_linear_attention``; the products run in fp32 or wider.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _whole_sequence(q, k, v, state, cu_seqlens, scale)


def _whole_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    H, wide = q.shape[2], wide_dtype(q.dtype)
    dtype = v.dtype
    q, k, v = (expand_heads(x, H).to(wide) for x in (q, k, v))
    if cu_seqlens is None:
        S = torch.einsum("bthk,bthv->bhkv", k, v)
        S = S if state is None else S + state
        return (torch.einsum("bthk,bhkv->bthv", q, S) * scale).to(dtype), S
    sizes = cu_seqlens.diff().tolist()
    rows = zip(*(x[0].split(sizes) for x in (q, k, v)), strict=True)
    outs, states = [], []
    for n, (q_n, k_n, v_n) in enumerate(rows):
        S = torch.einsum("thk,thv->hkv", k_n, v_n)
        S = S if state is None else S + state[n]
        outs.append(torch.einsum("thk,hkv->thv", q_n, S))
        states.append(S)
    if not states:
        return v.new_zeros(1, 0, H, v.shape[-1], dtype=dtype), v.new_zeros(
            0, H, q.shape[-1], v.shape[-1]
        )
    return (torch.cat(outs).unsqueeze(0) * scale).to(dtype), torch.stack(states)


def no_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """T = 0: an empty output and the initial state, or zeros."""
    B, _, H, K = q.shape
    V = v.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    S = q.new_zeros(N, H, K, V, dtype=wide_dtype(q.dtype)) if state is None else fresh(state)
    return v.new_zeros(B, 0, H, V), S
