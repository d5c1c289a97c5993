"""One page about a run: what it was, how it went, what it writes. An HTML file and a PNG of curves.

Everything is inside the HTML file; it needs no server and no network.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gla import storage
from gla.errors import ConfigError, DataError
from gla.models.weights import require_run
from gla.tables import read_toml
from gla.train import run_folder

PAGE, PICTURE = "report.html", "report.png"
_SAMPLES = 2  # newest ones on the page
_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } td { padding: 2px 1.5em 2px 0; vertical-align: top }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; white-space: pre-wrap }
img { max-width: 100% }
"""

Row = dict[str, Any]


class Panel(NamedTuple):
    """A diagram: its title, whether its axis is logarithmic, and {label: key in metrics.jsonl}."""

    title: str
    log: bool
    curves: dict[str, str]


_PANELS = (
    Panel("loss (nats)", False, {"training": "loss", "validation": "val_loss"}),
    Panel("bits per byte", False, {"training": "bpb", "validation": "val_bpb"}),
    Panel(
        "validation: classes, or masked tokens",
        False,
        {"accuracy": "val_accuracy", "macro-F1": "val_macro_f1"},
    ),
    Panel("learning rate", False, {"": "lr"}),
    Panel("gradient norm, before clipping", True, {"": "grad_norm"}),
    Panel("tokens per second", False, {"": "tokens_per_s"}),
)


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write ``report.html`` and ``report.png`` from what a run has written so far.

    Args:
        run: The run's folder.
        out: Where the files go; the run's folder if None.

    Returns:
        The HTML file.

    Raises:
        ConfigError: No run there, no place for files, or matplotlib is missing.
        DataError: Its metrics cannot be read.
    """
    require_run(run)
    rows = read_metrics(run / "metrics.jsonl")
    out = out or run
    storage.make_folder(out, "--out")
    picture = draw(rows)
    storage.write_bytes_atomic(out / PICTURE, picture)
    page = _page(run, rows, base64.b64encode(picture).decode())
    storage.write_bytes_atomic(out / PAGE, page.encode())
    return out / PAGE


def read_metrics(file: Path) -> list[Row]:
    """Return the lines of metrics.jsonl.

    Raises:
        DataError: There are none, or one is damaged (but the last, which a kill may have cut).
    """
    rows: list[Row] = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as reason:
        raise DataError(f"{file}: got {reason}, expected metrics; fix by training first") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            int(row["step"])
            rows.append(row)
        except (ValueError, KeyError, TypeError, RecursionError) as reason:
            if number < len(lines):
                raise DataError(
                    f"{file}:{number}: got a line that is no metrics ({reason}); fix by removing it"
                ) from reason
    if not rows:
        raise DataError(f"{file}: got no metrics, expected some; fix by training first")
    return rows


def curve(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a figure was recorded, and its values (NaN where it was null)."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [s for s, _ in points], [math.nan if v is None else float(v) for _, v in points]


def present(rows: Sequence[Row]) -> list[Panel]:
    """Return the panels that a run has figures for, with the curves that it has."""
    keys = {key for row in rows for key in row}
    panels = [
        panel._replace(curves={label: key for label, key in panel.curves.items() if key in keys})
        for panel in _PANELS
    ]
    decays = {k.split(".")[1]: k for row in rows for k in row if k.startswith("decay/")}
    panels.append(Panel("mean decay of a layer's gates (1 keeps, 0 forgets)", False, decays))
    return [panel for panel in panels if panel.curves]


def draw(rows: Sequence[Row]) -> bytes:
    """Draw the curves of a run as a PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as reason:
        raise ConfigError(
            "gla report: got no matplotlib, expected it for the curves; fix with "
            "pip install 'gla[plots]'"
        ) from reason
    panels = present(rows)
    high = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(11, 3.2 * high), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(high, 2, number)
        for label, key in panel.curves.items():
            steps, values = curve(rows, key)
            marker = "o" if len(steps) < 30 else None
            axes.plot(steps, values, label=label, linewidth=1.2, marker=marker, markersize=3)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.grid(alpha=0.3)
        if panel.log:
            axes.set_yscale("log")
        if any(panel.curves):
            axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return the last figures of a run, as text, "n/a" where one was not measured."""
    training = next((row for row in reversed(rows) if "loss" in row), {})
    validation = next((row for row in reversed(rows) if "val_loss" in row), {})
    last = {**training, **validation}

    def show(key: str, form: str) -> str:
        value = last.get(key)
        return "n/a" if value is None else format(value, form)

    best = min((row["val_loss"] for row in rows if row.get("val_loss") is not None), default=None)
    # What only some models have: text has bytes, encoders tell classes or fill in tokens.
    own = {
        "validation bits per byte": ("val_bpb", ".4f"),
        "validation accuracy": ("val_accuracy", ".2%"),
        "validation macro-F1": ("val_macro_f1", ".4f"),
    }
    return {
        "steps": f"{rows[-1]['step']:,}",
        "training tokens": show("tokens", ","),
        "training loss": show("loss", ".4f"),
        "validation loss": show("val_loss", ".4f"),
        "lowest validation loss": "n/a" if best is None else f"{best:.4f}",
        **{name: show(key, form) for name, (key, form) in own.items() if key in last},
        "tokens per second, last": show("tokens_per_s", ",.0f"),
        "tokens per second, overall": show("tokens_per_s_overall", ",.0f"),
        "share of the time spent waiting for data": show("data_wait", ".1%"),
        "TFLOP/s": show("tflops", ".3f"),
        "model FLOPs utilization": show("mfu", ".1%"),
        "peak memory, GiB": show("memory_gib", ".2f"),
        "updates left out": show("skipped", ","),
        "loss spikes": f"{sum(row.get('spikes') or 0 for row in rows):,}",
    }


def _page(run: Path, rows: Sequence[Row], picture: str) -> str:
    samples = sorted((run / "samples").glob("step-*.txt"))[-_SAMPLES:]
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in samples}
    environment = _json(run / "env.json")
    read_toml(run / run_folder.CONFIG)  # a damaged one is said, not shown
    recipe = (run / run_folder.CONFIG).read_text(encoding="utf-8")
    parts = [
        f"<h1>{html.escape(run.resolve().name)}</h1>",
        _table(figures(rows)),
        f'<p><img alt="curves" src="data:image/png;base64,{picture}"></p>',
        *(
            f"<h2>Sample, {html.escape(n)}</h2><pre>{html.escape(t)}</pre>"
            for n, t in texts.items()
        ),
        f"<h2>Recipe</h2><pre>{html.escape(recipe)}</pre>",
        f"<h2>Environment</h2><pre>{html.escape(json.dumps(environment, indent=1))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(run.resolve().name)}</title>'
    return f"<!doctype html>\n{head}<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n"


def _table(facts: dict[str, str]) -> str:
    cells = (
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in facts.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
