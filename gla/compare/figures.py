"""Tables as CSV and, where matplotlib is there, as plots beside it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


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
        log: The axes that are logarithmic: "", "x", "y" or "xy".
        band: A range of y that is shaded.

    Returns:
        Whether it was drawn: False without matplotlib (``pip install 'gla[plots]'``).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, (xs, ys) in series.items():
        axes.plot(xs, ys, label=label, marker="o" if len(xs) < 40 else None, markersize=3)
    if band is not None:
        axes.axhspan(*band, alpha=0.1)
    axes.set(title=title, xlabel=x, ylabel=y)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    if series:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return True
