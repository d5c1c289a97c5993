"""What a model is made of: sizes, named mixers, and the pattern in which they stand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

import gla.layers  # noqa: F401 - registers the mixers that come with gla
from gla.errors import ConfigError
from gla.layers.linear_attention import RecurrenceConfig
from gla.layers.mixer import mixer_config
from gla.models.pattern import expand
from gla.tables import describe_faults, nearest, read_toml

Count = Annotated[int, Field(ge=1)]

# A layer of linear attention with the normalizer, as it was published: no gates, K = V.
_NORMALIZED = {
    "kind": "linear_attention",
    "gate": "none",
    "normalize": True,
    "expand_k": 1.0,
    "output_gate": False,
}
_PRESETS: dict[str, dict[str, Any]] = {
    # Katharopoulos et al. 2020, arXiv 2006.16236
    "linear": {**_NORMALIZED, "feature_map": "elu"},
    # Choromanski et al. 2020, arXiv 2009.14794
    "performer": {**_NORMALIZED, "feature_map": "favor", "rotary": True},
    # Arora et al. 2024, arXiv 2402.18668: 16 channels a key
    "based": {**_NORMALIZED, "feature_map": "taylor", "expand_k": 0.25},
    # Sun et al. 2023, arXiv 2307.08621; K = D / 2, where the paper has V = 2 D
    "retnet": {"kind": "linear_attention", "gate": "fixed", "rotary": True},
    # Qin et al. 2024, arXiv 2405.17381
    "lightning": {
        "kind": "linear_attention",
        "gate": "fixed_by_layer",
        "feature_map": "silu",
        "expand_k": 1.0,
    },
    # Yang et al. 2023, arXiv 2312.06635
    "gla": {"kind": "linear_attention", "gate": "channel"},
    # Qin et al. 2024, arXiv 2404.07904
    "hgrn2": {"kind": "hgrn2"},
    # Dao and Gu 2024, arXiv 2405.21060
    "mamba2": {"kind": "mamba2"},
    "softmax": {"kind": "softmax_attention"},
    "window": {"kind": "softmax_attention", "window": 256},
    # Xiao et al. 2023, arXiv 2309.17453
    "sinks": {"kind": "softmax_attention", "window": 252, "global_tokens": 4},
    # Beltagy et al. 2020, arXiv 2004.05150
    "longformer": {"kind": "softmax_attention", "window": 256, "global_tokens": 16},
    # Zaheer et al. 2020, arXiv 2007.14062
    "bigbird": {
        "kind": "softmax_attention",
        "window": 64,
        "global_tokens": 64,
        "random_blocks": 3,
    },
    # Kitaev et al. 2020, arXiv 2001.04451
    "reformer": {"kind": "reformer"},
    # Slots for finished blocks and exact recent tokens; see gla.layers.linformer_causal
    "linformer_causal": {"kind": "linformer_causal"},
    # For encoders: Wang et al. 2020, arXiv 2006.04768, and Xiong et al. 2021, arXiv 2102.03902
    "linformer": {"kind": "linformer"},
    "nystrom": {"kind": "nystrom"},
}

_HIDDEN_STEP = 32


def presets() -> dict[str, dict[str, Any]]:
    """Return {name: mixer table}. A preset's name may stand in ``layers``."""
    return {name: dict(table) for name, table in _PRESETS.items()}


