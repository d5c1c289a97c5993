"""The figures of a comparison, as PNG. Needs matplotlib: pip install 'gla[plots]'."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

from gla.errors import ConfigError

Table = Mapping[str, Any]
_NAMES = {"bpb": "bits per byte", "accuracy": "accuracy", "loss": "loss (nats)", "exact": "exact"}


def draw(task: Table) -> dict[str, bytes]:
    """Draw what a summary says of one task.

    Returns:
        PNG by a short name: "overview", and "grid" where the tests have two axes that cross.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figures = {"overview": _overview(task)}
    if crossing := _crossing(task):
        figures["grid"] = _grid(task, *crossing)
    return figures


def draw_cost(figures: Table) -> bytes:
    """Draw what ``gla bench cost`` found, over the length: time above, memory below."""
    figure = _figure(13, 7)
    rows = figures["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for i, (name, unit) in enumerate((("seconds", "s"), ("bytes", "MiB"))):
        for j, kind in enumerate(kinds):
            axes = figure.add_subplot(2, len(kinds), i * len(kinds) + j + 1)
            for variant in dict.fromkeys(row["variant"] for row in rows):
                points = [
                    (row["length"], row[name] / (1 if name == "seconds" else 2**20))
                    for row in rows
                    if (row["variant"], row["kind"]) == (variant, kind) and row[name]
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), label=variant, marker=".", linewidth=1.3)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{kind}, {unit}" + (" a token" if kind == "decode" and not i else ""))
            axes.set_xlabel("tokens", fontsize=9)
            axes.grid(alpha=0.3)
            _legend(axes)
    return _png(figure)


def has_matplotlib() -> bool:
    """Return whether figures can be drawn."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as reason:
        raise ConfigError(
            "gla compare: got no matplotlib, expected it for the plots; fix with "
            "pip install 'gla[plots]'"
        ) from reason
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _overview(task: Table) -> bytes:
    variants: Table = task["variants"]
    lines = [
        (title, key, axis)
        for title, key, axis in (
            (f"{_NAMES[task['measure']]} by length of the input", "cases", None),
            (f"{_NAMES[task['measure']]} by position in the input", "positions", "position"),
        )
        if any(row[key] for row in variants.values()) and not (key == "cases" and _crossing(task))
    ]
    panels = 2 + len(lines)
    rows = -(-panels // 2)
    figure = _figure(11, max(3.4, 1.2 + 0.3 * len(variants)) * rows)
    axes = [figure.add_subplot(rows, 2, i + 1) for i in range(panels)]
    _bars(axes[0], task)
    _curves(axes[1], task)
    for (title, key, axis), place in zip(lines, axes[2:], strict=True):
        _by_axis(place, task, key, axis, title)
    return _png(figure)


def _bars(axes: Any, task: Table) -> None:
    """Mean, interval and each seed of every variant."""
    names = list(task["variants"])
    for place, name in enumerate(names):
        row = task["variants"][name]
        if row["mean"] is None:
            continue
        axes.errorbar(row["mean"], place, xerr=row["half_width"], fmt="o", capsize=4, color="C0")
        values = list(row["values"].values())
        axes.plot(values, [place] * len(values), ".", color="0.55", markersize=5, zorder=0)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(f"{_NAMES[task['measure']]}, mean and 95 % interval", fontsize=10)
    axes.set_xlabel(f"{task['better']} is better", fontsize=9)
    axes.grid(alpha=0.3)
    _chance(axes.axvline, task)


def _curves(axes: Any, task: Table) -> None:
    for name, row in task["variants"].items():
        if row["curve"]:
            steps, values = zip(*row["curve"], strict=True)
            axes.plot(steps, values, label=name, linewidth=1.3, marker=".", markersize=4)
    axes.set_title(f"{_NAMES[task['measure']]} on validation, during training", fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.3)
    _chance(axes.axhline, task)
    _legend(axes)


def _by_axis(axes: Any, task: Table, key: str, axis: str | None, title: str) -> None:
    """Lines over the last axis of the tests, with their intervals."""
    measure, name = task["measure"], axis
    for variant, row in task["variants"].items():
        cases = [c for c in row[key] if c["metrics"][measure]["mean"] is not None]
        if not cases:
            continue
        name = axis or list(cases[0]["axes"])[-1]
        places = [case["axes"][name] for case in cases]
        means = [case["metrics"][measure]["mean"] for case in cases]
        widths = [case["metrics"][measure]["half_width"] or 0.0 for case in cases]
        (line,) = axes.plot(places, means, label=variant, linewidth=1.3, marker=".", markersize=4)
        low, high = ([m + sign * w for m, w in zip(means, widths, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    axes.set_xscale("log", base=2)
    ticks = sorted({c["axes"][name] for row in task["variants"].values() for c in row[key]})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.set_title(title if name in ("length", "position") else f"by {name}", fontsize=10)
    axes.set_xlabel(str(name), fontsize=9)
    axes.grid(alpha=0.3)
    trained = task["training_length"]
    if trained and name in ("length", "position"):
        axes.axvline(trained, color="0.5", linestyle=":", linewidth=1)
        axes.annotate(" trained", (trained, 0.02), xycoords=("data", "axes fraction"), fontsize=7)
    _chance(axes.axhline, task)
    _legend(axes)


def _crossing(task: Table) -> tuple[str, str] | None:
    """Return the two axes of the tests where every value of one meets every value of the other."""
    for row in task["variants"].values():
        cases = row["cases"]
        if cases and len(cases[0]["axes"]) == 2:
            first, second = cases[0]["axes"]
            ways = [{case["axes"][name] for case in cases} for name in (first, second)]
            if min(map(len, ways)) > 1 and len(ways[0]) * len(ways[1]) == len(cases):
                return first, second
    return None


def _grid(task: Table, first: str, second: str) -> bytes:
    """One square of colours for each variant: share of examples without fault."""
    variants = {n: row for n, row in task["variants"].items() if row["cases"]}
    columns = min(3, len(variants))
    rows = -(-len(variants) // columns)
    figure = _figure(3.8 * columns, 3.2 * rows)
    for number, (name, row) in enumerate(variants.items(), start=1):
        axes = figure.add_subplot(rows, columns, number)
        xs, ys = (sorted({c["axes"][a] for c in row["cases"]}) for a in (first, second))
        means = {
            (c["axes"][first], c["axes"][second]): c["metrics"]["exact"]["mean"]
            for c in row["cases"]
        }
        square = [[_or_nan(means.get((x, y))) for x in xs] for y in ys]
        image = axes.imshow(square, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs], fontsize=8)
        axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys], fontsize=8)
        axes.set_xlabel(first, fontsize=9)
        axes.set_ylabel(second, fontsize=9)
        axes.set_title(f"{name}: exact", fontsize=10)
        figure.colorbar(image, ax=axes)
    return _png(figure)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _chance(line: Any, task: Table) -> None:
    if task["chance"] is not None:
        line(task["chance"], color="0.5", linestyle="--", linewidth=1, label="chance")


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
