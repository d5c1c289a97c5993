"""Softmax attention layer: full or sparse, rotary positions, grouped heads.

The baseline (Vaswani et al. 2017, arXiv 1706.03762) and the local part of hybrids. What token t
reads, besides itself:

| options               | token t reads                                | also known as             |
|-----------------------|----------------------------------------------|---------------------------|
| none                  | all before it                                |                           |
| window = W            | the W - 1 before it                          | sliding window            |
| ... global_tokens = g | and the first g                              | sinks; causal Longformer  |
| ... random_blocks = r | and r blocks of W, drawn from further back   | causal BigBird            |
| causal = false        | all                                          |                           |
| ... window = W        | those less than W away                       |                           |
| ... global_tokens = g | and the first g, which read all              | Longformer                |

Sinks are arXiv 2309.17453 (here at their true distance), Longformer is 2004.05150 (here with one
set of projections), BigBird 2007.14062.

A decoded token costs O(L D) operations a head, and the state holds 2 L D numbers a head of keys and
values, where L is all tokens so far (none of the options), W, or g + W. With random blocks L is
g + 2 W + r W in operations, but all tokens in the state: any block may be drawn again.

Cut in blocks of W from the start of a document, the tokens of block c draw their r blocks from
0 to c - 2, one from each of r parts of that range, by a hash of the layer's seed and c; so a
draw does not depend on how the document is read.

Sizes: B batch, T tokens, D model width, H heads, G heads of keys and values, K dimension of a head,
N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from gla.errors import ConfigError
from gla.layers import cache
from gla.layers.attention import (
    Pinned,
    attend,
    attend_after_window,
    attend_both_ways,
    attend_sparse,
    attend_to_cache,
)
from gla.layers.cache import SoftmaxState
from gla.layers.cached_attention import CachedAttention
from gla.layers.linear import Linear
from gla.layers.linear_attention import check_groups, head_dim
from gla.layers.mixer import MixerConfig
from gla.layers.rotary import rotate

Count = Annotated[int, Field(ge=1)]

_NOISE_BITS = 20


class SoftmaxAttentionConfig(MixerConfig):
    """Options of ``SoftmaxAttention``.

    Attributes:
        kind: "softmax_attention".
        num_heads: H; None is max(1, d_model // 64).
        num_kv_heads: G, heads of keys and values, each shared by H / G heads; None is H.
        window: W, a token reads itself and the window - 1 before it (and after it, if not causal);
            None reads all.
        global_tokens: g, the first tokens of a document, read by all tokens; at most W.
        random_blocks: r, see above.
        rotary: whether positions are embedded; without, only the order of reading tells them.
        rotary_base: base of the rotary wavelengths.
        causal: False lets tokens read later ones too: for encoders; no random blocks.
    """

    kind: Literal["softmax_attention"] = "softmax_attention"
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    window: Count | None = None
    global_tokens: Annotated[int, Field(ge=0)] = 0
    random_blocks: Annotated[int, Field(ge=0)] = 0
    rotary: bool = True
    rotary_base: Annotated[float, Field(gt=1)] = 10_000.0
    causal: bool = True


class SoftmaxAttention(CachedAttention):
    """The layer. Its state is a ring of g + W tokens, or a cache that grows.

    Attributes:
        seed: [] int64, of the random blocks; drawn with the weights, and in the state dict.
    """

    seed: Tensor

    def __init__(self, d_model: int, config: SoftmaxAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads or max(1, d_model // 64)
        self.num_kv_heads = config.num_kv_heads or self.num_heads
        self.dim = head_dim("d_model", d_model, self.num_heads)
        check_groups(self.num_heads, self.num_kv_heads)
        if config.rotary and self.dim % 2:
            raise ConfigError(
                f"rotary: got true with d_model / num_heads = {self.dim}, expected an even number; "
                "fix num_heads or rotary"
            )
        self.causal = config.causal
        _check_options(config)
        self.pinned = config.global_tokens
        if config.window is not None and not config.random_blocks:
            self.ring = self.pinned + config.window
        if config.random_blocks:
            self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
            self.reset_parameters()
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, self.num_kv_heads * self.dim)
        self.v_proj = Linear(d_model, self.num_kv_heads * self.dim)
        self.out_proj = Linear(d_model, d_model)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the seed of the random blocks again."""
        if self.config.random_blocks:
            self.seed.copy_(torch.randint(2**31, (), device="cpu"))

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``CachedAttention``."""
        q = rearrange(self.q_proj(x), "b t (h k) -> b t h k", h=self.num_heads)
        k = rearrange(self.k_proj(x), "b t (g k) -> b t g k", g=self.num_kv_heads)
        v = rearrange(self.v_proj(x), "b t (g k) -> b t g k", g=self.num_kv_heads)
        if self.config.rotary:
            q, k = rotate(q, k, position, self.config.rotary_base)
        return q, k, v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: SoftmaxState | None,
        after: SoftmaxState | None,
        position: Tensor,
        holds_new: bool,
        length: Tensor | None = None,
    ) -> Tensor:
        """See ``CachedAttention``."""
        window, pinned = self.config.window, self.pinned
        if not self.causal:
            return attend_both_ways(q, k, v, window, pinned, length)
        if self.config.random_blocks and window is not None:
            k, v = (k, v) if past is None else (past.k, past.v)
            return attend_sparse(q, k, v, position, window, pinned, self._choose_blocks)
        if past is None:
            return attend(q, k, v, window, pinned)
        if not holds_new:
            k_past, v_past = (cache.in_order(ring, position, pinned) for ring in (past.k, past.v))
            first = None
            if pinned and after is not None:
                first = Pinned(after.k[:, :pinned], after.v[:, :pinned])
            return attend_after_window(q, k, v, k_past, v_past, position, first)
        if past.filled is None:  # one token, and the order of a ring does not matter to it
            return attend_to_cache(q, past.k, past.v, position.clamp_max(past.k.shape[1] - 1))
        used = int(past.filled.max())
        return attend_to_cache(q, past.k[:, :used], past.v[:, :used], position)

    def _choose_blocks(self, c: Tensor) -> Tensor:
        """c [...] block numbers -> [..., r] random blocks from 0 to c - 2, or -1; all distinct."""
        r = self.config.random_blocks
        k = torch.arange(r, device=c.device)
        number = (c - 1).clamp_min(0).unsqueeze(-1)  # of blocks to choose from
        noise = _hash(self.seed + c.unsqueeze(-1) * r + k) & (2**_NOISE_BITS - 1)
        low, high = number * k // r, number * (k + 1) // r
        drawn = low + ((high - low) * noise >> _NOISE_BITS)
        every = k.where(k < number, -1)
        return torch.where(number > r, drawn, every)


def _hash(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers: 32 bits in, 32 bits out (Wang's integer hash)."""
    word = 2**32 - 1
    x = x & word
    x = ((x ^ 61) ^ (x >> 16)) & word
    x = (x + (x << 3)) & word
    x = x ^ (x >> 4)
    x = (x * 0x27D4EB2D) & word
    return x ^ (x >> 15)


def _check_options(config: SoftmaxAttentionConfig) -> None:
    for field in ("global_tokens", "random_blocks"):
        if getattr(config, field) and config.window is None:
            raise ConfigError(
                f"{field}: got {getattr(config, field)} without a window, where every token is "
                f"read anyway, expected 0; fix by setting window"
            )
    if config.window is not None and config.global_tokens > config.window:
        raise ConfigError(
            f"global_tokens: got {config.global_tokens} with window = {config.window}, expected at "
            "most the window; fix window"
        )
    if config.random_blocks and not config.causal:
        raise ConfigError(
            f"random_blocks: got {config.random_blocks} with causal = false, expected 0; fix by "
            "leaving random_blocks out"
        )
