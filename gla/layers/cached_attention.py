"""What attention over a cache of keys and values has in common, whatever a token reads of it.

Sizes: B batch, T tokens, D model width, H heads, G heads of keys and values, K dimension of a head,
N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from einops import rearrange
from torch import Tensor, nn

from gla.errors import StateError
from gla.layers import cache
from gla.layers.cache import SoftmaxState
from gla.layers.mixer import Mixer
from gla.layers.packing import batch_documents, outside_graph
from gla.state import select


class CachedAttention(Mixer[SoftmaxState]):
    """Base of softmax layers: a subclass makes queries, keys and values, and lets them meet.

    Attributes:
        num_kv_heads: G.
        dim: K.
        ring: slots of the state: the first ``pinned`` tokens and the last ``ring - pinned``; None
            keeps all.
        pinned: see ``ring``.
        out_proj: the last map.
    """

    num_kv_heads: int
    dim: int
    ring: int | None = None
    pinned: int = 0
    out_proj: nn.Linear

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
            self.ring,
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
        if state is None:
            N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
            position = torch.zeros(N, device=x.device, dtype=torch.int64)
        else:
            position = state.position
        place = cache.place_tokens(position, B, T, cu_seqlens)
        q, k, v = self._project(x, place.position)
        if state is not None:
            _check_dtype(state.k.dtype, k.dtype)
        # A ring loses tokens that the first new ones still read; one new token reads none of those.
        read_after = self.ring is None or (T == 1 and cu_seqlens is None)
        after = None
        if need_state or (state is not None and (read_after or self.pinned)):
            after = self._extend(state, k, v, place, cu_seqlens)
        past = after if read_after and state is not None else state
        if cu_seqlens is None:
            o = self._attend(q, k, v, past, after, position, read_after)
        else:
            attend_packed = outside_graph(self._attend_packed)
            o = attend_packed(q, k, v, past, after, position, cu_seqlens)
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
        if self.ring is None and state is None and cu_seqlens is None:
            return cache.start(k, v)
        if state is None:
            state = self.init_state(len(place.length), device=k.device, dtype=k.dtype)
        if self.ring is None:
            return cache.append(state, k, v, place)
        return cache.turn(state, k, v, place, self.pinned)

    @abstractmethod
    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D], position [B or 1, T] -> q [B, T, H, K], k and v [B, T, G, K]."""

    @abstractmethod
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
        """Rows [B, T, ...] after ``position`` [B] earlier tokens -> [B, T, H, K].

        Args:
            q, k, v: of the rows.
            past: what they read besides themselves.
            after: the state with them, where there is a past and pinned tokens.
            position: [B].
            holds_new: whether the new tokens stand in ``past`` already.
            length: [B] tokens of each row, the rest pads at its end; None is all.
        """

    def _attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: SoftmaxState | None,
        after: SoftmaxState | None,
        position: Tensor,
        cu_seqlens: Tensor,
    ) -> Tensor:
        """Documents of a packed row, as rows of a few batches: [1, T, ...] -> [1, T, H, K]."""
        batches = batch_documents(cu_seqlens)
        outputs = []
        rows = zip(*(batches.split(x[0]) for x in (q, k, v)), batches.documents, strict=True)
        for q_n, k_n, v_n, documents in rows:
            before = None if past is None else select(past, documents)
            end = None
            if before is not None and after is not None and self.pinned:
                end = select(after, documents)
            o = self._attend(
                q_n,
                k_n,
                v_n,
                before,
                end,
                position[documents],
                self.ring is None,
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
