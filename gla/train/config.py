"""A recipe: one TOML file, its overrides, and the checks on both.

Recipes are data. No code, import path or environment variable is read from them. All faults are
listed at once, each on one line that names the field, what it got and what was expected.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gla.errors import ConfigError
from gla.layers.mixer import nearest
from gla.models.config import ModelConfig

Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    """What every section shares: exact types, finite numbers, no unknown key."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class DataConfig(_Section):
    """Where the tokens are, and what they are made of where they are not there yet.

    Attributes:
        path: A folder written by ``gla data prepare``: train/, val/, tokenizer/.
        sources: What to prepare into ``path`` when nothing is there: files, folders, globs,
            "stdlib", or "hub:NAME". Empty: ``path`` must exist.
        vocab_size: Size of the tokenizer trained on ``sources``; not used when ``path`` exists.
        val_fraction: Share of the documents kept for validation when preparing.
    """

    path: str
    sources: list[str] = []
    vocab_size: Annotated[int, Field(ge=260)] = 4096
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05


class TrainConfig(_Section):
    """How much, in what pieces, how precisely.

    Attributes:
        steps: Optimizer updates.
        seq_len: Tokens of a row.
        global_batch_size: Rows of an update.
        micro_batch_size: Rows that pass through the model at once; None: all of an update.
        seed: Of the initialization, the order of the data and dropout.
        precision: "fp32", "bf16" (autocast; parameters, states and gates stay fp32), or "auto":
            bf16 where the device multiplies bf16 matrices faster, see ``loop.resolve_precision``.
        compile: Whether each block passes through ``torch.compile``.
        max_norm: The gradient is scaled down to this norm.
    """

    steps: Count
    seq_len: Count = 512
    global_batch_size: Count = 8
    micro_batch_size: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    max_norm: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _divides(self) -> TrainConfig:
        if self.global_batch_size % self.rows:
            raise ValueError(
                f"got global_batch_size = {self.global_batch_size} and micro_batch_size = "
                f"{self.rows}, and {self.global_batch_size} % {self.rows} = "
                f"{self.global_batch_size % self.rows}, expected 0; fix by choosing a divisor"
            )
        return self

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.micro_batch_size or self.global_batch_size


class GroupConfig(_Section):
    """Parameters that are treated differently.

    Attributes:
        pattern: A shell pattern on parameter names, for example "*.conv*". The first group that
            matches counts.
        lr_factor: The learning rate is multiplied by it.
        weight_decay: Replaces ``optim.weight_decay``, also for parameters that have none by
            default.
    """

    pattern: str
    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class OptimConfig(_Section):
    """How weights are updated. Norms, biases and gates are not decayed: ``gla.train.optim``.

    Attributes:
        kind: "adamw" (arXiv 1711.05101), or "muon" (Jordan et al. 2024) for the matrices inside the
            blocks with AdamW for the rest. Muon learns more from a token and costs a little more a
            step; its updates have the size of AdamW's, so the same ``lr`` serves both.
        lr: Peak learning rate.
        weight_decay: Of what is decayed, times the learning rate.
        betas, eps: Of AdamW.
        groups: Parameters that are treated differently.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    groups: list[GroupConfig] = []


class ScheduleConfig(_Section):
    """Learning rate over the steps, see ``gla.train.schedule``.

    Attributes:
        kind: "cosine" or "wsd" (warm-up, stable, decay).
        warmup_steps: Steps of linear warm-up.
        min_lr_ratio: The last step's rate over the peak.
        decay_fraction: Share of the steps in which "wsd" decays.
    """

    kind: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    min_lr_ratio: Ratio = 0.1
    decay_fraction: Ratio = 0.2


class CheckpointConfig(_Section):
    """Every ``interval`` steps and at the end; the newest ``keep`` stay."""

    interval: Count = 500
    keep: Count = 2


class EvalConfig(_Section):
    """Every ``interval`` steps and at the end.

    Attributes:
        interval: Steps between evaluations.
        batches: Batches of the validation split; 0: all of it. The last evaluation reads all of it.
        seq_len: Tokens of a row; None: that of training. Longer rows give more context.
    """

    interval: Count = 500
    batches: Annotated[int, Field(ge=0)] = 0
    seq_len: Count | None = None


class MetricsConfig(_Section):
    """A line of metrics.jsonl, TensorBoard and the log every ``interval`` steps."""

    interval: Count = 10


class RecipeModel(ModelConfig):
    """The [model] section. Without ``vocab_size``, the model takes the size of the tokenizer."""

    vocab_size: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class RunConfig(_Section):
    """Everything that a run is made from. Written, merged, as ``config.toml`` into the run."""

    model: RecipeModel
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    def to_toml(self) -> str:
        """Return the recipe as TOML that ``load_recipe`` reads back to an equal config."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_recipe(path: str | Path, overrides: Iterable[tuple[str, str]] = ()) -> RunConfig:
    """Read a TOML recipe, apply overrides in their order, and check the result.

    Args:
        path: The recipe.
        overrides: Pairs such as ("train.steps", "100"). The schema gives the type of a value; the
            last of several for one key wins.

    Raises:
        ConfigError: The file is missing or no TOML, or anything in it is wrong: all faults at once.
    """
    overrides = list(overrides)
    tables = apply_overrides(read_toml(path), overrides)
    named = {key for key, _ in overrides}
    if "data.path" in named and "data.sources" not in named:
        tables["data"].pop("sources", None)  # they are what the recipe's own path holds
    return build(tables)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: No such file, not UTF-8, or not TOML (the message has the line).
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as reason:
        raise ConfigError(f"{path}: got {reason.strerror}, expected a TOML recipe") from reason
    except (ValueError, RecursionError) as reason:
        raise ConfigError(f"{path}: got no TOML, {reason}; expected a TOML recipe") from reason


