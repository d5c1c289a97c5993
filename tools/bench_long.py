"""What reading without end costs: memory and decode steps at short and at long positions.

    python tools/bench_long.py [--tokens 1000000] [--written 50000] [--json] [--plot long.png]
    python tools/bench_long.py --contexts 256 4096 32768       # beside a full softmax model

Resident memory is noted while ``--tokens`` are read and ``--written`` are generated, and the time
of a step at positions 1,000 and ``--tokens``, for a recurrent model and a hybrid with windows.
With ``--contexts`` models with the same sizes and full softmax layers are timed beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla import state as states
from gla.generate.decoder import PREFILL_TOKENS, Decoder
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.state import ModelState

KINDS = {
    "recurrent": "gla*{0}",
    "hybrid": "(gla*3, window)*{1}",
    "softmax": "softmax*{0}",
}
_NOTED = 32  # times that the memory is noted


def resident_bytes() -> int:
    """Memory of this process that is not swapped out (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def step_seconds(decoder: Decoder, state: ModelState, steps: int = 60) -> float:
    """Median time of a step of one row from a state, which is left as it was."""
    state = states.map_tensors(state, torch.clone)
    token, times = torch.zeros(1, dtype=torch.int64), []
    for _ in range(steps):
        began = time.perf_counter()
        state = decoder.step(token, state)[1]
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def read(decoder: Decoder, state: ModelState | None, tokens: int) -> ModelState:
    """Read so many random tokens, in pieces."""
    vocabulary = decoder.model.config.vocab_size
    while tokens:
        piece = torch.randint(vocabulary, (1, min(tokens, PREFILL_TOKENS)))
        state = decoder.prefill(piece, state)[1]
        tokens -= piece.shape[1]
    assert state is not None
    return state


def bench_memory(decoder: Decoder, tokens: int, written: int) -> dict[str, Any]:
    """Memory while tokens are read and written, and the time of steps at 1,000 and at the end."""
    state = read(decoder, None, 1000)
    early = step_seconds(decoder, state)
    memory, began = [resident_bytes()], time.perf_counter()
    for _ in range(_NOTED):
        state = read(decoder, state, tokens // _NOTED)
        memory.append(resident_bytes())
    reading = time.perf_counter() - began
    token: Tensor = torch.zeros(1, dtype=torch.int64)
    began = time.perf_counter()
    for i in range(written):
        logits, state = decoder.step(token, state)
        token = logits.argmax(-1)
        if i % max(1, written // _NOTED) == 0:
            memory.append(resident_bytes())
    writing = time.perf_counter() - began
    late = step_seconds(decoder, state)
    settled = memory[2:]  # the first pieces make the buffers that all later ones use
    return {
        "resident_bytes": memory,
        "memory_change": max(settled) / min(settled) - 1,
        "state_bytes": states.nbytes(state),
        "read_tokens_per_s": tokens // _NOTED * _NOTED / reading,
        "written_tokens_per_s": written / writing if written else None,
        "step_us_at_1000": 1e6 * early,
        "step_us_at_end": 1e6 * late,
    }


def bench_context(decoder: Decoder, context: int) -> dict[str, float]:
    """Steps after a context, and the bytes of its state."""
    state = read(decoder, None, context)
    return {
        "tokens_per_s": 1 / step_seconds(decoder, state),
        "state_bytes": states.nbytes(state),
    }


def plot(figures: dict[str, Any], path: str) -> None:
    """Memory over the run, one line a model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(xlabel="notes over the run", ylabel="resident memory (MB)")
    for name, row in figures["memory"].items():
        axes.plot([x / 1e6 for x in row["resident_bytes"]], label=name)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--written", type=int, default=50_000)
    parser.add_argument("--contexts", type=int, nargs="*", default=[])
    parser.add_argument("--plot", help="a PNG of memory over the run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    decoders = {
        name: Decoder(
            LanguageModel(
                ModelConfig(
                    d_model=options.d_model,
                    vocab_size=options.vocab_size,
                    layers=[pattern.format(options.layers, options.layers // 4)],
                )
            ).eval()
        )
        for name, pattern in KINDS.items()
    }
    figures: dict[str, Any] = {"memory": {}, "contexts": {}}
    for context in options.contexts:
        rows = {name: bench_context(decoder, context) for name, decoder in decoders.items()}
        figures["contexts"][context] = rows
        for name, row in rows.items() if not options.json else ():
            print(
                f"context {context:7,} {name:10} {row['tokens_per_s']:8.1f} tokens/s, state "
                f"{row['state_bytes'] / 1e6:8.2f} MB"
            )
    for name in ("recurrent", "hybrid") if options.tokens else ():
        row = bench_memory(decoders[name], options.tokens, options.written)
        figures["memory"][name] = row
        if not options.json:
            print(
                f"{name:10} memory {row['resident_bytes'][-1] / 1e6:.0f} MB, changes by "
                f"{100 * row['memory_change']:.2f} %; step {row['step_us_at_1000']:.0f} µs at "
                f"1,000, {row['step_us_at_end']:.0f} µs at the end; reads "
                f"{row['read_tokens_per_s']:,.0f} tokens/s"
            )
    if options.json:
        print(json.dumps(figures, indent=2))
    if options.plot:
        plot(figures, options.plot)


if __name__ == "__main__":
    main()
