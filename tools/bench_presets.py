"""One table of all presets: size, state, speed, and bits per byte after an equal budget of tokens.

    python tools/bench_presets.py [--presets gla softmax] [--tokens 1000000] [--json]

Each preset is a model of the same width, depth and vocabulary. Columns:

- parameters: of the whole model.
- state: bytes of the decode state of one sequence after 1k and 64k tokens.
- decode: microseconds a token, one sequence, after 1k and 64k tokens; median. The state after 64k
  tokens is that after 1k, with the caches that grow repeated: the numbers in it do not matter.
- train: tokens a second of an update (loss, gradient, AdamW) on 4,096 tokens, in rows of 512 and
  of 4,096; best of the runs that fit into --seconds.
- bits per byte: of the validation text, after --tokens tokens of training with one recipe for all.
  0 leaves it out. The runs stay in --runs: one that is finished is not trained again, one that was
  stopped goes on.

Times are those of this machine, with nothing else running on it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gla
from gla.compare.cost import causal_presets, lengthen
from gla.models.language_model import LanguageModel
from gla.state import ModelState, nbytes
from gla.train.config import build
from gla.train.loop import resume, train
from gla.train.run_folder import CONFIG

READ_TOKENS = 1024  # what a state is made by really reading
UPDATE_TOKENS = 4096


def make_model(name: str, options: argparse.Namespace) -> LanguageModel:
    torch.manual_seed(0)
    config = gla.ModelConfig(
        d_model=options.d_model,
        vocab_size=options.vocab_size,
        layers=[f"{name}*{options.layers}"],
        tie_embeddings=False,
    )
    return LanguageModel(config)


@torch.no_grad()
def decoding(model: LanguageModel, length: int, options: argparse.Namespace) -> tuple[int, float]:
    """Bytes of the state after ``length`` tokens, and microseconds a token from there."""
    read = min(length, READ_TOKENS)
    prompt = torch.randint(0, options.vocab_size, (1, read))
    _, state = model.prefill(prompt)
    state: ModelState = lengthen(state, length // read)
    size = nbytes(lengthen(state, 1))  # without spare room
    token, seconds = prompt[:, -1], []
    end = time.perf_counter() + options.seconds
    for i in range(10_000):
        before = time.perf_counter()
        _, state = model.decode_step(token, state)
        if i >= 3:  # the first grow the caches
            seconds.append(time.perf_counter() - before)
        if i >= 10 and before > end:
            break
    return size, 1e6 * statistics.median(seconds)


def training_speed(model: LanguageModel, length: int, options: argparse.Namespace) -> float:
    """Tokens a second of whole updates on rows of ``length`` tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    rows = max(1, UPDATE_TOKENS // length)
    tokens = torch.randint(0, options.vocab_size, (rows, length + 1))

    def update() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return rows * length / best(update, options.seconds)


def best(run: Callable[[], Any], seconds: float) -> float:
    """Shortest of the runs that fit into ``seconds``, after one to warm up."""
    run()
    shortest, start = math.inf, time.perf_counter()
    while shortest == math.inf or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - before)
    return shortest


def recipe(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same for every preset but for the mixer."""
    steps = max(1, round(options.tokens / (options.seq_len * options.rows)))
    return {
        "model": {
            "d_model": options.d_model,
            "layers": [f"{name}*{options.layers}"],
            "tie_embeddings": False,
        },
        "data": {
            "path": options.data,
            "sources": options.sources,
            "vocab_size": options.vocab_size,
        },
        "train": {
            "steps": steps,
            "seq_len": options.seq_len,
            "global_batch_size": options.rows,
            "seed": options.seed,
        },
        "optim": {"kind": "muon", "lr": options.lr},
        "schedule": {"kind": "cosine", "warmup_steps": max(1, steps // 10), "min_lr_ratio": 0.05},
        "eval": {"interval": steps},
        "checkpoint": {"interval": steps, "keep": 1},
        "metrics": {"interval": max(1, steps // 10)},
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    model = make_model(name, options)
    row: dict[str, Any] = {"preset": name, "parameters": model.num_parameters()}
    for length in options.state_lengths:
        size, microseconds = decoding(model, length, options)
        row[f"state_bytes_{length}"] = size
        row[f"decode_us_{length}"] = microseconds
    for length in options.train_lengths:
        row[f"train_tokens_per_s_{length}"] = training_speed(model, length, options)
    if options.tokens:
        row["val_bits_per_byte"] = bits_per_byte(name, options)
    return row


def bits_per_byte(name: str, options: argparse.Namespace) -> float:
    """Train, go on training, or find this recipe trained, and read its last evaluation."""
    wanted = build(recipe(name, options))
    run = Path(options.runs) / f"{name}-{hashlib.sha256(wanted.to_toml().encode()).hexdigest()[:8]}"
    if (run / CONFIG).exists():
        resume(run, device="cpu")
    else:
        train(wanted, run, device="cpu")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["val_bpb"] for line in lines if "val_bpb" in line][-1]


def short(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name == "val_bits_per_byte":
        return f"{value:.3f}"
    return f"{value:,.0f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = [list(rows[0])] + [[short(name, value) for name, value in r.items()] for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--presets", nargs="+", help="default: all that a language model takes")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--state-lengths", type=int, nargs="+", default=[1024, 65536])
    parser.add_argument("--train-lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each timing")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of training; 0: none")
    parser.add_argument("--seq-len", type=int, default=1024, help="of training")
    parser.add_argument("--rows", type=int, default=4, help="of an update in training")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="data/stdlib-2048", help="prepared first if missing")
    parser.add_argument("--runs", default="runs/presets", help="where the runs are kept")
    parser.add_argument("--sources", nargs="*", default=["stdlib"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    known = causal_presets(options.d_model)
    options.presets = options.presets or known
    for name in options.presets:
        if name not in known:
            parser.error(f"--presets: got {name!r}, expected some of {', '.join(known)}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.presets:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        rows.append(measure(name, options))
    if not options.json:
        print(table(rows))
        return
    facts = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "options": vars(options),
    }
    print(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
