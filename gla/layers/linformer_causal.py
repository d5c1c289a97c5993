"""Block-causal Linformer: k slots for finished blocks, exact attention to recent tokens.

Linformer's slots sum over all positions and have no causal form. This one cuts the document into
blocks of c tokens. Block b has keys K_b and values V_b [c, K]. What has left the current and the
previous block is in k slots, with weights by position within the block, E = exp(log_E) > 0:

    M_b = γ ⊙ M_{b-1} + E K_b,  n_b = γ ⊙ n_{b-1} + E 1,  K'_b = M_b / n_b       (V' likewise)

A token of block b reads the slots K'_{b-2}, V'_{b-2} and the tokens of blocks b - 1 and b up to
itself, all in one softmax; every earlier token is read once, exactly or through the slots. γ in
(0, 1) is learned for each slot. Rotary positions, relative ones, turn the recent keys; slots have
none. Cost O(T (k + 2 c)) a head; the state, 2 K (k + 2 c) + k numbers a head, does not grow.

Slots over finished blocks: Wang et al. 2020, arXiv 2006.04768, and Zhu et al. 2021, arXiv
2107.02192; one softmax over slots and a window, with decays: arXiv 2510.07019.

Sizes: B batch, T tokens, D model width, H heads, G heads of keys and values, K dimension of a head,
k slots, c tokens of a block, N sequences, J blocks of the longest row, counted from the one before
that in which the first new token falls.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from gla.errors import ConfigError
from gla.layers import cache
from gla.layers.cache import SoftmaxState
from gla.layers.linear import Linear, WideModule
from gla.layers.linear_attention import check_groups, head_dim
from gla.layers.mixer import Mixer, MixerConfig
from gla.layers.packing import batch_documents, outside_graph
from gla.layers.rotary import rotate
from gla.state import select

Count = Annotated[int, Field(ge=1)]

_ROTARY_BASE = 10_000.0
_LONGEST_HALF_LIFE = 1024.0  # blocks


class LinformerCausalConfig(MixerConfig):
    """Options of ``LinformerCausal``.

    Attributes:
        kind: "linformer_causal".
        num_heads: H; None is max(1, d_model // 64).
        num_kv_heads: G, heads of keys, values and slots, each shared by H / G heads; None is H.
        k: slots.
        block: c, tokens of a block.
        rotary: whether recent tokens have rotary positions.
    """

    kind: Literal["linformer_causal"] = "linformer_causal"
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    k: Count = 64
    block: Count = 64
    rotary: bool = True


class Slots(NamedTuple):
    """What finished blocks left; all in fp32 or wider.

    Attributes:
        keys: [N, k, G, K] weighted sum of keys, M.
        values: [N, k, G, K] the same of values.
        mass: [N, k, G] sum of the weights, n.
    """

    keys: Tensor
    values: Tensor
    mass: Tensor


class LinformerCausalState(NamedTuple):
    """State of the layer after p tokens.

    Attributes:
        slots: of all blocks before the previous one, block p // c - 1.
        recent: ring of the last 2 c keys, before the rotary embedding, and values.
    """

    slots: Slots
    recent: SoftmaxState


class BlockSlots(WideModule):
    """The weights of a block's tokens in the slots, and the slots' decay.

    Attributes:
        log_E: [G, k, c], starts as N(0, 1).
        decay_logits: [G, k], γ = sigmoid of it; half-lives start at 1 to 1,024 blocks.
    """

    def __init__(self, num_heads: int, k: int, block: int) -> None:
        super().__init__()
        self.log_E = nn.Parameter(torch.empty(num_heads, k, block))
        self.decay_logits = nn.Parameter(torch.empty(num_heads, k))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights, spread the half-lives."""
        self.log_E.normal_()
        k = self.decay_logits.shape[1]
        half_life = _LONGEST_HALF_LIFE ** (torch.arange(k) / max(1, k - 1))
        self.decay_logits.copy_(torch.logit(2 ** (-1 / half_life.double())))

    def forward(self, slots: Slots, keys: Tensor, values: Tensor, exists: Tensor) -> Slots:
        """Take in blocks one after another.

        Args:
            slots: [N, k, G, K] before them.
            keys, values: [N, J, c, G, K], 0 in a block that does not exist.
            exists: [N, J] bool.

        Returns:
            Slots [N, J + 1, k, G, K]: before them, after the first, and so on.
        """
        wide = slots.keys.dtype
        E = self.log_E.to(wide).exp()
        decay = self.decay_logits.to(wide).sigmoid().T
        with torch.autocast(keys.device.type, enabled=False):
            sums = [torch.einsum("gkc,njcgd->njkgd", E, x.to(wide)) for x in (keys, values)]
        masses = E.sum(-1).T * exists.to(wide)[..., None, None]
        history = [slots]
        for add_k, add_v, add in zip(
            sums[0].unbind(1), sums[1].unbind(1), masses.unbind(1), strict=True
        ):
            last = history[-1]
            history.append(
                Slots(
                    torch.addcmul(add_k, decay.unsqueeze(-1), last.keys),
                    torch.addcmul(add_v, decay.unsqueeze(-1), last.values),
                    torch.addcmul(add, decay, last.mass),
                )
            )
        return Slots(*(torch.stack(parts, dim=1) for parts in zip(*history, strict=True)))


class LinformerCausal(Mixer[LinformerCausalState]):
    """The layer."""

    step_is_one_graph = False  # more is done where a block ends

    def __init__(self, d_model: int, config: LinformerCausalConfig) -> None:
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
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, self.num_kv_heads * self.dim)
        self.v_proj = Linear(d_model, self.num_kv_heads * self.dim)
        self.slots = BlockSlots(self.num_kv_heads, config.k, config.block)
        self.out_proj = Linear(d_model, d_model)

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinformerCausalState:
        """Zeros in fp32, or fp64 for fp64 activations."""
        weight = self.out_proj.weight
        device = device or weight.device
        wide = torch.promote_types(dtype or weight.dtype, torch.float32)
        shape = (batch_size, self.config.k, self.num_kv_heads, self.dim)
        keys = torch.zeros(shape, device=device, dtype=wide)
        slots = Slots(keys, torch.zeros_like(keys), keys.new_zeros(shape[:3]))
        ring = cache.empty(batch_size, 2 * self.config.block, *shape[2:], device, wide)
        return LinformerCausalState(slots, ring)

    def forward(
        self,
        x: Tensor,
        state: LinformerCausalState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, LinformerCausalState | None]:
        """See ``Mixer.forward``."""
        B, T = x.shape[:2]
        q = rearrange(self.q_proj(x), "b t (h k) -> b t h k", h=self.num_heads)
        k = rearrange(self.k_proj(x), "b t (g k) -> b t g k", g=self.num_kv_heads)
        v = rearrange(self.v_proj(x), "b t (g k) -> b t g k", g=self.num_kv_heads)
        cold = state is None
        if state is None:
            N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
            state = self.init_state(N, device=x.device, dtype=x.dtype)
        place = cache.place_tokens(state.recent.position, B, T, cu_seqlens)
        recent = cache.turn(state.recent, k, v, place)
        if T == 0:
            o, slots = q, state.slots
        elif cu_seqlens is not None:
            o, slots = outside_graph(self._packed)(q, k, v, state, cu_seqlens, cold)
        elif T == 1:
            o, slots = self._one(q, state, recent)
        else:
            o, slots = self._rows(q, k, v, state, place.length, cold)
        y = self.out_proj(rearrange(o, "b t h k -> b t (h k)"))
        return y, LinformerCausalState(slots, recent) if need_state else None

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinformerCausalState,
        cu_seqlens: Tensor,
        cold: bool,
    ) -> tuple[Tensor, Slots]:
        """Documents of a packed row as rows of a few batches: q [1, T, H, K] -> o, slots."""
        batches, slots = batch_documents(cu_seqlens), state.slots
        length, outputs = cu_seqlens.diff().long(), []
        rows = zip(*(batches.split(x[0]) for x in (q, k, v)), batches.documents, strict=True)
        for q_n, k_n, v_n, documents in rows:
            before = select(state, documents)
            o, after = self._rows(q_n, k_n, v_n, before, length[documents], cold)
            pairs = zip(slots, after, strict=True)
            slots = Slots(*(old.index_copy(0, documents, new) for old, new in pairs))
            outputs.append(o)
        return batches.join(outputs).unsqueeze(0), slots

    def _rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinformerCausalState,
        length: Tensor,
        cold: bool,
    ) -> tuple[Tensor, Slots]:
        """Rows that go on from a state, pads behind.

        Args:
            q: [N, T, H, K]; k, v [N, T, G, K].
            state: of N sequences.
            length: [N] int64, real tokens of each row.
            cold: whether the sequences have read nothing, known without a look at the state.

        Returns:
            o [N, T, H, K], slots after the last real token.
        """
        (N, T), c, device = q.shape[:2], self.config.block, q.device
        before = state.recent.position
        filled = before.remainder(c)  # tokens of the current block that are there already
        J = 1 + (T + (0 if cold else c - 1) + c - 1) // c
        # The row on a grid of blocks: what the ring still holds of two blocks, then the new tokens.
        first = before - filled - c
        place = first.unsqueeze(1) + torch.arange(J * c, device=device)
        new = place - before.unsqueeze(1)
        index = torch.where(new < 0, place.remainder(2 * c), 2 * c + new.clamp_max(T - 1))
        there = ((place >= 0) & (new < length.unsqueeze(1)))[..., None, None]
        keys, values = (
            _take(torch.cat([ring.to(x.dtype), x], dim=1), index).where(there, 0)
            for ring, x in ((state.recent.k, k), (state.recent.v, v))
        )
        keys, values = (x.unflatten(1, (J, c)) for x in (keys, values))
        index = torch.arange((J - 1) * c, device=device) - filled.unsqueeze(1)
        queries = _take(q, index.clamp(0, T - 1)).unflatten(1, (J - 1, c))
        # Before a sequence's first block there is none to take in.
        exists = (first >= 0).unsqueeze(1) | (torch.arange(J - 1, device=device) > 0)
        slots = self.slots(state.slots, keys[:, :-1], values[:, :-1], exists)
        block = first.unsqueeze(1) // c + torch.arange(1, J, device=device)  # number of each block
        o = self._attend(queries, keys, values, Slots(*(x[:, : J - 1] for x in slots)), block)
        o = o.flatten(1, 2)
        o = _take(o, filled.unsqueeze(1) + torch.arange(T, device=device))
        gone = (before + length) // c - before // c  # blocks that have left the window by the end
        row = torch.arange(N, device=device)
        return o, Slots(*(x[row, gone] for x in slots))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, slots: Slots, block: Tensor) -> Tensor:
        """Attention of blocks 1 to J - 1 of each row.

        Args:
            q: [N, J-1, c, H, K]; k, v [N, J, c, G, K].
            slots: [N, J-1, k, G, K], as each block reads them.
            block: [N, J-1] the number of the block in its sequence.

        Returns:
            [N, J-1, c, H, K].
        """
        N, J, c = k.shape[:3]
        slot_k, slot_v = self._means(slots, v.dtype)
        t = torch.arange(c, device=q.device)
        pair_k = torch.cat([k[:, :-1], k[:, 1:]], dim=2)
        pair_v = torch.cat([v[:, :-1], v[:, 1:]], dim=2)
        q, pair_k, pair_v, slot_k, slot_v = (
            x.flatten(0, 1) for x in (q, pair_k, pair_v, slot_k, slot_v)
        )
        block = block.view(-1, 1, 1)
        mask = torch.cat(
            [
                (block >= 2).expand(-1, c, self.config.k),
                (block >= 1).expand(-1, c, c),
                (t <= t.unsqueeze(1)).expand(len(block), c, c),
            ],
            dim=-1,
        )
        pair = torch.arange(2 * c, device=q.device).unsqueeze(0)
        o = self._softmax(q, pair_k, pair_v, slot_k, slot_v, pair[:, c:], pair, mask)
        return o.unflatten(0, (N, J - 1))

    def _one(
        self, q: Tensor, state: LinformerCausalState, recent: SoftmaxState
    ) -> tuple[Tensor, Slots]:
        """One token a row: q [N, 1, H, K], the ring with the token in it -> o, slots."""
        c, slots = self.config.block, state.slots
        last = state.recent.position.unsqueeze(1)  # place of the token
        block = last // c
        # Place in its sequence of what each slot of the ring holds, and in the pair of blocks.
        place = last - (last - torch.arange(2 * c, device=q.device)).remainder(2 * c)
        pair = place - (block - 1) * c
        reads_slots = (block >= 2).expand(-1, self.config.k)
        mask = torch.cat([reads_slots, (place >= 0) & (pair >= 0)], dim=1).unsqueeze(1)
        slot_k, slot_v = self._means(slots, q.dtype)
        keys, values = recent.k.to(q.dtype), recent.v.to(q.dtype)
        o = self._softmax(q, keys, values, slot_k, slot_v, last - (block - 1) * c, pair, mask)
        ends = recent.position.remainder(c) == 0
        if bool(ends.any()):  # the block before the finished one leaves the window
            half = (block - 1).remainder(2) * c + torch.arange(c, device=q.device)
            keys, values = (_take(ring, half).unsqueeze(1) for ring in (recent.k, recent.v))
            after = self.slots(slots, keys, values, torch.ones_like(block, dtype=torch.bool))
            slots = _choose(ends & (block[:, 0] >= 1), Slots(*(x[:, 1] for x in after)), slots)
        return o, slots

    def _means(self, slots: Slots, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K' and V' in the dtype of the activations; 0 where no block was taken in yet."""
        mass = slots.mass.where(slots.mass > 0, 1).unsqueeze(-1)
        return (slots.keys / mass).to(dtype), (slots.values / mass).to(dtype)

    def _softmax(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slot_k: Tensor,
        slot_v: Tensor,
        query: Tensor,
        key: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """One softmax over slots and recent tokens.

        Args:
            q: [n, t, H, K]; k, v [n, s, G, K] recent; slot_k, slot_v [n, k, G, K].
            query, key: [n or 1, t], [n or 1, s] int64 positions within the pair of blocks.
            mask: [n, t, k + s] bool, True where a query reads.

        Returns:
            [n, t, H, K].
        """
        scale = self.dim**-0.5
        if self.config.rotary:
            # A slot meets the query as it is, a recent key the turned one: side by side they are
            # one product.
            turned, _ = rotate(q, q[:, :, :0], query, _ROTARY_BASE)
            k, _ = rotate(k, k[:, :, :0], key, _ROTARY_BASE)
            q = torch.cat([q, turned], dim=-1)
            slot_k = F.pad(slot_k, (0, self.dim))
            k = F.pad(k, (self.dim, 0))
        keys = torch.cat([slot_k, k], dim=1).transpose(1, 2)
        values = torch.cat([slot_v, v], dim=1).transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=mask.unsqueeze(1),
            scale=scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return o.transpose(1, 2)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [N, L, ...], index [N, M] -> [N, M, ...]."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def _choose(rows: Tensor, these: Slots, those: Slots) -> Slots:
    """[N] bool -> ``these`` in the rows where it is true, ``those`` elsewhere."""
    wide = rows.view(-1, 1, 1, 1)
    keys = torch.where(wide, these.keys, those.keys)
    values = torch.where(wide, these.values, those.values)
    return Slots(keys, values, torch.where(wide[..., 0], these.mass, those.mass))
