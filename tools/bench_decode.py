"""Decode steps against their floor, and prefill against the forward pass of training.

    python tools/bench_decode.py [--threads 2] [--d-model 512] [--layers 8] [--only eager] [--json]

A decode step of one row reads every weight once, so it cannot take less than the bytes of the
weights over the bandwidth of reads, which is measured in the same process right beside it. Steps
are timed in turns, the best and the median of each are printed; on a busy machine read the best.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from gla.generate.decoder import PREFILL_TOKENS, Decoder, narrow
from gla.generate.session import SessionState
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.ops.memory import empty

VARIANTS = {
    "eager": ("fp32", False),
    "compiled": ("fp32", True),
    "bf16": ("bf16", False),
    "bf16 compiled": ("bf16", True),
    "int8": ("int8", False),
    "int8 compiled": ("int8", True),
}


def read_bandwidth(size: int) -> float:
    """Bytes a second at which ``size`` bytes of fp32 are read and added up, best of ten.

    They lie in memory as the weights do, on huge pages.
    """
    block = empty((size // 4,), torch.float32, torch.device("cpu")).fill_(1)
    return size / min(_seconds(lambda: block.sum()) for _ in range(10))


def weight_bytes(model: LanguageModel) -> int:
    """Bytes that a decode step reads: all weights, but one row only of an untied embedding."""
    skipped = model.embed.weight if model.head is not None else None
    return sum(
        x.numel() * x.element_size() for x in model.state_dict(keep_vars=True).values()
        if x is not skipped
    )  # fmt: skip


def _seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def bench_steps(model: LanguageModel, names: list[str], seconds: float) -> dict[str, Any]:
    """Times of a step of one row for each variant, measured in turns."""
    decoders, steps = {}, {}
    for name in names:
        weights, compiled = VARIANTS[name]
        decoders[name] = decoder = Decoder(narrow(copy.deepcopy(model), weights), compiled)
        state = decoder.model.init_state(1)
        token = torch.zeros(1, dtype=torch.int64)
        began = time.perf_counter()
        for _ in range(3):
            state = decoder.step(token, state)[1]
        print(f"{name}: first steps {time.perf_counter() - began:.1f} s", file=sys.stderr)
        steps[name] = (token, state, [])
    bandwidth, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        bandwidth = max(bandwidth, read_bandwidth(max(1 << 27, weight_bytes(model))))
        for name, decoder in decoders.items():
            token, state, times = steps[name]
            for _ in range(8):
                began = time.perf_counter()
                state = decoder.step(token, state)[1]
                times.append(time.perf_counter() - began)
            steps[name] = (token, state, times)
    rows = {}
    for name, (_, _, times) in steps.items():
        size = weight_bytes(decoders[name].model)
        floor = size / bandwidth
        rows[name] = {
            "weight_bytes": size,
            "floor_ms": 1e3 * floor,
            "best_ms": 1e3 * min(times),
            "median_ms": 1e3 * statistics.median(times),
            "best_over_floor": min(times) / floor,
            "steps": len(times),
        }
    return {"read_bytes_per_s": bandwidth, "rows": rows}


def bench_prefill(model: LanguageModel, seconds: float) -> dict[str, float]:
    """Tokens a second of reading in pieces, and of the forward pass that training makes."""
    tokens = torch.randint(model.config.vocab_size, (1, 2 * PREFILL_TOKENS))
    decoder = Decoder(model)
    state = SessionState(*reversed(decoder.prefill(tokens[:, :1], None)))

    def read() -> None:
        for start in range(0, tokens.shape[1], PREFILL_TOKENS):
            decoder.prefill(tokens[:, start : start + PREFILL_TOKENS], state.model)

    def train() -> None:
        for start in range(0, tokens.shape[1], PREFILL_TOKENS):
            piece = tokens[:, start : start + PREFILL_TOKENS]
            model.loss(piece, piece)

    best = {"prefill": float("inf"), "training_forward": float("inf")}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        best["prefill"] = min(best["prefill"], _seconds(read))
        best["training_forward"] = min(best["training_forward"], _seconds(train))
    speeds = {f"{name}_tokens_per_s": tokens.shape[1] / t for name, t in best.items()}
    return {**speeds, "ratio": best["training_forward"] / best["prefill"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--only", choices=VARIANTS, action="append", help="may be repeated")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each of the two parts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=options.d_model, vocab_size=options.vocab_size, layers=[f"gla*{options.layers}"]
    )
    model = LanguageModel(config).eval()
    steps = bench_steps(model, options.only or list(VARIANTS), options.seconds)
    head = {"threads": options.threads, "parameters": model.num_parameters()}
    if not options.json:
        bandwidth = steps["read_bytes_per_s"] / 1e9
        print(f"{head['parameters']:,} parameters, {options.threads} threads, {bandwidth:.1f} GB/s")
        titles = ("MB", "floor ms", "best ms", "median", "ratio")
        print(f"{'step of one row':16}" + "".join(f"{title:>10}" for title in titles))
        for name, row in steps["rows"].items():
            print(
                f"{name:16}{row['weight_bytes'] / 1e6:10.1f}{row['floor_ms']:10.2f}"
                f"{row['best_ms']:10.2f}{row['median_ms']:10.2f}{row['best_over_floor']:10.2f}",
                flush=True,
            )
    reading = bench_prefill(model, options.seconds)
    if options.json:
        print(json.dumps({**head, **steps, "reading": reading}, indent=2))
        return
    print(
        f"prefill {reading['prefill_tokens_per_s']:,.0f} tokens/s, training forward "
        f"{reading['training_forward_tokens_per_s']:,.0f}, ratio {reading['ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
