"""Figures as PNG, which need matplotlib (pip install 'gla[plots]'), and tables as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gla.errors import ConfigError

Table = Mapping[str, Any]
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
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


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a table."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_plot(
    path: Path,
    series: Series,
    *,
    title: str,
    x: str,
    y: str,
    log: str = "",
    band: tuple[float, float] | None = None,
) -> bool:
    """Draw lines into a PNG file.

    Args:
        path: The file.
        series: {label: (x values, y values)}.
        title, x, y: What stands beside the plot.
        log: The axes that are logarithmic: "", "x" or "y".
        band: A range of y that is shaded.

    Returns:
        Whether it was drawn: False without matplotlib.
    """
    if not has_matplotlib():
        return False
    figure = _figure(7, 4.2)
    axes = figure.add_subplot()
    for label, (xs, ys) in series.items():
        axes.plot(xs, ys, label=label, marker="o" if len(xs) < 40 else None, markersize=3)
    if band is not None:
        axes.axhspan(*band, alpha=0.1)
    axes.set(title=title, xlabel=x, ylabel=y)
    for axis in log:
        axes.set(**{f"{axis}scale": "log"})
    _legend(axes)
    path.write_bytes(_png(figure))
    return True


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
        axes.errorbar(
            row["mean"], place, xerr=row["half_width"], fmt="o", capsize=4, color=f"C{place % 10}"
        )
        values = list(row["values"].values())
        axes.plot(values, [place] * len(values), ".", color="0.55", markersize=5, zorder=0)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(f"{_NAMES[task['measure']]}, mean and 95 % interval", fontsize=10)
    axes.set_xlabel(f"{task['better']} is better", fontsize=9)
    axes.grid(alpha=0.3)
    _chance(axes.axvline, task)


def _curves(axes: Any, task: Table) -> None:
    for name, row in task["variants"].items():  # also one without points: colours stay the same
        steps, values = ([point[i] for point in row["curve"]] for i in (0, 1))
        axes.plot(steps, values, label=name, linewidth=1.3, marker=".", markersize=4)
    axes.set_title(f"{_NAMES[task['measure']]} on validation, during training", fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.3)
    _chance(axes.axhline, task)
    _legend(axes)


def _by_axis(axes: Any, task: Table, key: str, axis: str | None, title: str) -> None:
    """Lines over an axis of the tests, with their intervals."""
    measure = task["measure"]
    points = [case["axes"] for row in task["variants"].values() for case in row[key]]
    name = axis or _telling_axis(points)
    for variant, row in task["variants"].items():
        cases = [c for c in row[key] if c["metrics"][measure]["mean"] is not None]
        places = [case["axes"][name] for case in cases]
        means = [case["metrics"][measure]["mean"] for case in cases]
        widths = [case["metrics"][measure]["half_width"] or 0.0 for case in cases]
        (line,) = axes.plot(places, means, label=variant, linewidth=1.3, marker=".", markersize=4)
        low, high = ([m + sign * w for m, w in zip(means, widths, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    ticks = sorted({point[name] for point in points})
    if ticks[0] > 0:  # a depth may be 0
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    own = f"{_NAMES[measure]} by {name}"
    axes.set_title(title if name in ("length", "position") else own, fontsize=10)
    axes.set_xlabel(name, fontsize=9)
    axes.grid(alpha=0.3)
    if name in ("length", "position"):
        trained = task["training_length"]
        axes.axvline(trained, color="0.5", linestyle=":", linewidth=1)
        axes.annotate(" trained", (trained, 0.02), xycoords=("data", "axes fraction"), fontsize=7)
    _chance(axes.axhline, task)
    _legend(axes)


def _telling_axis(points: Sequence[Mapping[str, float]]) -> str:
    """The axis with the most values, of several such the last one."""
    return max(reversed(list(points[0])), key=lambda name: len({point[name] for point in points}))


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
