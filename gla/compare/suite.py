"""A suite: one TOML file of variants × tasks × seeds, and the recipe of each of its cells.

    title = "Does gating help?"
    baseline = "none"            # others are compared with it, and get as many parameters
    seeds = 3

    [model]                      # d_model, depth and the other keys of a recipe's [model]
    d_model = 128
    depth = 4                    # blocks; a variant's layers are repeated up to it

    [train]                      # [optim], [schedule], [eval]: as in a recipe
    steps = 400

    [variants.none]
    layers = ["mix"]
    mixers.mix = { kind = "linear_attention", gate = "none" }

    [tasks.text]
    kind = "text"                # or "encoder", or one of gla.compare.tasks
    lr = [2e-3, 6e-3]            # swept over the first seed; the best goes on to the others
    data.path = "data/stdlib"    # tables named as those of a recipe change the ones above

    [sizes.gpu.train]            # what another size changes, table by table
    steps = 20000

A suite is data: no code, no import path. Custom mixers are registered in Python before it is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from gla.compare.tasks import KINDS, build_task
from gla.compare.text import TextOptions
from gla.errors import ConfigError
from gla.models.pattern import expand
from gla.tables import describe_faults, nearest, read_toml
from gla.train.config import (
    DataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    apply_overrides,
    build,
)
from gla.train.inputs import is_prepared, tokenizer_of

TEXT, ENCODER = "text", "encoder"
SECTIONS = tuple(RunConfig.model_fields)
_FORMAT = 1  # of a cell: a change makes finished cells count no longer
_LINES = 50  # of metrics in a cell
_PARTS = 5  # of a cell, at whose ends it is saved

Count = Annotated[int, Field(ge=1)]
Rates = list[Annotated[FiniteFloat, Field(gt=0)]]
Table = dict[str, Any]

_RATES = TypeAdapter(Rates, config=ConfigDict(strict=True))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Variant(_Section):
    """A model that is compared.

    Attributes:
        layers: A pattern of mixers, see ``gla.models.pattern``, repeated up to ``model.depth``.
        mixers: As in a recipe.
        lr: Rates to sweep in place of the task's.
        optim: Changes of that section, such as groups.
    """

    layers: Annotated[list[str], Field(min_length=1)]
    mixers: dict[str, Table] = {}
    lr: Rates = []
    optim: Table = {}


class Suite(_Section):
    """What the file says. See the module.

    Attributes:
        title: Of the report.
        baseline: A variant.
        seeds: Seeds 0 … seeds - 1.
        match: "parameters": widths are changed until all variants have those of the baseline
            within 2 %; "width": all have the same width, and the report says the parameters.
        model, objective, data, train, optim, schedule, eval, checkpoint, metrics: Of all recipes.
        variants, tasks: By name.
    """

    title: str
    baseline: str
    seeds: Count = 3
    match: Literal["parameters", "width"] = "parameters"
    model: Table
    objective: Table = {}
    data: Table = {}
    train: Table = {}
    optim: Table = {}
    schedule: Table = {}
    eval: Table = {}
    checkpoint: Table = {}
    metrics: Table = {}
    variants: Annotated[dict[str, Variant], Field(min_length=1)]
    tasks: Annotated[dict[str, Table], Field(min_length=1)]

    @model_validator(mode="after")
    def _names(self) -> Suite:
        if self.baseline not in self.variants:
            raise ConfigError(
                f"baseline: got {self.baseline!r}, expected {nearest(self.baseline, self.variants)}"
            )
        for name in [*self.variants, *self.tasks]:
            if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise ConfigError(
                    f"name: got {name!r}, expected letters, digits, '-', '_' and '.'; fix the name"
                )
        return self


@dataclass(frozen=True)
class Cell:
    """One training: a variant on a task with a learning rate and a seed."""

    task: str
    variant: str
    lr: float
    seed: int
    options: Table  # of the task, with its kind
    recipe: Table

    @property
    def digest(self) -> str:
        """Of all that decides the result, names left out."""
        what = [_FORMAT, self.options, self.recipe]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Its place below the folder of the comparison."""
        return f"cells/{self.task}/{self.variant}/lr-{self.lr:g}-seed-{self.seed}-{self.digest[:8]}"

    def facts(self) -> Table:
        """What ``cell.json`` says."""
        return {
            "task": self.task,
            "variant": self.variant,
            "lr": self.lr,
            "seed": self.seed,
            "digest": self.digest,
            "options": self.options,
            "recipe": self.recipe,
        }


