"""From the results of cells to what a report says: means, intervals, differences, verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gla.compare import plan as plans
from gla.compare.statistics import Estimate, estimate, paired
from gla.compare.tasks import KINDS, build_task

Result = Mapping[str, Any]
Table = dict[str, Any]


def summarize(made: plans.Plan, results: plans.Results, out: Path) -> Table:
    """Return what report.json says.

    Args:
        made: The plan.
        results: Of the cells that are finished.
        out: Folder of the comparison.
    """
    suite = made.suite
    tasks = {name: _task(made, name, results, out) for name in suite.tasks}
    cells = plans.known_cells(made, results)
    return {
        "title": suite.title,
        "baseline": suite.baseline,
        "match": suite.match,
        "seeds": suite.seeds,
        "complete": len(cells) == plans.number_of_cells(made) == len(results),
        "tasks": tasks,
        "suite": suite.model_dump(mode="json"),
        "cells": {c.folder: results[c.folder] for c in cells if c.folder in results},
    }


def _task(made: plans.Plan, task: str, results: plans.Results, out: Path) -> Table:
    entries = [entry for entry in made.entries if entry.task == task]
    chosen = {e.variant: _chosen(made, e, results) for e in entries}
    everything = {f"{v}/{seed}": r for v, found in chosen.items() for seed, r in found.items()}
    name, more = plans.measure_of(everything)
    values = {variant: _values(found, name) for variant, found in chosen.items()}
    baseline = values[made.suite.baseline]
    variants = {}
    for entry in entries:
        found = chosen[entry.variant]
        own = _numbers(estimate(list(values[entry.variant].values())))
        row: Table = {**own, "values": values[entry.variant], **_facts(entry, found)}
        if entry.variant != made.suite.baseline:
            difference = paired(values[entry.variant], baseline)
            row["difference"] = _numbers(difference)
            row["verdict"] = verdict(difference, more)
        row["diverged"] = sum(result["status"] == "diverged" for result in found.values())
        row["metrics"] = _metrics([result["metrics"] for result in found.values()])
        row["cases"] = _cases([result.get("cases", []) for result in found.values()])
        row["positions"] = _cases([result.get("positions", []) for result in found.values()])
        row["sweep"] = _sweep(entry, results, name)
        cells = plans.chosen_cells(made, entry, results)
        row["curve"] = _curve([out / c.folder for c in cells if c.folder in results], name)
        variants[entry.variant] = row
    options = entries[0].options
    return {
        "kind": options["kind"],
        "measure": name,
        "better": "higher" if more else "lower",
        "chance": _chance(options, everything) if name == "accuracy" else None,
        "training_length": entries[0].recipe["train"].get("seq_len"),
        "variants": variants,
    }


def _chance(options: Table, found: Mapping[str, Result]) -> float | None:
    """Accuracy of a guess; for classes that of the most frequent one."""
    if options["kind"] in KINDS:
        return build_task(options).chance
    return next(
        (r["metrics"]["majority"] for r in found.values() if "majority" in r["metrics"]), None
    )


def verdict(difference: Estimate, more: bool) -> str:
    """Say in words what a paired difference from the baseline means."""
    if difference.n == 0:
        return "no pair of seeds"
    if difference.half_width is None:
        return "one seed: no interval"
    if not difference.distinguishable:
        return "not distinguishable"
    return "better" if (difference.mean > 0) == more else "worse"


def _chosen(made: plans.Plan, entry: plans.Entry, results: plans.Results) -> dict[int, Result]:
    cells = plans.chosen_cells(made, entry, results)
    return {c.seed: results[c.folder] for c in cells if c.folder in results}


def _values(found: Mapping[int, Result], name: str) -> dict[int, float]:
    values = {seed: plans.value_of(result, name) for seed, result in found.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _facts(entry: plans.Entry, found: Mapping[int, Result]) -> Table:
    model = entry.recipe["model"]
    first = next(iter(found.values()), {})
    seconds = [r["train_seconds"] for r in found.values() if "train_seconds" in r]
    return {
        "parameters": entry.parameters,
        "d_model": model["d_model"],
        "mlp_ratio": model.get("mlp_ratio"),
        "layers": model["layers"],
        "state_bytes": first.get("state_bytes"),
        "lr": first.get("lr"),
        "steps": [result["steps"] for result in found.values()],
        "train_seconds": estimate(seconds).mean if seconds else None,
    }


def _numbers(what: Estimate) -> Table:
    return {**what._asdict(), "mean": None if math.isnan(what.mean) else what.mean}


def _metrics(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: _numbers(estimate([float(row[name]) for row in rows if row.get(name) is not None]))
        for name in names
    }


def _cases(of_seeds: Sequence[Sequence[Mapping[str, Any]]]) -> list[Table]:
    """Average what every seed says of each point of the axes."""
    points: dict[str, tuple[Any, list[Any]]] = {}
    for cases in of_seeds:
        for case in cases:
            points.setdefault(json.dumps(case["axes"]), (case["axes"], []))[1].append(
                case["metrics"]
            )
    return [{"axes": axes, "metrics": _metrics(rows)} for axes, rows in points.values()]


def _sweep(entry: plans.Entry, results: plans.Results, name: str) -> Table:
    if len(entry.rates) == 1:
        return {}
    found = {lr: results.get(entry.cell(lr, 0).folder) for lr in entry.rates}
    return {f"{lr:g}": plans.value_of(r, name) for lr, r in found.items() if r is not None}


def _curve(folders: Sequence[Path], name: str) -> list[list[float]]:
    """Return [step, mean over the seeds] of the validation figure in training."""
    points: dict[int, list[float]] = {}
    for folder in folders:
        for step, value in _evaluations(folder / "metrics.jsonl", f"val_{name}"):
            points.setdefault(step, []).append(value)
    return [[step, estimate(values).mean] for step, values in sorted(points.items())]


def _evaluations(file: Path, key: str) -> list[tuple[int, float]]:
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    return [(row["step"], row[key]) for row in lines if row.get(key) is not None]
