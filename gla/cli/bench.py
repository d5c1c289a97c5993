"""``gla bench``: what mixers cost over the length, and the tables of two articles."""

from __future__ import annotations

import json as jsons
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gla.cli.arguments import call_one_of, print_json, require
from gla.errors import ConfigError
from gla.storage import make_folder
from gla.tables import nearest

_VARIANTS = ("softmax", "window", "linear", "gla", "mamba2")
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call_one_of({"cost": cost, "article": article}, "gla bench", argv)


def cost(
    *,
    variants: tuple[str, ...] = _VARIANTS,
    lengths: tuple[int, ...] = _LENGTHS,
    d_model: int = 256,
    layers: int = 4,
    seconds: float = 1.0,
    limit: float = 60.0,
    device: str = "auto",
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Measure time and peak memory of a training step, prefill and decoding over the length.

    One sequence, fp32. States the lengths at which each variant is below softmax.

    Args:
        variants: Presets; softmax is always among them.
        lengths: Tokens.
        d_model: Width of each model.
        layers: Blocks of each model.
        seconds: Of each timing.
        limit: Seconds of a single run, above which longer lengths are left out.
        device: auto, cpu, cuda, cuda:N or mps.
        out: Folder for cost.json, and cost.png where matplotlib is there.
        json: Print one JSON object.
    """
    from gla.compare.cost import Options, causal_presets, crossovers, measure_variant
    from gla.train.device import resolve_device

    require("d-model", d_model, 1)
    require("layers", layers, 1)
    require("seconds", seconds, 0, above=True)
    require("limit", limit, 0, above=True)
    place = resolve_device(device)
    if out is not None:  # before anything is measured for it
        make_folder(out, "--out")
    known = causal_presets(d_model)
    names = list(dict.fromkeys(["softmax", *variants]))
    for name in names:
        if name not in known:
            raise ConfigError(f"--variants: got {name!r}, expected {nearest(name, known)}")
    options = Options(d_model, layers, 4096, _sorted(lengths), seconds, limit)
    rows = [row for name in names for row in measure_variant(name, options, place, _note)]
    figures = {
        **_machine(place),
        "options": options._asdict(),
        "rows": rows,
        "crossovers": crossovers(rows, "softmax"),
    }
    if out is not None:
        _write(figures, out)
    if json:
        print_json(figures)
        return 0
    _show_cost(figures)
    return 0


def article(
    *,
    lengths: tuple[int, ...] = (1024, 4096, 8192, 16384, 65536),
    seconds: float = 1.0,
    device: str = "auto",
    no_memory: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Measure the tables of two articles: softmax against linear attention, and Linformer's memory.

    The printed figures stand beside; their device and precision are not known.

    Args:
        lengths: Tokens of the first table.
        seconds: Of each timing.
        device: auto, cpu, cuda, cuda:N or mps.
        no_memory: Leave out the second table, which takes some 5 GB.
        out: Folder for article.json and article.md.
        json: Print one JSON object.
    """
    from gla.compare.articles import first_article, second_article
    from gla.train.device import resolve_device

    require("seconds", seconds, 0, above=True)
    place = resolve_device(device)
    if out is not None:  # before anything is measured for it
        make_folder(out, "--out")
    figures: dict[str, Any] = {
        **_machine(place),
        "first": first_article(place, seconds, _sorted(lengths), _note),
        "second": [] if no_memory else second_article(place, _note),
    }
    text = article_tables(figures)
    if out is not None:
        (out / "article.json").write_text(jsons.dumps(figures, indent=1) + "\n", encoding="utf-8")
        (out / "article.md").write_text(text + "\n", encoding="utf-8")
    print_json(figures) if json else print(text)
    return 0


def _sorted(lengths: Sequence[int]) -> list[int]:
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            f"--lengths: got {lengths}, expected numbers of tokens, each at least 1; fix by "
            "leaving out what is less"
        )
    return sorted(set(lengths))


