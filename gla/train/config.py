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
from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gla.errors import ConfigError
from gla.tables import describe_faults, read_toml
from gla.train.objective_config import ObjectiveConfig, RecipeModel, encoder_recipe
from gla.train.section import Beta, Betas, Count, Pattern, Ratio, Section

__all__ = ["RunConfig", "apply_overrides", "build", "load_recipe", "read_toml"]

_VOCAB_SIZE = 4096


class DataConfig(Section):
    """Where the tokens are, and what they are made of where they are not there yet.

    Attributes:
        path: A folder written by ``gla data prepare``: train/, val/, tokenizer/.
        sources: What to prepare into ``path`` when nothing is there: files, folders, globs,
            "stdlib", or "hub:NAME". Empty: ``path`` must exist.
        weights: Share of each source in the text, see ``gla.data.mixture``; empty: all of each.
        text_field: Key or column that holds the text of .jsonl, .parquet and Hub rows.
        vocab_size: Size of the tokenizer trained on ``sources``; None is 4096, or that of the data
            where they are prepared already.
        val_fraction: Share of the documents kept for validation when preparing.
    """

    path: str
    sources: list[str] = Field(default=[])
    weights: list[Annotated[float, Field(gt=0)]] = Field(default=[])
    text_field: str = "text"
    vocab_size: Annotated[int, Field(ge=260)] | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05

    @property
    def new_vocab_size(self) -> int:
        """Size of a tokenizer that is trained for the data."""
        return self.vocab_size or _VOCAB_SIZE

    @model_validator(mode="after")
    def _one_weight_a_source(self) -> DataConfig:
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                f"got {len(self.weights)} weights for {len(self.sources)} sources, expected one "
                "each; fix data.weights"
            )
        return self


class TrainConfig(Section):
    """How much, in what pieces, how precisely.

    Attributes:
        steps: Optimizer updates.
        seq_len: Tokens of a row.
        global_batch_size: Rows of an update, of all processes together.
        micro_batch_size: Rows that pass through a process's model at once; None: all of its share.
        seed: Of the initialization, the order of the data and random numbers in layers.
        precision: "fp32"; "bf16" or "fp16" (autocast; parameters, states and gates stay fp32; fp16
            scales the loss); or "auto": bf16 where the device multiplies bf16 matrices faster, see
            ``device.resolve_precision``.
        compile: Whether each block passes through ``torch.compile``.
        activation_checkpointing: Whether each block keeps only its input for the backward pass and
            computes the rest again: less memory, about a third more time.
        max_norm: The gradient is scaled down to this norm.
        on_nonfinite: What to do where the loss or the gradient is not finite: "stop", or "skip" the
            update and go on (twenty skips in a row stop too). The batch is written to the run.
        ema_decay: Keep a running average of the weights with this decay, and evaluate that; 0: no.
        carry_state: Rows go on where they stopped: the state of each row is carried, without
            gradient, to the next step (truncated back-propagation through time).
        isolate_documents: False lets documents that share a row see each other.
        loader_workers: Processes that assemble batches ahead of time; 0: the training process.
        timeout_s: Seconds after which a process that does not answer counts as lost.
    """

    steps: Count
    seq_len: Count = 512
    global_batch_size: Count = 8
    micro_batch_size: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: bool = False
    activation_checkpointing: bool = False
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    ema_decay: Beta = 0.0
    carry_state: bool = False
    isolate_documents: bool = True
    loader_workers: Annotated[int, Field(ge=0, le=64)] = 0
    timeout_s: Count = 600

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
        """Rows of a micro-batch of one process alone."""
        return self.micro_batch_size or self.global_batch_size


class GroupConfig(Section):
    """Parameters that are treated differently.

    Attributes:
        pattern: A regular expression, searched in parameter names: "gate", "^blocks\\.0\\.". The
            first group whose pattern is found counts. Each must be found somewhere.
        lr_factor: The learning rate is multiplied by it.
        weight_decay: Replaces ``optim.weight_decay``, also for parameters that have none by
            default.
        warmup_steps: Replaces ``schedule.warmup_steps``; one longer than the run is cut.
    """

    pattern: Pattern
    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None


class OptimConfig(Section):
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
    betas: Betas = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    groups: list[GroupConfig] = Field(default=[])


class ScheduleConfig(Section):
    """Learning rate over the steps, see ``gla.train.schedule``.

    Attributes:
        kind: "cosine", "linear", "constant" or "wsd" (warm-up, stable, decay).
        warmup_steps: Steps of linear warm-up.
        min_lr_ratio: The last step's rate over the peak; not for "constant".
        decay_fraction: Share of the steps in which "wsd" decays.
    """

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    min_lr_ratio: Ratio = 0.1
    decay_fraction: Ratio = 0.2


class CheckpointConfig(Section):
    """Every ``interval`` steps and at the end; the newest ``keep`` stay.

    Attributes:
        interval: Steps between checkpoints.
        keep: How many stay.
        keep_best: Also save at the evaluation with the lowest loss so far, and keep that one:
            ``checkpoints/best`` leads to it. All are compared on ``eval.batches``.
    """

    interval: Count = 500
    keep: Count = 2
    keep_best: bool = False


class EvalConfig(Section):
    """Every ``interval`` steps and at the end.

    Attributes:
        interval: Steps between evaluations.
        batches: Batches of the validation split; 0: all of it. The last evaluation reads all of it.
        seq_len: Tokens of a row; None: that of training. Longer rows give more context.
    """

    interval: Count = 500
    batches: Annotated[int, Field(ge=0)] = 0
    seq_len: Count | None = None


class MetricsConfig(Section):
    """A line of metrics.jsonl, TensorBoard and the log every ``interval`` steps."""

    interval: Count = 10


class RunConfig(Section):
    """Everything that a run is made from. Written, merged, as ``config.toml`` into the run."""

    objective: ObjectiveConfig = ObjectiveConfig()
    model: SerializeAsAny[RecipeModel]
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _as_the_objective_asks(cls, table: Any, info: ValidationInfo) -> Any:
        objective = info.data.get("objective")
        if isinstance(table, Mapping) and objective and objective.kind != "next_token":
            return encoder_recipe(table)
        return table

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
        for key in {"sources", "weights", "vocab_size"} - {k.removeprefix("data.") for k in named}:
            tables["data"].pop(key, None)  # they tell what the recipe's own path holds
    return build(tables)


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
        raise ConfigError(describe_faults(RunConfig, faults, _valid_keys)) from None


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
                raise ConfigError(
                    f"{key}: got a key below {parent!r}, which is a value, expected a table; fix "
                    "the key"
                )
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


def _valid_keys(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid where ``path`` ends."""
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
    return known


def _all_keys() -> list[str]:
    return [
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        for name in getattr(_unwrap(field.annotation), "model_fields", {})
    ]
