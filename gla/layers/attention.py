"""Softmax attention of rows over themselves and over what was read before.

Everything goes through ``F.scaled_dot_product_attention``; memory is linear in the tokens. Rows may
be padded on the right: a pad comes after every real token, so none of them sees it.

Sizes: B rows, T new tokens, P earlier tokens, H heads, G heads of keys and values, D their
dimension, W window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

_QUERY_BLOCK = 256  # queries whose mask over all earlier tokens stands in memory at once


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Attention without a past: token t reads tokens max(0, t - window + 1) to t.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D].
        window: W; None reads every earlier token.

    Returns:
        [B, T, H, D].
    """
    if window is None or q.shape[1] <= window:
        return _sdpa(q, k, v, causal=True)
    first = _sdpa(q[:, :window], k[:, :window], v[:, :window], causal=True)
    return torch.cat([first, _attend_in_blocks(q, k, v, window)], dim=1)


def attend_all(q: Tensor, k: Tensor, v: Tensor, length: Tensor | None = None) -> Tensor:
    """Attention in both directions: every token reads its whole row.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D].
        length: [B] int64, real tokens of each row; those behind are pads that no token reads.

    Returns:
        [B, T, H, D].
    """
    if length is None:
        return _sdpa(q, k, v)
    slot = torch.arange(k.shape[1], device=q.device)
    return _sdpa(q, k, v, mask=slot < length.view(-1, 1, 1))


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
) -> Tensor:
    """Attention over a sliding window that reaches back into the W tokens before the new ones.

    Args:
        q: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D].
        past_k: [B, W, G, D] the W tokens before the new ones, in order, the last at the end.
        past_v: [B, W, G, D].
        position: [B] int64, tokens before the new ones; of fewer than W only the last places count.

    Returns:
        [B, T, H, D].
    """
    T, W = q.shape[1], past_k.shape[1]
    n = min(T, W)
    query = torch.arange(n, device=q.device).unsqueeze(1)
    key = torch.arange(W + n, device=q.device)
    in_window = (query < key) & (key <= query + W)
    exists = key >= W - position.clamp_max(W).view(-1, 1, 1)
    first = _sdpa(
        q[:, :n],
        torch.cat([past_k, k[:, :n]], dim=1),
        torch.cat([past_v, v[:, :n]], dim=1),
        mask=in_window & exists,
    )
    if T <= W:
        return first
    return torch.cat([first, _attend_in_blocks(q, k, v, W)], dim=1)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Outputs from token W on: blocks of W queries read their own block and the one before.

    [B, T, H, D] -> [B, T - W, H, D]. Memory is 2 W keys a block, so linear in T.
    """
    B, T = q.shape[:2]
    pad = -T % window
    q_blocks, k_blocks, v_blocks = (
        rearrange(F.pad(x, (0, 0, 0, 0, 0, pad)), "b (n w) h d -> b n w h d", w=window)
        for x in (q, k, v)
    )
    pairs = (torch.cat([x[:, :-1], x[:, 1:]], dim=2) for x in (k_blocks, v_blocks))
    k_pairs, v_pairs = (rearrange(x, "b n w h d -> (b n) w h d") for x in pairs)
    query = torch.arange(window, device=q.device).unsqueeze(1)
    key = torch.arange(2 * window, device=q.device)
    in_window = (query < key) & (key <= query + window)
    o = _sdpa(rearrange(q_blocks[:, 1:], "b n w h d -> (b n) w h d"), k_pairs, v_pairs, in_window)
    return rearrange(o, "(b n) w h d -> b (n w) h d", b=B)[:, : T - window]


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
