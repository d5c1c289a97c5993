"""What a model is made of: sizes, named mixers, and the pattern in which they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

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
from gla.layers.mixer import mixer_config
from gla.tables import describe_faults, nearest, read_toml

Count = Annotated[int, Field(ge=1)]

_PRESETS: dict[str, dict[str, Any]] = {
    # Yang et al. 2023, arXiv 2312.06635
    "gla": {"kind": "linear_attention", "gate": "channel"},
    # The same layer without a gate
    "linear": {"kind": "linear_attention", "gate": "none"},
    "softmax": {"kind": "softmax_attention"},
    "window": {"kind": "softmax_attention", "window": 256},
}

_ENTRY = re.compile(r"\s*(?P<name>[\w.-]+)\s*(\*\s*(?P<count>\d+)\s*)?")
_HIDDEN_STEP = 32


def presets() -> dict[str, dict[str, Any]]:
    """Return {name: mixer table}. A preset's name may stand in ``layers``."""
    return {name: dict(table) for name, table in _PRESETS.items()}


class ModelConfig(BaseModel):
    """A model, from keywords, a dict (``ModelConfig(**table)``) or a recipe.

    Attributes:
        d_model: width of the residual stream.
        vocab_size: tokens of the vocabulary.
        layers: one entry a run of blocks, "name" or "name*count"; a name of ``mixers`` or a preset.
        mixers: {name: table}; a table has a ``kind`` and the options of that kind. Presets that
            ``layers`` names are filled in, so that a written config says all of it.
        mlp_ratio: width inside the SwiGLU over d_model, rounded up to a multiple of 32.
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
    mlp_ratio: Annotated[float, Field(gt=0)] = 8 / 3
    tie_embeddings: bool = True
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(describe_faults(type(self), error)) from None

    @classmethod
    def from_toml(cls, path: str | Path) -> ModelConfig:
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
        if not isinstance(data, Mapping):
            return data
        mixers, layers = data.get("mixers", {}), data.get("layers", ())
        if not isinstance(mixers, Mapping) or isinstance(layers, str):
            return data
        mixers = dict(mixers)
        for entry in layers:
            match = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
            if match and match["name"] not in mixers and match["name"] in _PRESETS:
                mixers[match["name"]] = _PRESETS[match["name"]]
        return {**data, "mixers": mixers}

    @field_validator("mixers", mode="before")
    @classmethod
    def _read_mixers(cls, tables: Any) -> Any:
        if not isinstance(tables, Mapping):
            return tables
        faults, mixers = [], {}
        for name, table in tables.items():
            if not isinstance(table, Mapping | BaseModel):
                faults.append(f"mixers.{name}: got {table!r}, expected a table; fix by giving kind")
                continue
            try:
                mixers[name] = mixer_config(
                    table.model_dump() if isinstance(table, BaseModel) else table
                )
            except ConfigError as error:
                faults += [f"mixers.{name}.{line}" for line in str(error).splitlines()]
        if faults:
            raise ConfigError("\n".join(faults))
        return mixers

    @model_validator(mode="after")
    def _check_layers(self) -> ModelConfig:
        known = list(dict.fromkeys([*self.mixers, *_PRESETS]))
        faults = []
        for i, entry in enumerate(self.layers):
            match = _ENTRY.fullmatch(entry)
            if match is None or (match["count"] and int(match["count"]) < 1):
                faults.append(
                    f"layers[{i}]: got {entry!r}, expected a name or name*count with a count of at "
                    f"least 1; fix layers[{i}]"
                )
            elif match["name"] not in self.mixers:
                wanted = nearest(match["name"], known)
                faults.append(f"layers[{i}]: got {entry!r}, expected {wanted}")
        if faults:
            raise ConfigError("\n".join(faults))
        return self

    @property
    def layer_names(self) -> list[str]:
        """One mixer name a block."""
        matches = (_ENTRY.fullmatch(entry) for entry in self.layers)
        return [m["name"] for m in matches if m for _ in range(int(m["count"] or 1))]

    @property
    def mlp_hidden(self) -> int:
        """Width inside the SwiGLU."""
        return -(-round(self.d_model * self.mlp_ratio) // _HIDDEN_STEP) * _HIDDEN_STEP
