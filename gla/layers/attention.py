"""Softmax attention of rows over themselves and over what was read before.

Everything goes through ``F.scaled_dot_product_attention``; memory is linear in the tokens. Rows may
be padded on the right: a pad comes after every real token, so none of them sees it.

Sizes: B rows, T new tokens, P earlier tokens, H heads, G heads of keys and values, D their
dimension, W window, g tokens at the start of a row that are read from everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

_QUERY_BLOCK = 256  # queries whose mask over all earlier tokens stands in memory at once


class Pinned(NamedTuple):
    """The first g tokens of each row, which every later token reads.

    Attributes:
        k: [B, g, G, D]; slot j is unread before token j.
        v: [B, g, G, D].
    """

    k: Tensor
    v: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, pinned: int = 0) -> Tensor:
    """Attention without a past: token t reads tokens t - window + 1 to t and the first ``pinned``.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D].
        window: W; None reads every earlier token.
        pinned: g, at most W.

    Returns:
        [B, T, H, D].
    """
    if window is None or q.shape[1] <= window:
        return _sdpa(q, k, v, causal=True)
    if pinned:
        none = k[:, :0].new_zeros(q.shape[0], window, *k.shape[2:])
        position = torch.zeros(q.shape[0], device=q.device, dtype=torch.int64)
        first = Pinned(k[:, :pinned], v[:, :pinned])
        return attend_after_window(q, k, v, none, none, position, first)
    first = _sdpa(q[:, :window], k[:, :window], v[:, :window], causal=True)
    return torch.cat([first, _attend_in_blocks(q, k, v, window, window)], dim=1)


def attend_both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    global_tokens: int,
    length: Tensor | None = None,
) -> Tensor:
    """Attention in both directions: token t reads tokens less than ``window`` away.

    The first ``global_tokens`` read every token, and every token reads them (Longformer).

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D].
        window: W; None reads the whole row.
        global_tokens: g.
        length: [B] int64, real tokens of each row; those behind are pads that no token reads.

    Returns:
        [B, T, H, D].
    """
    B, T = q.shape[:2]
    slot = torch.arange(T, device=q.device)
    real = None if length is None else slot < length.view(-1, 1, 1)
    if window is None or window >= T:
        return _sdpa(q, k, v, mask=real)
    W, g = window, min(global_tokens, T)
    length = torch.full((1,), T, device=q.device) if length is None else length
    # Blocks of W queries read the block before, their own and the next.
    q_blocks = _blocks(q, W)
    k_near, v_near = (
        torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], dim=2)
        for x in (_blocks(F.pad(x, (0, 0, 0, 0, W, W)), W, q_blocks.shape[1] + 2) for x in (k, v))
    )
    t = torch.arange(q_blocks.shape[1] * W, device=q.device).view(1, -1, W, 1)
    place = t[:, :, :1, 0] + torch.arange(-W, 2 * W, device=q.device)  # [1, n, 3 W]
    place, length = place.unsqueeze(2), length.view(-1, 1, 1, 1)
    near = (place - t).abs() < W
    near = near & (place >= g) & (place < length) | (place == t)  # a pad reads itself, not nothing
    far = (slot[:g] < length).expand(*near.shape[:3], g)
    k_near, v_near = (
        torch.cat([x[:, None, :g].expand(-1, near_x.shape[1], -1, -1, -1), near_x], dim=2)
        for x, near_x in ((k, k_near), (v, v_near))
    )
    mask = torch.cat([far, near], dim=-1).expand(B, -1, -1, -1)
    q_blocks, k_near, v_near, mask = (x.flatten(0, 1) for x in (q_blocks, k_near, v_near, mask))
    o = _sdpa(q_blocks, k_near, v_near, mask)
    o = rearrange(o, "(b n) w h d -> b (n w) h d", n=t.shape[1])
    return torch.cat([_sdpa(q[:, :g], k, v, mask=real), o[:, g:T]], dim=1)


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Attention over a cache that already holds the keys and values of the new tokens.

    Args:
        q: [B, T, H, D].
        k: [B, L, G, D] the token at place j of its sequence in slot j; later slots are unread.
        v: [B, L, G, D].
        position: [B] int64, tokens of each sequence before the new ones.

    Returns:
        [B, T, H, D].
    """
    T = q.shape[1]
    slot = torch.arange(k.shape[1], device=q.device)
    place = position.unsqueeze(1) + torch.arange(T, device=q.device)
    outputs = [
        _sdpa(q_block, k, v, mask=slot <= place_block.unsqueeze(-1))
        for q_block, place_block in zip(
            q.split(_QUERY_BLOCK, dim=1), place.split(_QUERY_BLOCK, dim=1), strict=True
        )
    ]
    return torch.cat(outputs, dim=1)