def load_suite(
    path: str | Path, size: str | None = None, overrides: Iterable[tuple[str, str]] = ()
) -> Suite:
    """Read a suite in one of its sizes.

    Args:
        path: The TOML file.
        size: A table below [sizes]; None or "base": the file without them.
        overrides: As for recipes. A key of a section of recipes, such as "train.steps", also
            replaces what tasks and variants say; "optim.lr" ends their sweeps.

    Raises:
        ConfigError: One line for each fault.
    """
    tables = read_toml(path)
    sizes = _sizes(tables)
    tables.pop("sizes", None)
    if size not in (None, "base"):
        if size not in sizes:
            raise ConfigError(
                f"--size: got {size!r}, expected {nearest(str(size), ['base', *sizes])}"
            )
        tables = merge(tables, sizes[size])
    for key, text in overrides:
        tables = apply_overrides(tables, [(key, text)])
        section, _, rest = key.partition(".")
        for part in _parts(tables) if rest and section in SECTIONS else ():
            if section in part:
                part[section] = apply_overrides(part, [(key, text)])[section]
            if key == "optim.lr":
                part.pop("lr", None)
    try:
        return Suite.model_validate(tables)
    except ValidationError as faults:
        raise ConfigError(describe_faults(Suite, faults)) from None


def _parts(tables: Table) -> list[Table]:
    """The tables of tasks and of variants; what else stands there is refused later."""
    named = [tables.get(name) for name in ("tasks", "variants")]
    parts = [part for table in named if isinstance(table, dict) for part in table.values()]
    return [part for part in parts if isinstance(part, dict)]


def sizes_of(path: str | Path) -> list[str]:
    """Return the names below [sizes] of a suite."""
    return list(_sizes(read_toml(path)))


