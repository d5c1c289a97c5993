"""Reformer attention (Kitaev et al. 2020, arXiv 2001.04451), causal: hashed buckets of the past.

Queries and keys are one projection; a key is its query at unit length. Each of R rounds hashes the
keys of a head into C buckets, with the arg max over [W k, -W k] for a random W, so that keys of
small angle tend to share a bucket. Token t reads the last w earlier tokens of its bucket, over all
rounds together, each once. What a token finds follows from the past alone: buckets are not filled
by sorting a whole chunk, which would let later tokens push earlier ones out of it.

It reads itself too, with a score lowered by 4. Its own score is the highest there can be; but where
it is masked, as in the paper, a token that finds one other gives the same output whatever it is
itself. Buckets are discrete, so rounding can move a token to another one.

This layer is the record of that route, written to be read: it masks the scores of all pairs, so a
token costs O(t K) operations, as in full attention, and the state holds 2 t K numbers a head.

Sizes: B batch, T tokens, L slots of the cache, D model width, H heads, K = D / H.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor

from gla.errors import ConfigError
from gla.layers.cache import SoftmaxState
from gla.layers.cached_attention import CachedAttention
from gla.layers.linear import Linear, WideModule
from gla.layers.linear_attention import head_dim
from gla.layers.mixer import MixerConfig
from gla.layers.rotary import rotate

Count = Annotated[int, Field(ge=1)]

_ROTARY_BASE = 10_000.0
_QUERY_BLOCK = 256  # queries whose masks stand in memory at once
_OWN_BIAS = -4.0


class ReformerConfig(MixerConfig):
    """Options of ``Reformer``.

    Attributes:
        kind: "reformer".
        num_heads: H; None is max(1, d_model // 64).
        buckets: C, an even number.
        rounds: R.
        window: w, tokens of a bucket that are read in each round.
    """

    kind: Literal["reformer"] = "reformer"
    num_heads: Count | None = None
    buckets: Annotated[int, Field(ge=2, multiple_of=2)] = 16
    rounds: Count = 2
    window: Count = 32


class Hash(WideModule):
    """The buckets of vectors; drawn with the weights, in the state dict, in fp32 or wider.

    Attributes:
        W: [R, K, C / 2].
    """

    W: Tensor

    def __init__(self, dim: int, buckets: int, rounds: int) -> None:
        super().__init__()
        self.register_buffer("W", torch.empty(rounds, dim, buckets // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W again."""
        self.W.normal_()

    def forward(self, k: Tensor) -> Tensor:
        """k [B, L, H, K] -> bucket [B, H, R, L] int64."""
        with torch.autocast(k.device.type, enabled=False):
            projected = torch.einsum("blhk,rkc->bhrlc", k.to(self.W.dtype), self.W)
        return torch.cat([projected, -projected], dim=-1).argmax(-1)


class Reformer(CachedAttention):
    """The layer. Its cache holds keys before they are rotated: buckets do not depend on places."""

    def __init__(self, d_model: int, config: ReformerConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = self.num_kv_heads = config.num_heads or max(1, d_model // 64)
        self.dim = head_dim("d_model", d_model, self.num_heads)
        if self.dim % 2:
            raise ConfigError(
                f"num_heads: got d_model / num_heads = {self.dim}, expected an even number for the "
                "rotary positions; fix num_heads"
            )
        self.hash = Hash(self.dim, config.buckets, config.rounds)
        self.qk_proj = Linear(d_model, d_model)
        self.v_proj = Linear(d_model, d_model)
        self.out_proj = Linear(d_model, d_model)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``CachedAttention``."""
        q, v = (
            rearrange(proj(x), "b t (h k) -> b t h k", h=self.num_heads)
            for proj in (self.qk_proj, self.v_proj)
        )
        return _rotate(q, position), F.normalize(q, dim=-1, eps=1e-6), v

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
        T = q.shape[1]
        if past is not None and past.filled is not None:
            used = int(past.filled.max())
            k, v = past.k[:, :used], past.v[:, :used]
        slot = torch.arange(k.shape[1], device=k.device)
        bucket, rank = self._buckets(k)
        place = position.view(-1, 1) + torch.arange(T, device=k.device)
        q, k, v = (x.transpose(1, 2) for x in (q, _rotate(k, slot.unsqueeze(0)), v))
        outputs = []
        for q_n, place_n in zip(
            q.split(_QUERY_BLOCK, 2), place.split(_QUERY_BLOCK, 1), strict=True
        ):
            index = place_n.clamp_max(k.shape[2] - 1)[:, None, None].expand(*bucket.shape[:3], -1)
            own = bucket.gather(3, index).unsqueeze(4) == bucket.unsqueeze(3)
            back = rank.gather(3, index).unsqueeze(4) - rank.unsqueeze(3)
            read = (own & (back >= 0) & (back <= self.config.window)).any(2)  # [B, H, n, L]
            bias = torch.zeros_like(read, dtype=q.dtype).masked_fill(~read, -torch.inf)
            itself = (slot == place_n.unsqueeze(-1)).unsqueeze(1)
            bias = bias.masked_fill(itself, _OWN_BIAS)
            outputs.append(F.scaled_dot_product_attention(q_n, k, v, attn_mask=bias, scale=1.0))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _buckets(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """k [B, L, H, K] -> bucket and rank, [B, H, R, L] int64.

        Ranks number the tokens of a bucket by their place, from where the bucket before ends.
        """
        bucket = self.hash(k)
        order = bucket.argsort(stable=True)
        number = torch.arange(k.shape[1], device=k.device).expand_as(order)
        return bucket, torch.empty_like(order).scatter_(-1, order, number)


def _rotate(x: Tensor, position: Tensor) -> Tensor:
    return rotate(x, x[:, :, :0], position, _ROTARY_BASE)[0]
