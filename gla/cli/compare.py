"""``gla compare SUITE``: variants × tasks × seeds, with intervals."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from gla.cli import recipes
from gla.cli.arguments import print_json, read_with_overrides, require


@dataclass(frozen=True)
class Options:
    """Compare mixers: equal parameters, data and order, several seeds, intervals.

    What is finished is never computed again, and what was interrupted goes on: run the command
    again. Every key of the suite can be overridden: --seeds 5 --train.steps 1000
    """

    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    """A TOML file, or the name of a suite that ships with gla."""
    size: str | None = None
    """A table below [sizes] of the suite; by default "gpu" on a GPU, where the suite has that."""
    out: Path | None = None
    """Folder of cells and report; runs/compare-SUITE-SIZE by default."""
    jobs: int | None = None
    """Processes at a time; one for each core of the CPU, or for each GPU, by default."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dry_run: bool = False
    """Print the cells, parameters and widths; train nothing."""
    report: bool = False
    """Write the report of what is finished; train nothing."""
    json: bool = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    options, overrides = read_with_overrides(Options, "gla compare", argv)

    from gla.compare.run import compare, describe, report_only
    from gla.compare.suite import load_suite, sizes_of
    from gla.train.device import resolve_device

    require("jobs", options.jobs, 1)
    path = recipes.find_suite(options.suite)
    size = options.size
    if size is None and resolve_device(options.device).type == "cuda" and "gpu" in sizes_of(path):
        size = "gpu"
    suite = load_suite(path, size, overrides)
    out = options.out or Path("runs") / f"compare-{path.stem}-{size or 'base'}"
    if options.dry_run:
        figures = describe(suite)
        print_json(figures) if options.json else _show_plan(figures)
        return 0
    if options.report:
        summary = report_only(suite, out)
    else:
        summary = compare(suite, out, jobs=options.jobs, device=options.device)
    if options.json:
        print_json(summary)
        return 0
    _show(summary)
    print(f"report         {out / 'report.html'}")
    print(f"TensorBoard    {out / 'tb'}")
    return 0


def _show(summary: Mapping[str, Any]) -> None:
    """Print one table for each task."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from gla.compare.report import interval, with_diverged

    for task, row in summary["tasks"].items():
        table = Table(title=task, box=box.SIMPLE_HEAD)
        for heading in ("", row["measure"], f"minus {summary['baseline']}", "", "parameters"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, variant in row["variants"].items():
            difference = interval(variant.get("difference"), signed=True)
            verdict = variant.get("verdict", "baseline")
            parameters = f"{variant['parameters']:,}"
            table.add_row(name, with_diverged(variant), difference, verdict, parameters)
        # Off a terminal rich takes 80 columns, and would cut names.
        Console(width=None if sys.stdout.isatty() else 120).print(table)


def _show_plan(figures: Mapping[str, Any]) -> None:
    for row in figures["entries"]:
        print(
            f"{row['task']:16} {row['variant']:20} {row['parameters']:>12,} parameters  "
            f"d_model {row['d_model']}  {row['steps']} steps of {row['batch']} x {row['seq_len']}  "
            f"lr {', '.join(f'{lr:g}' for lr in row['rates'])}"
        )
    print(f"{figures['cells']} cells")
