"""The protocol of token mixers, and the table of those that a recipe may name.

Sizes: B batch, T tokens, D model width, N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from gla.errors import ConfigError, StateError
from gla.state import State
from gla.tables import describe_faults, nearest


class MixerConfig(BaseModel):
    """Base of a mixer's options: exact types, no unknown key, never changed once built.

    A subclass adds ``kind: Literal["its name"] = "its name"`` and its own keys.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Mixer(nn.Module, ABC, Generic[State]):
    """A map over tokens with a state: the part of a block that looks at other tokens.

    A subclass is built as ``Layer(d_model, config)`` and raises ConfigError there if it cannot do
    what the config asks. It gives ``forward`` and ``init_state``. Rules that the model relies on:

    - A later token never changes an earlier output, and documents of a pack never meet.
    - Splitting a sequence anywhere and passing the state on changes nothing beyond rounding.
    - The state passed in is left as it was.

    A mixer with ``causal = False`` lets every token read its whole document, and of these rules
    only one holds for it: documents of a pack never meet. It has no state: ``forward`` returns
    None for it, and refuses one that is given; it stands in encoders only.

    A last map that is an ``nn.Linear`` named ``out_proj`` is scaled down with the depth of the
    model at initialization; see ``gla.models.language_model``. Modules that set
    ``no_weight_decay = True`` are not decayed by the optimizer.

    Attributes:
        causal: whether no token reads a later one; of the class, or set by ``__init__``.
        step_is_one_graph: whether ``step`` does the same at every position, so that it can be
            compiled as a whole.
    """

    causal: bool = True
    step_is_one_graph: bool = True

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, State | None]:
        """Mix T tokens.

        Args:
            x: [B, T, D].
            state: state of N sequences to go on from; None starts afresh.
            cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1).
            need_state: False lets the mixer skip the final state and return None for it.

        Returns:
            y [B, T, D], and the state after the last token of each sequence.

        Raises:
            StateError: a state for a mixer that is not causal.
        """

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """State of sequences that have read nothing.

        Args:
            batch_size: N.
            device: of the state; that of the layer if None.
            dtype: of the activations; that of the layer if None.

        Raises:
            StateError: the mixer is not causal, or does not say what its state is.
        """
        self.require_causal("a call for a state")
        raise StateError(
            f"{type(self).__name__}.init_state: got none, expected one of a mixer that is causal; "
            "fix by defining it"
        )

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one token: x [B, D] -> y [B, D], next state.

        Raises:
            StateError: the mixer is not causal.
        """
        self.require_causal("one token at a time")
        y, after = self(x.unsqueeze(1), state)
        return y.squeeze(1), after

    def set_depth(self, layer: int, layers: int) -> None:
        """Learn the place in the model; called once, before the weights are drawn.

        Args:
            layer: 0 for the first block.
            layers: blocks of the model.
        """

    def require_causal(self, got: str) -> None:
        """Refuse ``got``, something that only a causal mixer can take.

        Raises:
            StateError: the mixer is not causal.
        """
        if not self.causal:
            raise StateError(
                f"state: got {got} for a {type(self).__name__} with causal = false, expected whole "
                "documents and no state: a later token changes every output; fix by reading the "
                "documents again, or with a causal mixer"
            )


_MIXERS: dict[str, tuple[type[BaseModel], Callable[[int, Any], Mixer]]] = {}


def register_mixer(name: str, Config: type[BaseModel], Layer: Callable[[int, Any], Mixer]) -> None:
    """Let recipes and ``ModelConfig`` name a mixer of your own as ``kind``.

    Call it before the recipe is loaded, from your own Python file; recipes never import code. A
    whole mixer, which weights each token with the one or two before it::

        from typing import Literal, NamedTuple

        import gla
        from gla.layers.mixer import Mixer, MixerConfig
        from gla.layers.short_convolution import ShortConvolution
        from torch import Tensor, nn

        class LookBackConfig(MixerConfig):
            kind: Literal["look_back"] = "look_back"
            width: int = 3

        class LookBackState(NamedTuple):
            recent: Tensor  # [N, width - 1, D]

        class LookBack(Mixer):
            def __init__(self, d_model, config):
                super().__init__()
                self.conv = ShortConvolution(d_model, config.width)
                self.out_proj = nn.Linear(d_model, d_model, bias=False)

            def init_state(self, batch_size, *, device=None, dtype=None):
                return LookBackState(self.conv.init_state(batch_size, device, dtype))

            def forward(self, x, state=None, *, cu_seqlens=None, need_state=True):
                y, recent = self.conv(x, None if state is None else state.recent, cu_seqlens)
                return self.out_proj(y), LookBackState(recent) if need_state else None

        gla.register_mixer("look_back", LookBackConfig, LookBack)
        config = gla.ModelConfig(
            d_model=64,
            vocab_size=256,
            layers=["mine*2", "gla"],
            mixers={"mine": {"kind": "look_back"}},
        )

    Args:
        name: the value of ``kind``. Registering a name again replaces the mixer.
        Config: pydantic model with a field ``kind`` that defaults to ``name``.
        Layer: called as ``Layer(d_model, config)``; see ``Mixer``.

    Raises:
        ConfigError: ``Config`` has no such ``kind``.
    """
    field = getattr(Config, "model_fields", {}).get("kind")
    if field is None or field.default != name:
        got = "no field" if field is None else f"the default {field.default!r}"
        raise ConfigError(
            f"{Config.__name__}.kind: got {got}, expected the name {name!r}; "
            f'fix by adding kind: Literal["{name}"] = "{name}"'
        )
    _MIXERS[name] = (Config, Layer)


def mixer_config(table: Mapping[str, Any]) -> BaseModel:
    """Check a mixer's table against the config of its ``kind``.

    Raises:
        ConfigError: one line for each fault, an unknown key with the nearest valid one.
    """
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _MIXERS:
        got = "nothing" if kind is None else repr(kind)
        own = (
            ", or register a mixer of your own (gla.register_mixer) before the recipe or run is "
            "opened, in the same Python script"
        )
        raise ConfigError(
            f"kind: got {got}, expected {nearest(str(kind), _MIXERS)}{own if kind else ''}"
        )
    Config = _MIXERS[kind][0]
    try:
        return Config.model_validate(dict(table))
    except ValidationError as error:
        raise ConfigError(describe_faults(Config, error)) from None


def mixer_fields(kind: Any) -> list[str]:
    """The keys that a table of this kind may have; none for an unknown kind."""
    known = isinstance(kind, str) and kind in _MIXERS
    return list(_MIXERS[kind][0].model_fields) if known else []


def build_mixer(d_model: int, config: Any) -> Mixer:
    """Build the layer that ``config.kind`` names.

    Raises:
        ConfigError: the layer cannot do what the config asks.
    """
    return _MIXERS[config.kind][1](d_model, config)
