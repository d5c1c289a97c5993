"""The encoder: every token reads its whole document. For masked tokens and for classes.

    h = embed(token) + scale ⊙ sinusoids(position)
    h = h + mixer(norm(h));  h = h + mlp(norm(h))          for each block
    logits of a masked token = norm(h) W^T;  logits of a class = W_c mean over tokens of norm(h) + b

Blocks and initialization are those of ``gla.models.backbone``. Mixers stand in their
bidirectional form, so positions are added to the embeddings (Vaswani et al. 2017, arXiv 1706.03762)
with a learned scale a channel: linear attention and Linformer's queries have none otherwise.

Sizes: B batch, T tokens, D model width, V vocabulary, C classes, N documents (N = B, or the number
of packed documents).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from gla.errors import ConfigError
from gla.layers.linear import INIT_STD, Linear
from gla.layers.linformer import Linformer
from gla.layers.mixer import Mixer, mixer_fields
from gla.layers.packing import document_of_token
from gla.models.backbone import Backbone, Block
from gla.models.config import ModelConfig
from gla.models.inputs import check_inputs
from gla.models.loss import linear_cross_entropy

IGNORE = -100

_WAVELENGTHS = 10_000.0


class EncoderConfig(ModelConfig):
    """As ``ModelConfig``, in both directions: ``causal = false`` is filled in where a mixer has it.

    So a preset's name in ``layers`` gives its bidirectional form: softmax, longformer, linear,
    linformer, nystrom. A mixer that is causal only is refused.

    Attributes:
        classes: names of the classes that documents are sorted into; none, no head for them.
    """

    classes: list[str] = []  # noqa: RUF012 - pydantic copies it

    @model_validator(mode="before")
    @classmethod
    def _fill_in_presets(cls, data: Any) -> Any:
        data = ModelConfig.fill_in_presets(data)
        mixers = data.get("mixers") if isinstance(data, Mapping) else None
        if not isinstance(mixers, Mapping):
            return data
        filled = {
            name: {**table, "causal": False}
            if isinstance(table, Mapping)
            and "causal" not in table
            and "causal" in mixer_fields(table.get("kind"))
            else table
            for name, table in mixers.items()
        }
        return {**data, "mixers": filled}


class Encoder(Backbone):
    """An encoder, for masked tokens and, if the config names ``classes``, for these.

    Args:
        config: see ``EncoderConfig``.

    Raises:
        ConfigError: a mixer is causal, or cannot do what its table asks.
    """

    config: EncoderConfig
    config_class = EncoderConfig
    encoder = True

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.position_scale = nn.Parameter(torch.empty(config.d_model))
        self.class_head = None
        if config.classes:
            self.class_head = Linear(config.d_model, len(config.classes), bias=True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again; positions start at the size of the embeddings."""
        # Here, not in __init__: memory given to a model on "meta" makes one tensor of each name.
        mixers = [cast(Block, block).mixer for block in self.blocks]
        _share_projections(self.config.layer_names, mixers)
        super().reset_parameters()
        nn.init.constant_(self.position_scale, INIT_STD * 2**0.5)

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last norm.

        Args:
            tokens: [B, T] int64.
            cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1).
            mask: [B, T] bool, True at real tokens. Pads may stand anywhere and change nothing: the
                real tokens of the rows become a pack.

        Returns:
            [B, T, D], 0 at pads.

        Raises:
            ValueError: shapes that do not fit; the message names the tensor.
        """
        check_inputs(len(self.blocks), tokens, None, cu_seqlens, mask)
        if mask is None:
            return self._hidden(tokens, cu_seqlens)
        packed = self._hidden(tokens[mask].unsqueeze(0), _offsets(mask)).squeeze(0)
        h = packed.new_zeros(*tokens.shape, packed.shape[-1])
        return h.masked_scatter(mask.unsqueeze(-1), packed)

    def class_logits(
        self, tokens: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Logits [N, C] of each document's class, from the mean over its real tokens.

        Arguments as for ``forward``.

        Raises:
            ConfigError: the config names no classes.
        """
        if self.class_head is None:
            raise ConfigError("classes: got none, expected the names of the classes; fix classes")
        check_inputs(len(self.blocks), tokens, None, cu_seqlens, mask)
        if mask is not None:
            tokens, cu_seqlens = tokens[mask].unsqueeze(0), _offsets(mask)
        h = self._hidden(tokens, cu_seqlens)
        h = h.to(torch.promote_types(h.dtype, torch.float32))
        if cu_seqlens is None:
            mean = h.mean(1)
        else:
            document = document_of_token(cu_seqlens, h.shape[1])
            total = h.new_zeros(len(cu_seqlens) - 1, h.shape[2]).index_add(0, document, h[0])
            mean = total / cu_seqlens.diff().clamp_min(1).unsqueeze(1)
        return self.class_head(mean.to(self.class_head.weight.dtype))

    def class_loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Cross entropy in nats of the documents' classes, labels [N] int64; a scalar.

        Raises:
            ValueError: labels that are not [N] int64 or (on a CPU) not those of the classes.
        """
        logits = self.class_logits(tokens, cu_seqlens, mask)
        N, C = logits.shape
        expected = f"[{N}] int64 from 0 to {C - 1}; fix labels"
        if labels.shape != (N,) or labels.dtype != torch.int64:
            raise ValueError(
                f"labels: got {list(labels.shape)} {labels.dtype}, expected {expected}"
            )
        wide = torch.promote_types(logits.dtype, torch.float32)
        try:
            return F.cross_entropy(logits.to(wide), labels, reduction=reduction)
        except IndexError:
            raise ValueError(f"labels: got {labels.tolist()}, expected {expected}") from None

    def masked_loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Cross entropy in nats of the tokens behind the mask (Devlin et al. 2018, 1810.04805).

        Args:
            tokens: [B, T] int64, some of them masked or replaced.
            targets: [B, T] int64, what stood there, and -100 where nothing is asked.
            cu_seqlens, mask: as for ``forward``.
            reduction: "mean" over the targets asked for (0 if there are none), or their "sum".

        Returns:
            A scalar, fp32 or wider. Logits are made where a target is asked for, and nowhere else.
        """
        if targets.shape != tokens.shape:
            raise ValueError(
                f"targets: got shape {list(targets.shape)}, expected that of tokens, "
                f"{list(tokens.shape)}; fix targets"
            )
        asked = targets != IGNORE
        h = self(tokens, cu_seqlens, mask)[asked]
        total = linear_cross_entropy(h, self._head_weight, targets[asked], IGNORE)
        return total if reduction == "sum" else total / asked.sum().clamp_min(1)

    def _hidden(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        if cu_seqlens is not None:
            position = position - cu_seqlens[document_of_token(cu_seqlens, tokens.shape[1])]
        h = self._embed(tokens)
        h = h + sinusoids(position, h.shape[-1]).to(h.dtype) * self.position_scale
        for block in self.blocks:
            h, _ = block(h, None, cu_seqlens, False)
        return self.norm(h)


def sinusoids(position: Tensor, dim: int) -> Tensor:
    """Sines and cosines of wavelengths from 2 pi to 2 pi * 10,000 tokens: [T] -> [T, dim] fp32."""
    half = (dim + 1) // 2
    exponent = torch.arange(half, device=position.device, dtype=torch.float32) / half
    angle = position.to(torch.float32).unsqueeze(1) * _WAVELENGTHS**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim]


def _share_projections(names: list[str], mixers: list[Mixer]) -> None:
    """Let the Linformer layers of one name share E where their table says so."""
    first: dict[str, Linformer] = {}
    for name, mixer in zip(names, mixers, strict=True):
        if isinstance(mixer, Linformer) and mixer.config.sharing == "layers":
            mixer.share(first.setdefault(name, mixer))


def _offsets(mask: Tensor) -> Tensor:
    return F.pad(mask.sum(1).cumsum(0), (1, 0))
