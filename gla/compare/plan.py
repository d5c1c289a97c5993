"""Which cells a suite has, which of them can run now, and what is finished.

Where learning rates are swept, the first seed runs with each of them; the best goes on to the other
seeds. So which cells there are depends on what is finished, and a comparison that was interrupted
finds its place again from the results alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gla.compare.cell import read_result
from gla.compare.examples import build_model
from gla.compare.match import TOLERANCE, count_on_meta, match_widths
from gla.compare.suite import TEXT, Cell, Suite, Table, merge, rates, recipe_of
from gla.compare.tasks import build_task
from gla.errors import ConfigError
from gla.models.encoder import Encoder, EncoderConfig
from gla.models.language_model import LanguageModel
from gla.train.config import build

# The figure that a task is judged by, and whether more of it is better: the first that is there.
MEASURES = (("bpb", False), ("accuracy", True), ("loss", False))

Results = dict[str, dict[str, Any]]  # folder of a cell -> what it found


class Entry(NamedTuple):
    """A variant on a task: all but learning rate and seed.

    Attributes:
        task, variant: Names.
        options: Of the task.
        recipe: With the widths that were found.
        rates: Learning rates to sweep, or the only one.
        parameters: Of the model.
    """

    task: str
    variant: str
    options: Table
    recipe: Table
    rates: list[float]
    parameters: int

    def cell(self, lr: float, seed: int) -> Cell:
        """Return one of its cells."""
        recipe = merge(self.recipe, {"optim": {"lr": lr}, "train": {"seed": seed}})
        return Cell(self.task, self.variant, lr, seed, self.options, recipe)


class Plan(NamedTuple):
    """A suite with widths, checked.

    Attributes:
        suite: The suite.
        entries: One for each task and variant.
    """

    suite: Suite
    entries: list[Entry]


def plan(suite: Suite) -> Plan:
    """Check every recipe and find the widths.

    Raises:
        ConfigError: One line for each fault, with the task and the variant.
    """
    faults: list[str] = []
    entries: list[Entry] = []
    for task in suite.tasks:
        try:
            options, recipe = recipe_of(suite, task, suite.baseline)
            target = _count(options, recipe, recipe["model"])
        except ConfigError as reason:
            faults += str(reason).splitlines()
            continue
        for variant in suite.variants:
            try:
                entries.append(_entry(suite, task, variant, target))
            except ConfigError as reason:
                faults += str(reason).splitlines()
    if faults:
        raise ConfigError("\n".join(faults))
    return Plan(suite, entries)


def _entry(suite: Suite, task: str, variant: str, target: int) -> Entry:
    options, recipe = recipe_of(suite, task, variant)
    try:
        swept = rates(suite, task, variant)
        parameters = _count(options, recipe, recipe["model"])
        if suite.match == "parameters" and abs(parameters - target) > TOLERANCE * target:
            found = match_widths(recipe["model"], target, partial(_count, options, recipe))
            widths = {"d_model": found.d_model, "mlp_ratio": found.mlp_ratio}
            recipe = merge(recipe, {"model": widths})
            parameters = found.parameters
    except ConfigError as reason:
        lines = (f"tasks.{task}, variants.{variant}: {x}" for x in str(reason).splitlines())
        raise ConfigError("\n".join(lines)) from None
    return Entry(task, variant, options, recipe, swept, parameters)


def _count(options: Table, recipe: Table, model: Table) -> int:
    """Parameters of the model of a recipe with another table [model]."""
    config = build({**recipe, "model": model}).model
    if isinstance(config, EncoderConfig):  # without the head for classes, which data may name
        return count_on_meta(lambda: Encoder(config))
    if options["kind"] == TEXT:
        return count_on_meta(lambda: LanguageModel(config))
    return count_on_meta(lambda: build_model(config, build_task(options)))


def measure_of(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """Return the figure by which results of one task are judged, and whether more is better."""
    for name, more in MEASURES:
        if any(name in result["metrics"] for result in results.values()):
            return name, more
    return MEASURES[-1]


def value_of(result: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a result, or None where it diverged."""
    value = result["metrics"].get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def best_rate(entry: Entry, results: Results) -> float | None:
    """Return the best learning rate of a sweep over seed 0, or None while it is not finished.

    The rate with the best figure; where that is the same, with the lowest loss. A rate that
    diverged is the worst.
    """
    found = {lr: results.get(entry.cell(lr, 0).folder) for lr in entry.rates}
    if any(result is None for result in found.values()):
        return None
    done = {lr: result for lr, result in found.items() if result is not None}
    name, more = measure_of({str(lr): result for lr, result in done.items()})

    def rank(lr: float) -> tuple[float, float]:
        value, loss = value_of(done[lr], name), value_of(done[lr], "loss")
        worst = value is None
        return (
            math.inf if worst else -value if more else value,
            math.inf if loss is None else loss,
        )

    return min(entry.rates, key=rank)


def known_cells(plan: Plan, results: Results) -> list[Cell]:
    """Return the cells that are known by now, finished ones included: seed by seed."""
    cells: list[Cell] = []
    for seed in range(plan.suite.seeds):
        for entry in plan.entries:
            if seed == 0:
                cells += [entry.cell(lr, 0) for lr in entry.rates]
            elif (lr := _only_rate(entry, results)) is not None:
                cells.append(entry.cell(lr, seed))
    return cells


def chosen_cells(plan: Plan, entry: Entry, results: Results) -> list[Cell]:
    """Return the cells of an entry with the best rate, one for each seed; none before the sweep."""
    lr = _only_rate(entry, results)
    return [] if lr is None else [entry.cell(lr, seed) for seed in range(plan.suite.seeds)]


def number_of_cells(plan: Plan) -> int:
    """Return how many cells there will be."""
    return sum(len(entry.rates) + plan.suite.seeds - 1 for entry in plan.entries)


def finished(folder: Path, cells: list[Cell]) -> Results:
    """Return the results that are there, by the folder of the cell.

    Raises:
        DataError: One is damaged.
    """
    found = {cell.folder: read_result(folder / cell.folder, cell.digest) for cell in cells}
    return {name: result for name, result in found.items() if result is not None}


def _only_rate(entry: Entry, results: Results) -> float | None:
    return entry.rates[0] if len(entry.rates) == 1 else best_rate(entry, results)
