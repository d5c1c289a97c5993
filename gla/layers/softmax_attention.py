"""Softmax attention layer: full or over a sliding window, rotary positions, grouped heads.

The baseline (Vaswani et al. 2017, arXiv 1706.03762) and the local part of hybrids.

Sizes: B batch, T tokens, D model width, H heads, G heads of keys and values, K dimension of a head,
N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from gla.errors import ConfigError, StateError
from gla.layers import cache
from gla.layers.attention import attend, attend_after_window, attend_all, attend_to_cache
from gla.layers.cache import SoftmaxState
from gla.layers.linear import Linear
from gla.layers.linear_attention import check_groups, head_dim
from gla.layers.mixer import Mixer, MixerConfig
from gla.layers.packing import batch_documents
from gla.layers.rotary import rotate
from gla.state import select

Count = Annotated[int, Field(ge=1)]


class SoftmaxAttentionConfig(MixerConfig):
    """Options of ``SoftmaxAttention``.

    Attributes:
        kind: "softmax_attention".
        num_heads: H; None is max(1, d_model // 64).
        num_kv_heads: G, heads of keys and values, each shared by H / G heads; None is H.
        window: a token reads itself and the window - 1 before it; None reads all before it.
        rotary: whether positions are embedded; without, only the order of reading tells them.
        rotary_base: base of the rotary wavelengths.
        causal: False lets every token read its whole document: for encoders; no window.
    """

    kind: Literal["softmax_attention"] = "softmax_attention"
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    window: Count | None = None
    rotary: bool = True
    rotary_base: Annotated[float, Field(gt=1)] = 10_000.0
    causal: bool = True


class SoftmaxAttention(Mixer[SoftmaxState]):
    """The layer. Its state is a ring of ``window`` tokens, or a cache that grows."""

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
        if not config.causal and config.window is not None:
            raise ConfigError(
                f"window: got {config.window} with causal = false, expected none; fix by leaving "
                "window out"
            )
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, self.num_kv_heads * self.dim)
        self.v_proj = Linear(d_model, self.num_kv_heads * self.dim)
        self.out_proj = Linear(d_model, d_model)

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> SoftmaxState:
        """Empty state in the dtype of the activations."""
        self.require_causal("a call for a state")
        weight = self.out_proj.weight
        return cache.empty(
            batch_size,
            self.config.window,
            self.num_kv_heads,
            self.dim,
            device or weight.device,
            dtype or weight.dtype,
        )

    def forward(
        self,
        x: Tensor,
        state: SoftmaxState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, SoftmaxState | None]:
        """See ``Mixer.forward``.

        Raises:
            StateError: the cache is narrower than the new keys and would round them.
        """
        if state is not None:
            self.require_causal("a state")
        need_state = need_state and self.causal
        B, T = x.shape[:2]
        q = rearrange(self.q_proj(x), "b t (h k) -> b t h k", h=self.num_heads)
        k = rearrange(self.k_proj(x), "b t (g k) -> b t g k", g=self.num_kv_heads)
        v = rearrange(self.v_proj(x), "b t (g k) -> b t g k", g=self.num_kv_heads)
        if state is None:
            N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
            position = torch.zeros(N, device=x.device, dtype=torch.int64)
        else:
            position = state.position
            _check_dtype(state.k.dtype, k.dtype)
        place = cache.place_tokens(position, B, T, cu_seqlens)
        if self.config.rotary:
            q, k = rotate(q, k, place.position, self.config.rotary_base)
        # A ring loses tokens that the first new ones still read; one new token reads none of those.
        read_after = self.config.window is None or (T == 1 and cu_seqlens is None)
        after = None
        if need_state or (read_after and state is not None):
            after = self._extend(state, k, v, place, cu_seqlens)
        past = after if read_after and state is not None else state
        if cu_seqlens is None:
            o = self._attend(q, k, v, past, position, read_after)
        else:
            # Lengths of documents decide the shapes there. As a decorator this would import the
            # compiler, and with it Triton, wherever a model is imported.
            attend_packed = self._attend_packed
            if torch.compiler.is_compiling():
                attend_packed = torch.compiler.disable(attend_packed)  # pyright: ignore
            o = attend_packed(q, k, v, past, position, cu_seqlens)  # pyright: ignore
        y = self.out_proj(rearrange(o, "b t h k -> b t (h k)"))
        return y, after if need_state else None

    def _extend(
        self,
        state: SoftmaxState | None,
        k: Tensor,
        v: Tensor,
        place: cache.Place,
        cu_seqlens: Tensor | None,
    ) -> SoftmaxState:
        """The state with the new tokens."""
        full = self.config.window is None
        if full and state is None and cu_seqlens is None:
            return cache.start(k, v)
        if state is None:
            state = self.init_state(len(place.length), device=k.device, dtype=k.dtype)
        return (cache.append if full else cache.turn)(state, k, v, place)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: SoftmaxState | None,
        position: Tensor,
        holds_new: bool,
        length: Tensor | None = None,
    ) -> Tensor:
        """Rows [B, T, ...] after ``position`` [B] earlier tokens -> [B, T, H, K].

        Args:
            q, k, v: of the rows.
            past: what they read besides themselves.
            position: [B].
            holds_new: whether the new tokens stand in ``past`` already.
            length: [B] tokens of each row, the rest pads at its end; None is all.
        """
        if not self.causal:
            return attend_all(q, k, v, length)
        if past is None:
            return attend(q, k, v, self.config.window)
        if not holds_new:
            k_past, v_past = (cache.in_order(ring, position) for ring in (past.k, past.v))
            return attend_after_window(q, k, v, k_past, v_past, position)
        if past.filled is None:  # one token, and the order of a ring does not matter to it
            return attend_to_cache(q, past.k, past.v, position.clamp_max(past.k.shape[1] - 1))
        used = int(past.filled.max())
        return attend_to_cache(q, past.k[:, :used], past.v[:, :used], position)

    def _attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: SoftmaxState | None,
        position: Tensor,
        cu_seqlens: Tensor,
    ) -> Tensor:
        """Documents of a packed row, as rows of a few batches: [1, T, ...] -> [1, T, H, K]."""
        batches = batch_documents(cu_seqlens)
        outputs = []
        rows = zip(*(batches.split(x[0]) for x in (q, k, v)), batches.documents, strict=True)
        for q_n, k_n, v_n, documents in rows:
            before = None if past is None else select(past, documents)
            o = self._attend(
                q_n,
                k_n,
                v_n,
                before,
                position[documents],
                self.config.window is None,
                cu_seqlens.diff()[documents],
            )
            outputs.append(o)
        return batches.join(outputs).unsqueeze(0) if outputs else q


def _check_dtype(cached: torch.dtype, new: torch.dtype) -> None:
    if torch.promote_types(cached, new) != cached:
        raise StateError(
            f"state.k: got a cache in {cached} for keys in {new}, expected {new}; "
            "fix by going on in the precision that the state was made in"
        )
