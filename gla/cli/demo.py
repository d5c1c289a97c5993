"""``gla demo``: the whole way from raw text to generated text, on what every Python carries."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gla.cli import recipes
from gla.cli.arguments import call, print_json

PROMPT = 'def read_lines(path):\n    """'
_SAMPLE = "samples/demo.txt"


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(demo, "gla demo", argv)


def demo(
    *,
    run: Path | None = None,
    steps: int | None = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Train a tokenizer and a small gated model, validate it, and let it write. Offline.

    The text is the source of Python's own standard library. A few minutes on two cores.

    Args:
        run: Folder of the run, which must not hold one yet; runs/demo by default, or the first of
            runs/demo-2, runs/demo-3, … that holds none. The data are prepared into data/ once, and
            used again.
        steps: Train for so many steps instead of the recipe's.
        device: auto, cpu, cuda, cuda:N or mps.
        json: Print one JSON object instead of the table.
    """
    from gla.cli.eval import measure
    from gla.cli.sample import sampler
    from gla.compare.references import references
    from gla.train.config import load_recipe
    from gla.train.loop import train

    began = time.perf_counter()
    run = run or next_run(Path("runs"))
    overrides = [] if steps is None else [("train.steps", str(steps))]
    config = load_recipe(recipes.find("demo"), overrides)
    train(config, run, device=device, sampler=sampler)
    _note("evaluating the newest checkpoint, and the references on the same text")
    rows = {"gated model": measure(run, device=device)}
    rows |= references(config.data.path)
    sample = continue_prompt(run, device)
    figures = {
        "rows": rows,
        "decode_state_bytes": decode_state_bytes(run),
        "seconds": time.perf_counter() - began,
        "run": str(run),
        "tensorboard": str(run / "tb"),
        "sample": str(run / _SAMPLE),
    }
    if json:
        print_json(figures)
        return 0
    print(f"\n{PROMPT}{sample}\n")
    show(figures)
    return 0


def next_run(parent: Path) -> Path:
    """Return the first of demo, demo-2, demo-3, … in ``parent`` that holds no run."""
    names = itertools.chain(["demo"], (f"demo-{i}" for i in itertools.count(2)))
    return next(parent / n for n in names if not (parent / n / "config.toml").exists())


def continue_prompt(run: Path, device: str) -> str:
    """Let the run's model continue ``PROMPT``; both also go to a file of the run."""
    from gla.generate.session import Session
    from gla.train.device import resolve_device

    session = Session.open(run, device=str(resolve_device(device)))
    session.read(PROMPT)
    pieces = session.generate(max_new_tokens=160, temperature=0.7, top_p=0.95, seed=0)
    text = "".join(pieces)
    (run / _SAMPLE).parent.mkdir(exist_ok=True)
    (run / _SAMPLE).write_text(PROMPT + text, encoding="utf-8")
    return text


def decode_state_bytes(run: Path) -> int:
    """Return the bytes of the state that one sequence needs while it is decoded."""
    from gla import state
    from gla.models.language_model import LanguageModel

    return state.nbytes(LanguageModel.load(run, device="cpu").init_state(1))


def show(figures: Mapping[str, Any]) -> None:
    """Print the table and what comes next."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = figures["rows"]
    size = rows["gated model"]["bytes"]
    table = Table(title=f"validation: {size:,} bytes of text not trained on", box=box.SIMPLE_HEAD)
    for heading in ("", "loss (nats/token)", "perplexity", "bits per byte"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in rows.items():
        cells = [f"{row['loss']:.3f}", f"{row['ppl']:.2f}"] if "loss" in row else ["–", "–"]
        table.add_row(name, *cells, f"{row['bpb']:.3f}")
    Console().print(table)
    run = figures["run"]
    print(f"decode state   {figures['decode_state_bytes']:,} bytes, after any number of tokens")
    print(f"run            {run}")
    print(f"TensorBoard    {figures['tensorboard']}")
    print(f"sample         {figures['sample']}")
    print(f"time           {figures['seconds']:.0f} s")
    programs = programs_prefix()
    print("\nnext")
    print(f"  {programs}gla generate {run} --prompt 'import '")
    print(f"  {programs}tensorboard --logdir {run}/tb")
    print(f"  {programs}gla train stdlib --dry-run")


def programs_prefix() -> str:
    """Return what must stand before ``gla`` so that the reader's shell finds it: often nothing."""
    if shutil.which("gla"):
        return ""
    folder = Path(sys.executable).parent
    here = Path.cwd()
    return f"{folder.relative_to(here) if folder.is_relative_to(here) else folder}{os.sep}"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