def build(tables: Mapping[str, Any]) -> RunConfig:
    """Check the tables of a recipe.

    Raises:
        ConfigError: One line for each fault.
    """
    plain = {
        name: table.model_dump(exclude_none=True) if isinstance(table, BaseModel) else table
        for name, table in tables.items()
    }
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as faults:
        raise ConfigError("\n".join(_describe(fault) for fault in faults.errors())) from None


def apply_overrides(
    tables: Mapping[str, Any], overrides: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Return the tables with each (dotted key, text) of ``overrides`` set, the last one winning.

    Raises:
        ConfigError: A key goes through something that is no table.
    """
    merged = _copy(tables)
    for key, text in overrides:
        *parents, name = key.split(".")
        table = merged
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{key}: got a key below {parent!r}, which is a value, no table")
        table[name] = _parse(text, _annotation(key))
    return merged


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _annotation(key: str) -> Any:
    """Return the type that the schema gives to a dotted key, or None where it has none."""
    model: Any = RunConfig
    for name in key.split("."):
        fields = getattr(_unwrap(model), "model_fields", {})
        if name not in fields:
            return None
        model = fields[name].annotation
    return model


def _unwrap(annotation: Any) -> Any:
    """``X | None`` and ``Annotated[X, …]`` -> ``X``."""
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    if isinstance(annotation, type) or get_origin(annotation) in (list, tuple, dict, Literal):
        return annotation
    return _unwrap(arguments[0]) if arguments else annotation


def _parse(text: str, annotation: Any) -> Any:
    """Read the text of an override: as it stands for strings, else as a TOML value or a string."""
    kind = _unwrap(annotation)
    if kind is str:
        return text
    if text in ("True", "False"):
        return text == "True"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    if get_origin(kind) in (list, tuple):
        return [_parse(part.strip(), get_args(kind)[0]) for part in _split(text)]
    return text


def _split(text: str) -> list[str]:
    """Split at commas that stand in no parentheses: a pattern of layers may hold some."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _describe(fault: Any) -> str:
    """Turn one of pydantic's faults into our one line."""
    path: tuple[int | str, ...] = fault["loc"]
    field = ".".join(str(part) for part in path) or "recipe"
    if fault["type"] == "extra_forbidden":
        return f"{field}: got an unknown key, expected {_valid_keys(path)}"
    if fault["type"] == "missing":
        return f"{field}: got nothing, expected a value; fix by setting it in the recipe"
    if fault["type"] == "value_error":
        reason = fault["ctx"]["error"]
        if isinstance(reason, ConfigError):  # from the model: lines that begin with a field
            return "\n".join(f"{field}.{line}" for line in str(reason).splitlines())
        return f"{field}: {reason}"
    wanted = fault["msg"].removeprefix("Input should be ")
    return f"{field}: got {fault['input']!r}, expected {wanted}"


def _valid_keys(path: tuple[int | str, ...]) -> str:
    """Say which keys are valid where ``path`` ends."""
    *parents, wrong = path
    model: Any = RunConfig
    for name in parents:
        if isinstance(name, str):  # a number stands in a list of tables
            model = _unwrap(model.model_fields[name].annotation)
        else:
            model = get_args(model)[0]
    known = list(model.model_fields)
    if not parents:  # a key without its section: --steps for --train.steps
        known += [key for key in _all_keys() if key.split(".")[-1] == wrong]
    return nearest(str(wrong), known)


def _all_keys() -> list[str]:
    return [
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        for name in getattr(_unwrap(field.annotation), "model_fields", {})
    ]
