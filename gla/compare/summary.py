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
from gla.train.config import build

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
    base = next(entry for entry in entries if entry.variant == made.suite.baseline)
    baseline = values[base.variant]
    variants = {}
    for entry in entries:
        found = chosen[entry.variant]
        own = _numbers(estimate(list(values[entry.variant].values())))
        row: Table = {**own, "values": values[entry.variant], **_facts(entry, found)}
        if entry is not base:
            difference = paired(*_fair(values[entry.variant], baseline, entry, base))
            row["difference"] = _numbers(difference)
            solved = _all_solved(found) and _all_solved(chosen[base.variant])
            row["verdict"] = verdict(difference, more, solved)
        row["diverged"] = len(found) - len(values[entry.variant])
        row["metrics"] = _metrics([result["metrics"] for result in found.values()])
        row["cases"] = _cases([result.get("cases", []) for result in found.values()])
        row["positions"] = _cases([result.get("positions", []) for result in found.values()])
        row["sweep"] = _sweep(entry, results, name)
        cells = plans.chosen_cells(made, entry, results)
        row["curve"] = _curve(out, {c.folder: results.get(c.folder) for c in cells}, name)
        variants[entry.variant] = row
    options = entries[0].options
    return {
        "kind": options["kind"],
        "measure": name,
        "better": "higher" if more else "lower",
        "chance": _chance(options, everything) if name == "accuracy" else None,
        "training_length": build(base.recipe).train.seq_len,
        "variants": variants,
    }


def _chance(options: Table, found: Mapping[str, Result]) -> float | None:
    """Accuracy of a guess; for classes that of the most frequent one."""
    if options["kind"] in KINDS:
        return build_task(options).chance
    return next(
        (r["metrics"]["majority"] for r in found.values() if "majority" in r["metrics"]), None
    )


def _fair(
    ours: dict[int, float], theirs: dict[int, float], entry: plans.Entry, base: plans.Entry
) -> tuple[dict[int, float], dict[int, float]]:
    """Leave out seed 0 where it picked one variant's rate from more rates than the other's.

    The best of k results lies above their mean, by more for a larger k.
    """
    if len(entry.rates) == len(base.rates):
        return ours, theirs
    return {s: x for s, x in ours.items() if s}, {s: x for s, x in theirs.items() if s}


def _all_solved(found: Mapping[int, Result]) -> bool:
    return bool(found) and all(result["status"] == "solved" for result in found.values())


def verdict(difference: Estimate, more: bool, solved: bool = False) -> str:
    """Say in words what a paired difference from the baseline means.

    Args:
        difference: Of a figure.
        more: Whether more of it is better.
        solved: Whether all runs of both ended at the accuracy that ends training: what they differ
            by is then where that was noticed.
    """
    if solved:
        return "both solve it"
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
    """Average what every seed says of each point of the axes, which it says once."""
    points: dict[str, tuple[Any, list[Any]]] = {}
    for cases in of_seeds:
        for name, case in {json.dumps(case["axes"]): case for case in cases}.items():
            points.setdefault(name, (case["axes"], []))[1].append(case["metrics"])
    return [{"axes": axes, "metrics": _metrics(rows)} for axes, rows in points.values()]


def _sweep(entry: plans.Entry, results: plans.Results, name: str) -> Table:
    if len(entry.rates) == 1:
        return {}
    found = {lr: results.get(entry.cell(lr, 0).folder) for lr in entry.rates}
    return {f"{lr:g}": plans.value_of(r, name) for lr, r in found.items() if r is not None}


def _curve(out: Path, found: Mapping[str, Result | None], name: str) -> list[list[float]]:
    """Return [step, mean over the seeds] of the validation figure in training.

    Only steps for which every seed has one: a mean over those that are left would jump. A seed that
    solved the task keeps its last figure; one that diverged is left out, as in the mean.
    """
    seeds = []
    for folder, result in found.items():
        if result is not None and (value := plans.value_of(result, name)) is not None:
            points = dict(_evaluations(out / folder / "metrics.jsonl", f"val_{name}"))
            seeds.append((points | {result["steps"]: value}, result["status"] == "solved"))
    curve = []
    for step in sorted({step for points, _ in seeds for step in points}):
        values = [_value_at(points, step, solved) for points, solved in seeds]
        if len(known := [value for value in values if value is not None]) == len(seeds):
            curve.append([step, estimate(known).mean])
    return curve


def _value_at(points: Mapping[int, float], step: int, keeps: bool) -> float | None:
    last = max(points)
    return points.get(last if keeps and step > last else step)


def _evaluations(file: Path, key: str) -> list[tuple[int, float]]:
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    return [(row["step"], row[key]) for row in lines if row.get(key) is not None]
