"""Linformer attention (Wang et al. 2020, arXiv 2006.04768), bidirectional.

    K' = E K,  V' = F V,  o = softmax(Q K'^T / sqrt(K)) V'          E, F [k, n]

A query reads k slots in place of n tokens. A slot is a weighted sum over all positions, so this has
no causal form (masking slots hides no token) and no decoding. E and F belong to absolute positions
up to ``n_max``: a shorter document takes their first columns, a longer one is refused. Cost O(n k)
a head; parameters k n_max for each of E and F.

Sizes: B batch, T tokens, D model width, H heads, K dimension of a head, k slots, n documents of a
batch, L their padded length, M projections of a mixture.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from gla.errors import ConfigError
from gla.layers.linear import Linear
from gla.layers.mixer import MixerConfig
from gla.layers.whole_document import WholeDocumentMixer, real_tokens, refuse_causal

Count = Annotated[int, Field(ge=1)]

_N_MAX = 512


class LinformerConfig(MixerConfig):
    """Options of ``Linformer``. A k of its own for each layer: one table for each, in ``layers``.

    Attributes:
        kind: "linformer".
        num_heads: H; None is max(1, d_model // 64).
        k: slots.
        n_max: longest document in tokens; None is 512, and no limit with projection = "input".
        sharing: "none": E and F for each head; "heads": one E and one F; "key_value": E = F for
            keys, values and all heads; "layers": that, and the same in all layers of this name.
        init: "normal" is N(0, 1/n), "xavier" N(0, 2/(n + k)).
        frozen: E and F stay as drawn, a random projection.
        projection: "fixed": as above; "mixture": ``experts`` of them, mixed by the length of the
            document; "input": softmax over the document's tokens of x W, for keys and values alike
            (Zhu et al. 2021, arXiv 2107.02192).
        experts: M of a mixture. They are made for n_max, n_max / 2, n_max / 4, … tokens; the
            lengths are learned.
        causal: only false.
    """

    kind: Literal["linformer"] = "linformer"
    num_heads: Count | None = None
    k: Count = 128
    n_max: Count | None = None
    sharing: Literal["none", "heads", "key_value", "layers"] = "heads"
    init: Literal["normal", "xavier"] = "normal"
    frozen: bool = False
    projection: Literal["fixed", "input", "mixture"] = "fixed"
    experts: Count | None = None
    causal: bool = False

    @property
    def longest(self) -> int | None:
        """Tokens of the longest document that a layer takes; None where there is no limit."""
        return None if self.projection == "input" else self.n_max or _N_MAX

    @model_validator(mode="after")
    def _fits(self) -> LinformerConfig:
        by_input, by_length = self.projection == "input", self.projection == "mixture"
        if by_input and self.n_max is not None:
            raise ConfigError(
                f'n_max: got {self.n_max} with projection = "input", which has no limit, expected '
                "none; fix by leaving n_max out"
            )
        if by_length != (self.experts is not None):
            wanted = "their number" if by_length else 'none without projection = "mixture"'
            raise ConfigError(f"experts: got {self.experts}, expected {wanted}; fix experts")
        if by_input and (self.sharing not in ("none", "key_value") or self.frozen):
            what, got = ("frozen", True) if self.frozen else ("sharing", repr(self.sharing))
            wanted = "false" if self.frozen else "'none' (a W for each head) or 'key_value'"
            raise ConfigError(
                f'{what}: got {got} with projection = "input", expected {wanted}; fix {what}'
            )
        return self


class Linformer(WholeDocumentMixer):
    """The layer.

    Attributes:
        E: [k, n_max], with H in front when nothing is shared, with M in front of all in a mixture;
            None if projections depend on the input.
        F: the same for values; None where E serves both.
    """

    def __init__(self, d_model: int, config: LinformerConfig) -> None:
        refuse_causal(
            config.causal,
            "each of the k slots sums over all positions, so every output sees later tokens, and "
            "masking slots does not undo that",
            'kind = "linformer_causal"',
        )
        super().__init__(d_model, config.num_heads)
        self.config = config
        self.n_max = config.n_max or _N_MAX
        self.slot_proj: Linear | None = None
        self.centers: nn.Parameter | None = None
        self.E: nn.Parameter | None = None
        self.F: nn.Parameter | None = None
        if config.projection == "input":
            heads = self.num_heads if config.sharing == "none" else 1
            self.slot_proj = Linear(d_model, heads * config.k)
            return
        shape = [config.k, self.n_max]
        if config.sharing == "none":
            shape.insert(0, self.num_heads)
        if config.experts is not None:
            shape.insert(0, config.experts)
            self.centers = nn.Parameter(torch.empty(config.experts))
        self.E = nn.Parameter(torch.empty(shape), requires_grad=not config.frozen)
        if config.sharing in ("none", "heads"):
            self.F = nn.Parameter(torch.empty(shape), requires_grad=not config.frozen)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw E and F, and place the lengths that a mixture is made for."""
        lengths = [max(1.0, self.n_max / 2**m) for m in range(self.config.experts or 1)]
        if self.centers is not None:
            self.centers.copy_(torch.tensor(lengths).log2())
        for projection in (self.E, self.F):
            if projection is None:
                continue
            experts = projection if self.centers is not None else projection.unsqueeze(0)
            for expert, n in zip(experts, lengths, strict=True):
                variance = 1 / n if self.config.init == "normal" else 2 / (n + self.config.k)
                expert.normal_(std=math.sqrt(variance))

    def share(self, first: Linformer) -> None:
        """Use the projections of another layer that was built from the same table."""
        self.E, self.centers = first.E, first.centers

    def per_token(self, x: Tensor) -> tuple[Tensor, ...]:
        """Scores [B, T, 1 or H, k] of the tokens for the slots, where these depend on the input."""
        if self.slot_proj is None:
            return ()
        return (rearrange(self.slot_proj(x), "b t (h k) -> b t h k", k=self.config.k),)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, length: Tensor | None, *extra: Tensor
    ) -> Tensor:
        """See ``WholeDocumentMixer.attend``.

        Raises:
            ValueError: a document longer than n_max.
        """
        real = real_tokens(length, q.shape[1])
        pads = None if real is None else ~real[..., None, None]
        if pads is not None:
            k, v = k.masked_fill(pads, 0), v.masked_fill(pads, 0)
        if extra:
            scores = extra[0].to(torch.promote_types(q.dtype, torch.float32))
            if pads is not None:
                scores = scores.masked_fill(pads, -math.inf)
            E = F_ = rearrange(scores.softmax(1), "n l h k -> n h k l")
        else:
            assert self.E is not None
            E = self._columns(self.E, length, q.shape[1])
            F_ = E if self.F is None else self._columns(self.F, length, q.shape[1])
        k, v = (self._project(e.to(x.dtype), x) for e, x in ((E, k), (F_, v)))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)

    def _project(self, E: Tensor, x: Tensor) -> Tensor:
        """E [1 or n, 1 or H, k, L] times x [n, L, H, K] -> slots [n, H, k, K]."""
        return E @ x.transpose(1, 2)

    def _columns(self, E: Tensor, length: Tensor | None, tokens: int) -> Tensor:
        """E -> [1 or n, 1 or H, k, L]: its first columns, mixed by the lengths of the rows."""
        if tokens > self.n_max:
            raise ValueError(
                f"tokens: got a document of {tokens}, expected at most n_max = {self.n_max}; fix "
                "by cutting it, or n_max of the mixer (E and F belong to absolute positions)"
            )
        E = E[..., :tokens]
        if self.centers is None:
            return E.reshape(1, -1, *E.shape[-2:])
        wide = torch.promote_types(E.dtype, torch.float32)
        n = torch.full((1,), tokens, device=E.device) if length is None else length
        octaves = n.to(wide).log2().unsqueeze(1) - self.centers.to(wide)
        weights = (-octaves.square()).softmax(-1).to(E.dtype)
        mixed = torch.einsum("nm,m...->n...", weights, E)
        return mixed if mixed.dim() == 4 else mixed.unsqueeze(1)
