"""What language models and encoders share: embedding, blocks of a mixer and an MLP, norm, head.

Initialization: linear maps and embeddings N(0, 0.02^2), biases 0, norms 1; the last maps of a
block, ``mixer.out_proj`` and ``mlp.down_proj``, divided by sqrt(2 * number of blocks), as in GPT-2
(Radford et al. 2019), so that the residual stream starts at a size that does not grow with depth.

Sizes: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from gla.errors import ConfigError
from gla.layers.feed_forward import SwiGLU
from gla.layers.linear import INIT_STD, Linear, linear
from gla.layers.mixer import Mixer, build_mixer
from gla.layers.norms import RMSNorm
from gla.models.config import ModelConfig
from gla.models.weights import find_checkpoint, load_weights, recipe_of
from gla.state import LayerState


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.residual_scale = (2 * len(config.layer_names)) ** -0.5
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = mixer
        self.mlp_norm = self.mlp = None
        if config.mlp_hidden:
            self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
            self.mlp = SwiGLU(config.d_model, config.mlp_hidden)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Scale down the freshly drawn last maps of the mixer and of the feed-forward layer."""
        for last in (getattr(self.mixer, "out_proj", None), getattr(self.mlp, "down_proj", None)):
            if isinstance(last, nn.Linear):
                last.weight *= self.residual_scale

    def forward(
        self,
        h: Tensor,
        state: LayerState | None,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, LayerState | None]:
        """h [B, T, D] -> h [B, T, D], state of the mixer."""
        y, state = self.mixer(
            self.mixer_norm(h), state, cu_seqlens=cu_seqlens, need_state=need_state
        )
        return self._feed_forward(h + y), state

    def _feed_forward(self, h: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return h
        return h + self.mlp(self.mlp_norm(h))

    def step(self, h: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """One token: h [B, D] -> h [B, D], next state."""
        y, state = self.mixer.step(self.mixer_norm(h), state)
        return self._feed_forward(h + y), state


class Backbone(nn.Module):
    """A model without its ``forward``. A subclass draws the parameters when it has its own.

    Args:
        config: see ``ModelConfig``.

    Raises:
        ConfigError: a mixer cannot do what its table asks, for example heads that do not divide, or
            reads in the other direction.
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    encoder: ClassVar[bool] = False  # whether its mixers read whole documents

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(
            Block(config, self._build(config, layer)) for layer in range(len(config.layer_names))
        )
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None
        if not config.tie_embeddings:
            self.head = Linear(config.d_model, config.vocab_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, for example after ``to_empty`` of a model on "meta"."""
        for module in reversed(list(self.modules())):  # parts first: a block rescales its parts
            reset = getattr(module, "reset_parameters", None)
            if reset is not None and module is not self:
                reset()
        nn.init.normal_(self.embed.weight, std=INIT_STD)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        *,
        impl: str | None = None,
        allow_nonfinite: bool = False,
    ) -> Self:
        """Load the newest checkpoint of a run that verifies, or one checkpoint.

        Where a run keeps a running average of the weights, that is what is loaded.

        Args:
            path: a run folder, or a checkpoint folder inside one.
            device: where the model goes.
            impl: form of the op in every mixer on it; None: as trained.
            allow_nonfinite: load weights that are NaN or infinite.

        Raises:
            CheckpointError: none verifies, or it belongs to another model.
            ConfigError: no such device here, config.toml of the checkpoint or the run is missing or
                not valid, or nothing here runs its ``impl``.
            NumericsError: a weight is NaN or infinite, and that is not allowed.
        """
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as reason:
            raise ConfigError(
                f"device: got {str(device)!r}, expected a device of this machine, as cpu, cuda, "
                "cuda:N or mps; fix device"
            ) from reason
        checkpoint = find_checkpoint(Path(path))
        config = cls.config_class.from_toml(recipe_of(checkpoint, encoder=cls.encoder))
        with torch.random.fork_rng(devices=[]):  # loading draws no number that the caller misses
            model = cls(config if impl is None else config.with_impl(impl))
        load_weights(model, checkpoint, allow_nonfinite=allow_nonfinite)
        return model.to(device).eval()

    def num_parameters(self) -> int:
        """Number of weights; a tied head or a shared projection counts once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def _head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def _embed(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> [..., D]."""
        try:
            return self.embed(tokens)
        except IndexError:  # on a CPU; looking before would cost time, and a wait on a GPU
            raise ValueError(
                f"tokens: got ids from {int(tokens.min())} to {int(tokens.max())}, expected 0 to "
                f"{self.config.vocab_size - 1}; fix by using the tokenizer of this model"
            ) from None

    def logits(self, h: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], such as ``features`` returns."""
        return linear(h, self.embed.weight) if self.head is None else self.head(h)

    def _build(self, config: ModelConfig, layer: int) -> Mixer:
        name = config.layer_names[layer]
        try:
            mixer = build_mixer(config.d_model, config.mixers[name])
        except ConfigError as error:
            raise ConfigError(f"mixers.{name}.{error}") from None
        if self.encoder and mixer.causal:
            raise ConfigError(
                f"mixers.{name}: got a causal mixer, expected one that reads whole documents in an "
                "encoder; fix with causal = false where the mixer has it, or one of softmax, "
                "longformer, linear, linformer, nystrom"
            )
        if not self.encoder and not mixer.causal:
            raise ConfigError(
                f"mixers.{name}: got a mixer that reads later tokens, expected a causal one in a "
                "language model; fix with causal = true where the mixer has it, or use an encoder"
            )
        mixer.set_depth(layer, len(config.layer_names))
        return mixer