class ModelConfig(BaseModel):
    """A model, from keywords, a dict (``ModelConfig(**table)``) or a recipe.

    Attributes:
        d_model: width of the residual stream.
        vocab_size: tokens of the vocabulary.
        layers: names of ``mixers`` or presets, from the first block to the last: "name",
            "name*count", "(name*count, name)*count"; see ``gla.models.pattern``.
        mixers: {name: table}; a table has a ``kind`` and the options of that kind. Presets that
            ``layers`` names are filled in, so that a written config says all of it.
        mlp_ratio: width inside the SwiGLU over d_model, rounded up to a multiple of 32; 0: no
            feed-forward layers.
        tie_embeddings: whether the head shares its weight with the embedding.
        norm_eps: of the RMSNorms between blocks.

    Raises:
        ConfigError: one line for each fault, an unknown key with the nearest valid one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    d_model: Count
    vocab_size: Count
    layers: Annotated[list[str], Field(min_length=1, strict=False)]
    mixers: dict[str, SerializeAsAny[BaseModel]] = {}
    mlp_ratio: Annotated[float, Field(ge=0)] = 8 / 3
    tie_embeddings: bool = True
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(describe_faults(type(self), error)) from None

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read the table [model] of a recipe, and [data] vocab_size where it names none.

        Raises:
            ConfigError: the file is missing, no TOML, or has no valid [model].
        """
        tables = read_toml(path)
        if not isinstance(tables.get("model"), dict):
            raise ConfigError(f"{path}: got no table [model], expected one; fix by adding it")
        data = tables.get("data")
        size = data.get("vocab_size") if isinstance(data, dict) else None
        return cls(**({} if size is None else {"vocab_size": size}) | tables["model"])

    @model_validator(mode="before")
    @classmethod
    def _fill_in_presets(cls, data: Any) -> Any:
        return cls.fill_in_presets(data)

    @staticmethod
    def fill_in_presets(data: Any) -> Any:
        """Add the tables of the presets that ``layers`` names to ``mixers``."""
        if not isinstance(data, Mapping):
            return data
        mixers, layers = data.get("mixers", {}), data.get("layers", ())
        if not isinstance(mixers, Mapping) or not isinstance(layers, list | tuple):
            return data
        mixers = dict(mixers)
        for entry in layers:
            for name in _names(entry):
                if name not in mixers and name in _PRESETS:
                    mixers[name] = _PRESETS[name]
        return {**data, "mixers": mixers}

    @field_validator("mixers", mode="before")
    @classmethod
    def _read_mixers(cls, tables: Any) -> Any:
        if not isinstance(tables, Mapping):
            return tables
        faults, mixers = [], {}
        for name, table in tables.items():
            if not isinstance(table, Mapping | BaseModel):
                faults.append(f"{name}: got {table!r}, expected a table; fix by giving kind")
                continue
            try:
                mixers[name] = mixer_config(
                    table.model_dump() if isinstance(table, BaseModel) else table
                )
            except ConfigError as error:
                faults += [f"{name}.{line}" for line in str(error).splitlines()]
        if faults:
            raise ConfigError("\n".join(faults))
        return mixers

    @model_validator(mode="after")
    def _check_layers(self) -> ModelConfig:
        known = list(dict.fromkeys([*self.mixers, *_PRESETS]))
        faults = []
        for i, entry in enumerate(self.layers):
            try:
                names = expand(entry)
            except ValueError as reason:
                faults.append(
                    f"layers[{i}]: got {entry!r}, expected a name, name*count or "
                    f"(name, ...)*count; in it: {reason}; fix layers[{i}]"
                )
                continue
            for name in dict.fromkeys(names):
                if name not in self.mixers:
                    faults.append(
                        f"layers[{i}]: got {entry!r}, expected {nearest(name, known)}, or define "
                        f"it by a table mixers.{name} beside layers"
                    )
        if faults:
            raise ConfigError("\n".join(faults))
        return self

    def with_impl(self, impl: str) -> Self:
        """This model with ``impl`` in every mixer on the op, and chunks of the form's choice.

        How a model is computed is no part of what it is: two are the same architecture where they
        are equal after ``with_impl("auto")``.
        """
        form = {"impl": impl, "chunk_size": None}
        mixers = {
            name: mixer.model_copy(update=form) if isinstance(mixer, RecurrenceConfig) else mixer
            for name, mixer in self.mixers.items()
        }
        return self.model_copy(update={"mixers": mixers})

    @property
    def layer_names(self) -> list[str]:
        """One mixer name a block."""
        return [name for entry in self.layers for name in expand(entry)]

    @property
    def mlp_hidden(self) -> int:
        """Width inside the SwiGLU; 0 where there is none."""
        return -(-round(self.d_model * self.mlp_ratio) // _HIDDEN_STEP) * _HIDDEN_STEP


def _names(entry: Any) -> list[str]:
    """The names in an entry of ``layers``; none if it is no pattern, which is said elsewhere."""
    try:
        return list(dict.fromkeys(expand(entry)))
    except (ValueError, TypeError, AttributeError):
        return []
