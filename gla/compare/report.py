"""The files of a report: report.json, report.csv, report.html, PNGs, and TensorBoard's table."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gla import storage
from gla.compare import plan as plans
from gla.compare import plots
from gla.compare.summary import summarize

_COLUMNS = (
    *("task", "variant", "lr", "seed", "status", "parameters", "state_bytes", "steps"),
    *("train_seconds", "test_seconds", "axes", "metric", "value"),
)
_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 68em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 14px } th { text-align: right; font-weight: 600 }
td { padding: 2px 0 2px 1.4em; text-align: right; white-space: nowrap } th { padding-left: 1.4em }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
tr { border-bottom: 1px solid #e4e4e4 } img { margin: 0.5em 0 }
summary { font-size: 1.4em; font-weight: 600; margin: 1em 0; cursor: pointer }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto } img { max-width: 100% }
"""

Table = dict[str, Any]


def write_report(made: plans.Plan, results: plans.Results, out: Path) -> Table:
    """Write all of it from what is finished, and return what report.json says."""
    summary = summarize(made, results, out)
    pictures: dict[str, bytes] = {}
    if plots.has_matplotlib():
        for task, row in summary["tasks"].items():
            pictures |= {f"{task}-{name}": png for name, png in plots.draw(row).items()}
    for name, png in pictures.items():
        storage.write_bytes_atomic(out / f"report-{name}.png", png)
    storage.write_bytes_atomic(out / "report.csv", _csv(summary["cells"]).encode())
    storage.write_bytes_atomic(out / "report.html", page(summary, pictures).encode())
    _write_board(summary["cells"], out / "tb")
    text = json.dumps(summary, indent=1, allow_nan=False)
    storage.write_bytes_atomic(out / "report.json", text.encode())
    return summary


def _csv(cells: Mapping[str, Table]) -> str:
    """One line for each figure of each cell."""
    file = io.StringIO()
    writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cell in cells.values():
        facts = {name: cell.get(name) for name in _COLUMNS}
        places = [{"axes": {}, "metrics": cell["metrics"]}]
        for place in places + cell.get("cases", []) + cell.get("positions", []):
            axes = " ".join(f"{name}={value}" for name, value in place["axes"].items())
            for metric, value in place["metrics"].items():
                writer.writerow({**facts, "axes": axes, "metric": metric, "value": value})
    return file.getvalue()