def _sizes(tables: Table) -> dict[str, Table]:
    sizes = tables.get("sizes", {})
    if not isinstance(sizes, dict) or not all(isinstance(x, dict) for x in sizes.values()):
        raise ConfigError(f"sizes: got {sizes!r}, expected tables [sizes.NAME]; fix sizes")
    return sizes


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    """Return ``base`` with ``changes``, table by table; a table in an array counts as a value."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # pyright: ignore[reportArgumentType]
    return merged


def rates(suite: Suite, task: str, variant: str) -> list[float]:
    """Return the learning rates that are swept, or the only one.

    Raises:
        ConfigError: They are no list of different positive numbers.
    """
    swept: Any = suite.variants[variant].lr or suite.tasks[task].get("lr", [])
    if swept == []:
        return [float(_sections(suite, task, variant)["optim"].get("lr", OptimConfig().lr))]
    try:
        found = _RATES.validate_python(swept)
    except ValidationError:
        found = []
    if not found or len(set(found)) < len(found):
        raise ConfigError(
            f"lr: got {swept!r}, expected a list of different positive numbers; fix lr"
        )
    return list(swept)


def recipe_of(suite: Suite, task: str, variant: str) -> tuple[Table, Table]:
    """Return the options of a task, and the tables of a recipe, but for lr, seed and widths.

    Raises:
        ConfigError: They do not fit together; each line begins with task and variant.
    """
    where = f"tasks.{task}, variants.{variant}: "
    try:
        options, recipe = _recipe(suite, task, variant)
        build(recipe)
        return options, recipe
    except ConfigError as faults:
        raise ConfigError("\n".join(where + line for line in str(faults).splitlines())) from None


def _recipe(suite: Suite, task: str, variant: str) -> tuple[Table, Table]:
    kind = suite.tasks[task].get("kind")
    known = [TEXT, ENCODER, *KINDS]
    if kind not in known:
        raise ConfigError(f"kind: got {kind!r}, expected {nearest(str(kind), known)}")
    options = {k: v for k, v in suite.tasks[task].items() if k not in (*SECTIONS, "lr")}
    recipe = _sections(suite, task, variant)
    recipe["model"] = _model(recipe["model"], suite.variants[variant])
    if kind in (TEXT, ENCODER):
        options = _options_of_text(options, recipe)
        _settle(recipe, "model", "vocab_size", _vocabulary(recipe["data"]))
    else:
        made = build_task(options)
        options = made.model_dump(mode="json")
        _refuse_idle(suite.tasks[task], recipe)
        recipe["data"] = {"path": f"task:{kind}"}
        _settle(recipe, "model", "vocab_size", made.vocab_size)
        _settle(recipe, "train", "seq_len", max(part.length for part, _ in made.parts()))
    steps = recipe["train"].get("steps", 1)
    for section, parts in (("eval", _PARTS * 2), ("checkpoint", _PARTS), ("metrics", _LINES)):
        recipe[section].setdefault("interval", max(1, steps // parts) if steps > 0 else 1)
    recipe["checkpoint"].setdefault("keep", 1)
    return options, {name: table for name, table in recipe.items() if table}


def _settle(recipe: Table, section: str, key: str, value: int) -> None:
    """Fill in a value that follows from the task, and refuse another one."""
    if (got := recipe[section].setdefault(key, value)) != value:
        raise ConfigError(
            f"{section}.{key}: got {got!r}, expected {value}, which follows from the task; fix by "
            "leaving it out"
        )


def _refuse_idle(task: Table, recipe: Table) -> None:
    """Refuse what would do nothing in a synthetic task."""
    objective = recipe["objective"].get("kind", "next_token")
    if objective != "next_token":
        raise ConfigError(
            f"objective.kind: got {objective!r} for a synthetic task, expected 'next_token'; fix "
            "by giving the other tasks a table objective of their own"
        )
    idle = {"data": "data" in task, "train.carry_state": recipe["train"].get("carry_state")}
    for key in (key for key, is_there in idle.items() if is_there):
        raise ConfigError(f"{key}: got one for a synthetic task, expected none; fix by removing it")


def _options_of_text(options: Table, recipe: Table) -> Table:
    """Check the options of a task on real text against what is learned there."""
    objective = recipe["objective"]
    encoder = objective.get("kind", "next_token") != "next_token"
    kind = options["kind"]
    if encoder != (kind == ENCODER):
        raise ConfigError(
            f"kind: got {kind!r} with objective.kind = {objective.get('kind', 'next_token')!r}, "
            "expected 'text' with 'next_token', or 'encoder' with 'masked' or 'classify'; fix kind"
        )
    if not encoder:
        read = TextOptions.read(options)
        read.require(recipe["train"].get("seq_len", TrainConfig.model_fields["seq_len"].default))
        return {"kind": kind, **read.model_dump(mode="json")}
    if more := [key for key in options if key != "kind"]:
        raise ConfigError(
            f"{more[0]}: got an option, expected none of kind 'encoder'; fix by removing it"
        )
    return options


def _sections(suite: Suite, task: str, variant: str) -> Table:
    """Return the sections of a recipe: the suite's, changed by the task's and the variant's."""
    table = suite.tasks[task]
    sections = {name: merge(getattr(suite, name, {}), table.get(name, {})) for name in SECTIONS}
    sections["optim"] = merge(sections["optim"], suite.variants[variant].optim)
    return sections


def _model(table: Table, variant: Variant) -> Table:
    """Return a recipe's [model]: the variant's layers, repeated up to the depth."""
    for key in ("layers", "mixers"):
        if key in table:
            raise ConfigError(
                f"model.{key}: got {table[key]!r}, expected none; fix by moving it into the "
                "variants, which say their layers and mixers"
            )
    rest = {key: value for key, value in table.items() if key != "depth"}
    names: list[str] = []
    for entry in variant.layers:
        try:
            names += expand(entry)
        except ValueError as reason:
            raise ConfigError(f"layers: got {entry!r}, and in it: {reason}; fix layers") from None
    depth = table.get("depth", len(names))
    if not isinstance(depth, int) or depth < 1 or depth % len(names):
        raise ConfigError(
            f"model.depth: got {depth!r} for a pattern of {len(names)} layers, expected a "
            "multiple; fix depth or the variant's layers"
        )
    return {**rest, "layers": names * (depth // len(names)), "mixers": variant.mixers}


def _vocabulary(data: Table) -> int:
    """Size of the tokenizer: that of the prepared data, or the one to be trained."""
    try:
        section = DataConfig.model_validate(data)
    except ValidationError as faults:
        lines = describe_faults(DataConfig, faults).splitlines()
        raise ConfigError("\n".join(f"data.{line}" for line in lines)) from None
    return tokenizer_of(section).vocab_size if is_prepared(section) else section.new_vocab_size
