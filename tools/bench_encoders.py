"""Encoders on one task: accuracy and macro-F1 of softmax, Linformer, linear attention, Nyström.

    python tools/bench_encoders.py                     about ten minutes on two cores
    python tools/bench_encoders.py --steps 20 --only softmax --out runs/try

Each row is the recipe encoder-stdlib with another mixer: the same data, order, steps, width and
initialization of what they share. A run of the same recipe that is there already is read, one that
was cut short goes on. Results of one seed; give more with --seeds.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from gla.cli import recipes
from gla.cli.eval import measure
from gla.train.config import build, read_toml
from gla.train.loop import resume, train
from gla.train.run_folder import CONFIG

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax_attention"},
    "linformer, k = 32": {"kind": "linformer", "k": 32},
    "linformer, k = 128": {"kind": "linformer", "k": 128},
    "linear": {
        "kind": "linear_attention",
        "gate": "none",
        "feature_map": "elu",
        "normalize": True,
        "expand_k": 1.0,
        "output_gate": False,
    },
    "nystrom": {"kind": "nystrom"},
}
# E and F belong to the recipe of Linformer: a third of the rate, a longer warm-up.
_GROUP = {"pattern": r"\.mixer\.[EF]$", "lr_factor": 0.3, "weight_decay": 0.01, "warmup_steps": 90}


def bench(
    out: Path = Path("runs/encoders"),
    steps: int | None = None,
    seeds: int = 1,
    only: list[str] | None = None,
    data: str | None = None,
    device: str = "auto",
    json_file: Path | None = None,
) -> None:
    """Train, evaluate, print the table.

    Args:
        out: Folder of the runs.
        steps: Updates of each run; the recipe's by default.
        seeds: How many seeds of each.
        only: Variants whose names contain one of these.
        data: Prepared data in place of the recipe's.
        device: auto, cpu, cuda, cuda:N or mps.
        json_file: Also write the figures there.
    """
    rows = {}
    for name, mixer in VARIANTS.items():
        if only and not any(part in name for part in only):
            continue
        runs = [one(out, name, mixer, seed, steps, data, device) for seed in range(seeds)]
        rows[name] = {key: _mean(run[key] for run in runs) for key in runs[0]}
    show(rows, seeds)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def one(
    out: Path,
    name: str,
    mixer: dict[str, Any],
    seed: int,
    steps: int | None,
    data: str | None,
    device: str,
) -> dict[str, float]:
    """Train one variant, go on training, or find its recipe trained, and return its figures."""
    tables = read_toml(recipes.find("encoder-stdlib"))
    blocks = tables["model"]["layers"][0].partition("*")[2]
    seq_len = tables["train"]["seq_len"]
    if mixer["kind"] == "linformer":
        mixer = {**mixer, "n_max": seq_len}
        tables["optim"]["groups"] = [_GROUP]
    tables["model"] |= {"layers": [f"mixer*{blocks}"], "mixers": {"mixer": mixer}}
    tables["train"]["seed"] = seed
    if steps is not None:
        tables["train"]["steps"] = steps
    if data is not None:
        tables["data"] = {"path": data}
    wanted = build(tables)
    key = hashlib.sha256(wanted.to_toml().encode()).hexdigest()[:8]
    run = out / f"{name.replace(', k = ', '-')}-{seed}-{key}"
    if (run / CONFIG).exists():
        resume(run, device=device)
    else:
        train(wanted, run, device=device)
    figures: dict[str, float] = dict(measure(run, device=device))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speed = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    return {
        "parameters": _parameters(run),
        "accuracy": figures["accuracy"],
        "macro_f1": figures["macro_f1"],
        "majority": figures["majority"],
        "loss": figures["loss"],
        "tokens_per_s": statistics.median(speed),
    }


def show(rows: dict[str, dict[str, float]], seeds: int) -> None:
    """Print the table."""
    title = f"encoder-stdlib, {seeds} seed{'s' if seeds > 1 else ''}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    headings = ("", "parameters", "accuracy", "macro-F1", "loss", "tokens/s")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['parameters']:,.0f}",
            f"{row['accuracy']:.1%}",
            f"{row['macro_f1']:.3f}",
            f"{row['loss']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
        )
    Console().print(table)
    if rows:
        majority = next(iter(rows.values()))["majority"]
        print(f"always the most frequent class: {majority:.1%}")


def _parameters(run: Path) -> int:
    from gla.models.encoder import Encoder

    return Encoder.load(run).num_parameters()


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


if __name__ == "__main__":
    tyro.cli(bench)