def article_tables(figures: Mapping[str, Any]) -> str:
    """Return both tables as Markdown."""
    heads = ["layer", "tokens", "ms here", "ms printed", "GB here", "GB printed"]
    rows = [
        [
            row["layer"],
            f"{row['length']:,}",
            _number(row["ms"], _not_run(row)),
            _printed(row, "printed_ms"),
            _number(row["gb"]),
            _printed(row, "printed_gb"),
        ]
        for row in figures["first"]
    ]
    text = "One layer of width 512, 8 heads, batch 1, forward:\n\n" + _markdown(heads, rows)
    if not figures["second"]:
        return text
    heads = ["layer", "scores, MB", "scores printed, MB", "peak of forward + backward, MB"]
    rows = [
        [
            row["layer"],
            f"{row['scores_mb']:,.0f}" if row["keys"] else "",
            "" if row["printed_mb"] is None else f"{row['printed_mb']:g}",
            _number(row["peak_mb"], "–" if row["run"] else _not_run(row)),
        ]
        for row in figures["second"]
    ]
    return f"{text}\n\nBatch 8, 2,048 tokens, 8 heads:\n\n{_markdown(heads, rows)}"


def _not_run(row: Mapping[str, Any]) -> str:
    return f"not run: needs {row['needs_gb']:.0f} GB"


def _printed(row: Mapping[str, Any], name: str) -> str:
    """What the article has for a layer and length: a number, "OOM", or nothing."""
    return "" if row[name] is None and not row["printed_oom"] else f"{row[name] or 'OOM'}"


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, missing: str = "–") -> str:
    if value is None:
        return missing
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}" if value < 1 else f"{value:,.1f}"


def _show_cost(figures: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    units = {"training": ("ms", 1e3), "prefill": ("ms", 1e3), "decode": ("µs a token", 1e6)}
    lengths = figures["options"]["lengths"]
    for kind, (unit, factor) in units.items():
        for figure, scale, name in (("seconds", factor, unit), ("bytes", 2**-20, "MiB")):
            table = Table(title=f"{kind}, {name}", box=box.SIMPLE_HEAD)
            for heading in ("tokens", *(f"{length:,}" for length in lengths)):
                table.add_column(heading, justify="right")
            found = {
                (r["variant"], r["length"]): r[figure] for r in figures["rows"] if r["kind"] == kind
            }
            for variant in dict.fromkeys(v for v, _ in found):
                values = [found[variant, length] for length in lengths]
                cells = [_number(None if v is None else v * scale) for v in values]
                table.add_row(variant, *cells)
            Console(width=None if sys.stdout.isatty() else 120).print(table)
    for line in crossover_lines(figures["crossovers"]):
        print(line)


def crossover_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say at which lengths each variant is below softmax."""
    return [f"{row['variant']}, {row['kind']}: {_against_softmax(row)}" for row in found]


def _against_softmax(row: Mapping[str, Any]) -> str:
    smaller, same = {
        "seconds": ("faster than softmax", "as fast as softmax"),
        "bytes": ("smaller in memory than softmax", "as large in memory as softmax"),
    }[row["figure"]]
    below, at, others = row["below"], row["length"], [*row["equal"], *row["above"]]
    if not others:
        return f"{smaller} at every measured length" if below else f"not known to be {smaller}"
    if not below:
        return f"{smaller} at no measured length" if row["above"] else f"{same} at every length"
    if max(below) < min(others):
        return f"{smaller} up to {max(below):,}"
    places = [f"at {n:,}" for n in below if at is None or n < at]
    if at is not None:
        places.append(f"beyond {at:,.0f}" if at in row["equal"] else f"from {at:,.0f} on")
    return f"{smaller} {' and '.join(places)}"


def _write(figures: Mapping[str, Any], out: Path) -> None:
    from gla.compare import plots

    (out / "cost.json").write_text(jsons.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if plots.has_matplotlib():
        (out / "cost.png").write_bytes(plots.draw_cost(figures))


def _machine(place: Any) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name(place) if place.type == "cuda" else platform.machine()
    return {
        "device": f"{place} ({name})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