def attend_after_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor,
    past_v: Tensor,
    position: Tensor,
    pinned: Pinned | None = None,
) -> Tensor:
    """Attention over a sliding window that reaches back into the W tokens before the new ones.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D].
        past_k: [B, W, G, D] the W tokens before the new ones, in order, the last at the end; those
            that do not exist or are pinned are not read.
        past_v: [B, W, G, D].
        position: [B] int64, tokens before the new ones.
        pinned: the first g tokens, g at most W, of the past or of the new ones.

    Returns:
        [B, T, H, D].
    """
    T, W = q.shape[1], past_k.shape[1]
    g = 0 if pinned is None else pinned.k.shape[1]
    # From token 2 W on, a window holds no pinned token, so all blocks have the same mask.
    n = min(T, 2 * W if g else W)
    t = position.view(-1, 1, 1) + torch.arange(n, device=q.device).unsqueeze(1)
    place = position.view(-1, 1, 1) + torch.arange(-W, n, device=q.device)
    mask = (t - W < place) & (place <= t) & (place >= g)
    k_first, v_first = (torch.cat([p, x[:, :n]], dim=1) for p, x in ((past_k, k), (past_v, v)))
    if pinned is not None:
        mask = torch.cat([(torch.arange(g, device=q.device) <= t), mask], dim=-1)
        k_first = torch.cat([pinned.k, k_first], dim=1)
        v_first = torch.cat([pinned.v, v_first], dim=1)
    first = _sdpa(q[:, :n], k_first, v_first, mask=mask)
    if T <= n:
        return first
    return torch.cat([first, _attend_in_blocks(q, k, v, W, n, pinned)], dim=1)


def attend_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    window: int,
    pinned: int,
    chosen: Callable[[Tensor], Tensor],
) -> Tensor:
    """Window, first tokens, and blocks of the further past that ``chosen`` names (BigBird).

    Blocks are of W places of a sequence, from its start. Memory is linear in T: each block of
    queries has its keys put together.

    Args:
        q: [B, T, H, D].
        k: [B, L, G, D] the token at place j of its sequence in slot j, new ones included.
        v: [B, L, G, D].
        position: [B] int64, tokens of each sequence before the new ones.
        window: W.
        pinned: g.
        chosen: maps block numbers c [...] to further blocks [..., r] below c - 1, or -1 for none.

    Returns:
        [B, T, H, D].
    """
    B, T, W = q.shape[0], q.shape[1], window
    if T == 0:
        return q
    width = 1 if T == 1 else W  # one token is a block of its own
    offset = position.remainder(width)
    blocks = 1 if T == 1 else -(-(T - 1) // W) + 1
    grid = torch.arange(blocks * width, device=q.device) - offset.unsqueeze(1)  # [B, n w]
    row = torch.arange(B, device=q.device).unsqueeze(1)
    q_blocks = q[row, grid.clamp(0, T - 1)].unflatten(1, (blocks, width))
    t = (grid + position.unsqueeze(1)).view(B, blocks, width, 1)
    c = t[..., 0, 0] // W  # [B, n]
    near = (c.unsqueeze(-1) - 1) * W + torch.arange(2 * W, device=q.device)
    first = torch.arange(pinned, device=q.device).expand(B, blocks, -1)
    picked = chosen(c)  # [B, n, r]
    far = (picked.unsqueeze(-1) * W + torch.arange(W, device=q.device)).flatten(2)
    slot = torch.cat([first, near, far], dim=-1)
    near, first, far = (x.unsqueeze(2) for x in (near, first, far))
    mask = torch.cat(
        [
            first <= t - W,
            (t - W < near) & (0 <= near) & (near <= t),
            (far >= pinned).expand(-1, -1, width, -1),
        ],
        dim=-1,
    )
    slot = slot.clamp(0, k.shape[1] - 1)
    k_blocks, v_blocks = (x[row.unsqueeze(-1), slot].flatten(0, 1) for x in (k, v))
    o = _sdpa(q_blocks.flatten(0, 1), k_blocks, v_blocks, mask.flatten(0, 1))
    o = rearrange(o, "(b n) w h d -> b (n w) h d", n=blocks)
    return o[row, torch.arange(T, device=q.device) + offset.unsqueeze(1)]


def _blocks(x: Tensor, width: int, count: int | None = None) -> Tensor:
    """[B, T, H, D] -> [B, n, width, H, D], padded with zeros at the end, to ``count`` blocks."""
    count = -(-x.shape[1] // width) if count is None else count
    x = F.pad(x, (0, 0, 0, 0, 0, count * width - x.shape[1]))
    return x.unflatten(1, (count, width))


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int, start: int, pinned: Pinned | None = None
) -> Tensor:
    """Outputs from token ``start`` on, a multiple of W: W queries read two blocks and the pinned.

    [B, T, H, D] -> [B, T - start, H, D]. Memory is 2 W + g keys a block, so linear in T.
    """
    T = q.shape[1]
    skip = start // window
    q_blocks, k_blocks, v_blocks = (_blocks(x, window) for x in (q, k, v))
    pairs = [torch.cat([x[:, skip - 1 : -1], x[:, skip:]], dim=2) for x in (k_blocks, v_blocks)]
    query = torch.arange(window, device=q.device).unsqueeze(1)
    key = torch.arange(2 * window, device=q.device)
    mask = (query < key) & (key <= query + window)
    if pinned is not None:
        g, n = pinned.k.shape[1], pairs[0].shape[1]
        mask = torch.cat([mask.new_ones(window, g), mask], dim=-1)
        pairs = [
            torch.cat([x.unsqueeze(1).expand(-1, n, -1, -1, -1), pair], dim=2)
            for x, pair in zip(pinned, pairs, strict=True)
        ]
    k_pairs, v_pairs = (x.flatten(0, 1) for x in pairs)
    o = _sdpa(q_blocks[:, skip:].flatten(0, 1), k_pairs, v_pairs, mask)
    return rearrange(o, "(b n) w h d -> b (n w) h d", n=pairs[0].shape[1])[:, : T - start]


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """SDPA in the layout [B, T, H, D]; mask [T, L] or [B, T or 1, L], True where a query reads."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)
