"""The equation as a loop over tokens in float64; what every form of the op is measured against.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T
    z_t = exp(g_t) * z_{t-1} + k_t
    o_t = scale * S_t^T q_t                   or  S_t^T q_t / max(z_t^T q_t, 1e-6)

Written from these three lines alone and sharing no code with the package. Gradients are those of
autograd through the loop.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    """o [B,T,H,V], S [N,H,K,V], z [N,H,K] (None without the normalizer); all float64."""

    o: Tensor
    S: Tensor
    z: Tensor | None


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    S: Tensor | None = None,
    z: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
) -> Result:
    """Evaluate the equation; arguments as those of the op, the initial state as S and z."""
    heads, key_dim = q.shape[2], q.shape[3]
    q = q.double()
    k, v = _one_a_head(k.double(), heads), _one_a_head(v.double(), heads)
    g = None if log_decay is None else _one_a_channel(log_decay.double(), q)
    factor = key_dim**-0.5 if scale is None else scale

    # Documents lie along T in the one row of a pack; without a pack, all rows run side by side.
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    results = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        results.append(
            _sequence(
                q[:, start:end],
                k[:, start:end],
                v[:, start:end],
                None if g is None else g[:, start:end],
                None if S is None else S[rows].double(),
                None if z is None else z[rows].double(),
                factor,
                normalize,
                causal,
            )
        )
    return Result(
        torch.cat([r.o for r in results], dim=1),
        torch.cat([r.S for r in results]),
        torch.cat([r.z for r in results]) if normalize else None,
    )


def _one_a_head(x: Tensor, heads: int) -> Tensor:
    """Grouped heads: head h reads group h // (H / G)."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _one_a_channel(g: Tensor, q: Tensor) -> Tensor:
    """[G], [B, T, G] or [B, T, G, K] to [B, T, H, K]."""
    batch, tokens, heads, key_dim = q.shape
    if g.dim() == 1:
        g = g.expand(batch, tokens, -1)
    if g.dim() == 3:
        g = g.unsqueeze(-1).expand(-1, -1, -1, key_dim)
    return _one_a_head(g, heads)


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    scale: float,
    normalize: bool,
    causal: bool,
) -> Result:
    batch, tokens, heads, key_dim = q.shape
    S = q.new_zeros(batch, heads, key_dim, v.shape[-1]) if S is None else S
    z = q.new_zeros(batch, heads, key_dim) if z is None else z

    # unbind, not x[:, t]: the gradient of one index is as large as x, quadratic over a loop.
    qs, ks, vs = q.unbind(1), k.unbind(1), v.unbind(1)
    decays = None if g is None else g.exp().unbind(1)
    states = []
    for t in range(tokens):
        if decays is not None:
            S = decays[t].unsqueeze(-1) * S
            z = decays[t] * z
        S = S + ks[t].unsqueeze(-1) * vs[t].unsqueeze(-2)
        z = z + ks[t]
        states.append((S, z))
    if not causal:
        states = [(S, z)] * tokens

    outputs = []
    for t, (S_t, z_t) in enumerate(states):
        read = (qs[t].unsqueeze(-1) * S_t).sum(-2)
        if normalize:
            total = (z_t * qs[t]).sum(-1, keepdim=True)
            outputs.append(read / total.clamp_min(1e-6))
        else:
            outputs.append(scale * read)
    o = torch.stack(outputs, dim=1) if outputs else v
    return Result(o, S, z if normalize else None)
