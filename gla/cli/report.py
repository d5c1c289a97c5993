"""``gla report RUN``: one page about a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gla.cli.arguments import Run, call


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(report, "gla report", argv)


def report(run: Run, /, *, out: Path | None = None) -> int:
    """Write one HTML page with curves, figures, samples and the recipe of a run, and a PNG.

    The run may still be training. Needs matplotlib: pip install 'gla[plots]'.

    Args:
        run: Folder of the run.
        out: Folder for report.html and report.png; that of the run by default.
    """
    from gla.train.report import write_report

    print(write_report(run, out))
    return 0