def _write_board(cells: Mapping[str, Table], folder: Path) -> None:
    """Write TensorBoard's table of hyperparameters: one line for each cell."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    storage.remove(folder)
    for name, cell in cells.items():
        table = {k: cell[k] for k in ("task", "variant", "lr", "seed", "d_model", "parameters")}
        metrics = {f"final/{k}": float(v) for k, v in cell["metrics"].items() if v is not None}
        with SummaryWriter(str(folder / name.removeprefix("cells/"))) as board:
            for summary in hparams(table, metrics):
                board.file_writer.add_summary(summary)  # pyright: ignore[reportOptionalMemberAccess]
            for metric, value in metrics.items():
                board.add_scalar(metric, value, cell["steps"])


def page(summary: Table, pictures: Mapping[str, bytes]) -> str:
    """Return the page. Everything is inside; it needs no server and no network."""
    parts = [f"<h1>{html.escape(summary['title'])}</h1>", _introduction(summary)]
    if not pictures:
        parts.append("<p>No plots: matplotlib is not there (pip install 'gla[plots]').</p>")
    for task, row in summary["tasks"].items():
        parts += [f"<h2>{html.escape(task)}</h2>", _task_table(row, summary["baseline"])]
        if row["chance"] is not None:
            parts.append(f"<p>Guessing reaches an accuracy of {row['chance']:.4g}.</p>")
        for name in ("overview", "grid"):
            if png := pictures.get(f"{task}-{name}"):
                data = base64.b64encode(png).decode()
                alt = html.escape(f"{task}, {name}")
                parts.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>')
        parts.append(_sweeps(row))
    cells, suite = summary["cells"], {k: v for k, v in summary["suite"].items() if v != {}}
    parts.append(_folded(f"{len(cells)} cells", _cell_table(cells)))
    parts.append(_folded("Suite", f"<pre>{html.escape(json.dumps(suite, indent=1))}</pre>"))
    head = f'<meta charset="utf-8"><title>{html.escape(summary["title"])}</title>'
    return f"<!doctype html>\n{head}<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n"


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>{inside}</details>"


def _introduction(summary: Table) -> str:
    width = "parameters within 2 %" if summary["match"] == "parameters" else "widths"
    versions = {
        f"gla {c['versions'].get('gla', '?')} ({c['code'][:8]}), torch {c['versions']['torch']}, "
        f"{c['device']}, {c['precision']}, threads: {c['threads']}"
        for c in summary["cells"].values()
    }
    mixed = " <b>Not all cells were made alike:</b>" if len(versions) > 1 else ""
    done = "" if summary["complete"] else " <b>Not all cells are finished.</b>"
    return (
        f"<p>Equal {width}, equal examples in equal order for each of {summary['seeds']} seeds. "
        "Means ± half of the 95 % interval over seeds (Student's t); differences are taken seed by "
        f"seed from the baseline, {html.escape(summary['baseline'])}, without a correction for the "
        f"number of comparisons.{done}</p>"
        f"<p>{mixed} {'; '.join(html.escape(v) for v in sorted(versions))}</p>"
    )


def _task_table(task: Table, baseline: str) -> str:
    rows = []
    for name, row in task["variants"].items():
        own = "baseline" if name == baseline else interval(row.get("difference"), signed=True)
        rows.append(
            [
                name,
                with_diverged(row),
                own,
                row.get("verdict", ""),
                f"{row['parameters']:,}",
                "–" if row["state_bytes"] is None else f"{row['state_bytes']:,}",
                "–" if row["lr"] is None else f"{row['lr']:g}",
                "–" if row["train_seconds"] is None else f"{row['train_seconds']:,.0f}",
            ]
        )
    measure = f"{task['measure']} ({task['better']} is better)"
    heads = [
        "",
        measure,
        f"minus {baseline}",
        "verdict",
        "parameters",
        "state, bytes",
        "lr",
        "seconds",
    ]
    return html_table(heads, rows)


def interval(row: Mapping[str, Any] | None, signed: bool = False) -> str:
    """Return "mean ± half width", as far as there is one."""
    if row is None or row["mean"] is None:
        return "–"
    mean = f"{row['mean']:+.4f}" if signed else f"{row['mean']:.4f}"
    return mean if row["half_width"] is None else f"{mean} ± {row['half_width']:.4f}"


def with_diverged(row: Mapping[str, Any]) -> str:
    """Return the interval of a variant, and how many of its seeds are not in it."""
    return interval(row) + (f" ({row['diverged']} diverged)" if row["diverged"] else "")


def _sweeps(task: Table) -> str:
    swept = {name: row["sweep"] for name, row in task["variants"].items() if row["sweep"]}
    if not swept:
        return ""
    rates = sorted({lr for sweep in swept.values() for lr in sweep}, key=float)
    rows = [
        [name, *("–" if sweep.get(lr) is None else f"{sweep[lr]:.4f}" for lr in rates)]
        for name, sweep in swept.items()
    ]
    text = "Learning rates, seed 0:"
    if len({len(row["sweep"]) for row in task["variants"].values()}) > 1:
        text = (
            "Learning rates, seed 0. It is left out of the differences between variants with "
            "another number of rates, since the best of more runs is better by chance:"
        )
    return f"<p>{text}</p>" + html_table(["", *rates], rows)


def _cell_table(cells: Mapping[str, Table]) -> str:
    rows = [
        [
            f"{c['task']} / {c['variant']} / seed {c['seed']} / lr {c['lr']:g}",
            c["status"],
            ", ".join(f"{k} {_short(v)}" for k, v in c["metrics"].items() if v is not None),
            str(c["steps"]),
            f"{c.get('train_seconds', 0):,.0f}",
            f"{c.get('test_seconds', 0):,.0f}",
            c["digest"][:8],
        ]
        for c in cells.values()
    ]
    return html_table(["", "", "figures", "steps", "training, s", "tests, s", "digest"], rows)


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def html_table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table; its texts are escaped."""
    lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
