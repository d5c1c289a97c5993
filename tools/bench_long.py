"""What reading without end costs: memory and decode steps at short and at long positions.

    python tools/bench_long.py [--tokens 1000000] [--written 50000] [--json] [--plot long.png]
    python tools/bench_long.py --contexts 256 4096 32768       # beside full softmax models

Logits of a text cut in two are compared with those of the whole. Resident memory is noted while
``--tokens`` are read and ``--written`` are generated, for a recurrent model and a hybrid with
windows; then steps at position 1,000 and at the end are timed in turn. With ``--contexts`` steps
after so many tokens are timed for the same sizes with full softmax layers, for the recurrent
model's compiled step, and for the Llama of transformers with as many parameters and its cache,
where that can be imported.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla import state as states
from gla.generate.decoder import PREFILL_TOKENS, Decoder, narrow
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.process import keep_freed_memory
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


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes() -> int | None:
    """Memory that this process has allocated and not freed (glibc).

    The resident memory also has what the C library keeps of freed blocks, which comes and goes.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def step_seconds(step: Callable[[], object], *others: Callable[[], object]) -> list[float]:
    """Median time of each step, taken in turns, so that a busy moment meets all of them."""
    steps = (step, *others)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(60):
        for run, noted in zip(steps, times, strict=True):
            began = time.perf_counter()
            run()
            noted.append(time.perf_counter() - began)
    return [statistics.median(noted) for noted in times]


class Steps:
    """Steps of one row, each from the state that the one before left."""

    def __init__(self, decoder: Decoder, state: ModelState) -> None:
        self.decoder, self.state = decoder, states.map_tensors(state, torch.clone)
        self.token = torch.zeros(1, dtype=torch.int64)

    def __call__(self) -> None:
        self.state = self.decoder.step(self.token, self.state)[1]


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
    early = Steps(decoder, state)
    position, memory, live = [1000], [resident_bytes()], [allocated_bytes()]
    began = time.perf_counter()
    for _ in range(_NOTED):
        state = read(decoder, state, tokens // _NOTED)
        position.append(position[-1] + tokens // _NOTED)
        memory.append(resident_bytes())
        live.append(allocated_bytes())
    reading = time.perf_counter() - began
    token: Tensor = torch.zeros(1, dtype=torch.int64)
    began = time.perf_counter()
    for i in range(written):
        logits, state = decoder.step(token, state)
        token = logits.argmax(-1)
        if i % max(1, written // _NOTED) == 0:
            position.append(1000 + tokens // _NOTED * _NOTED + i + 1)
            memory.append(resident_bytes())
            live.append(allocated_bytes())
    writing = time.perf_counter() - began
    at_1000, at_end = step_seconds(early, Steps(decoder, state))
    # The first pieces make the buffers that all later ones use.
    settled, kept = memory[2:], [x for x in live[2:] if x]
    return {
        "position": position,
        "resident_bytes": memory,
        "memory_change": max(settled) / min(settled) - 1,
        "allocated_bytes": live,
        "allocated_change": max(kept) / min(kept) - 1 if kept else None,
        "state_bytes": states.nbytes(state),
        "read_tokens_per_s": tokens // _NOTED * _NOTED / reading,
        "written_tokens_per_s": written / writing if written else None,
        "step_us_at_1000": 1e6 * at_1000,
        "step_us_at_end": 1e6 * at_end,
    }


def bench_contexts(
    decoders: dict[str, Decoder], llama: Any, context: int
) -> dict[str, dict[str, float]]:
    """Steps after a context, all models in turn, and the bytes of their states."""
    steps: dict[str, Any] = {
        name: Steps(decoder, read(decoder, None, context)) for name, decoder in decoders.items()
    }
    sizes = {name: states.nbytes(step.state) for name, step in steps.items()}
    if llama is not None:
        steps["llama"] = LlamaSteps(llama, context)
        sizes["llama"] = steps["llama"].nbytes()
    return {
        name: {"tokens_per_s": 1 / seconds, "state_bytes": sizes[name]}
        for name, seconds in zip(steps, step_seconds(*steps.values()), strict=True)
    }


class LlamaSteps:
    """Steps of transformers' Llama with its own cache, after so many random tokens."""

    def __init__(self, model: Any, context: int) -> None:
        from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

        self.model, self.cache = model, DynamicCache(config=model.config)
        with torch.inference_mode():
            for first in range(0, context, PREFILL_TOKENS):
                size = min(PREFILL_TOKENS, context - first)
                piece = torch.randint(model.config.vocab_size, (1, size))
                model(piece, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token = torch.zeros(1, 1, dtype=torch.int64)

    def __call__(self) -> None:
        with torch.inference_mode():
            self.model(self.token, past_key_values=self.cache, use_cache=True)

    def nbytes(self) -> int:
        """Bytes of the keys and values it holds."""
        return sum(x.nbytes for layer in self.cache.layers for x in (layer.keys, layer.values))


def llama_like(model: LanguageModel) -> Any:
    """transformers' Llama of the same width, depth and vocabulary; None where it is missing.

    The width of its feed-forward layers is the one that brings its parameters nearest.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    config = model.config
    d, depth = config.d_model, len(model.blocks)
    fixed = (1 + (not config.tie_embeddings)) * config.vocab_size * d + depth * (4 * d * d + 2 * d)
    parameters = sum(x.numel() for x in model.parameters())
    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=d,
        intermediate_size=max(1, round((parameters - fixed) / (3 * d * depth))),
        num_hidden_layers=depth,
        num_attention_heads=max(1, d // 64),
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=1 << 20,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(sizes).eval()


def parity(decoder: Decoder, tokens: int = 512, cuts: int = 32) -> float:
    """Largest difference of logits, over the largest logit, between a text cut in two and whole."""
    text = torch.randint(decoder.model.config.vocab_size, (1, tokens))
    with torch.no_grad():
        whole, worst = decoder.model(text).logits, 0.0
        for cut in torch.linspace(1, tokens - 1, cuts).long().tolist():
            first = decoder.model(text[:, :cut])
            second = decoder.model(text[:, cut:], state=first.state)
            given = torch.cat([first.logits, second.logits], 1)
            worst = max(worst, float((given - whole).abs().max() / whole.abs().max()))
    return worst


def plot(figures: dict[str, Any], path: str) -> None:
    """Memory over the run, one line a model; tokens/s over the context where that was measured."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("memory", "contexts") if figures[kind]]
    figure = Figure(figsize=(7, 4 * len(kinds)), layout="constrained")
    for kind, axes in zip(kinds, figure.subplots(len(kinds), squeeze=False)[:, 0], strict=True):
        if kind == "memory":
            for name, row in figures[kind].items():
                megabytes = [x / 1e6 for x in row["resident_bytes"]]
                axes.plot(row["position"], megabytes, label=name)
            axes.set(xlabel="tokens read, then written", ylabel="resident memory (MB)")
            axes.set_ylim(0, 1.25 * axes.dataLim.y1)
        else:
            for name in next(iter(figures[kind].values())):
                speeds = [rows[name]["tokens_per_s"] for rows in figures[kind].values()]
                axes.plot(list(figures[kind]), speeds, marker="o", label=name)
            axes.set(xlabel="tokens before the step", ylabel="steps a second")
            axes.set_xscale("log")
            axes.set_yscale("log")
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
    parser.add_argument("--plot", help="a PNG of memory over the run and speed over context")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()  # as the commands do
    decoders = {
        name: Decoder(
            narrow(
                LanguageModel(
                    ModelConfig(
                        d_model=options.d_model,
                        vocab_size=options.vocab_size,
                        layers=[pattern.format(options.layers, options.layers // 4)],
                    )
                ).eval(),
                "fp32",
            )
        )
        for name, pattern in KINDS.items()
    }
    figures: dict[str, Any] = {"memory": {}, "contexts": {}, "parity": {}}
    llama = llama_like(decoders["recurrent"].model) if options.contexts else None
    compiled = Decoder(decoders["recurrent"].model, compiled=True)
    if options.contexts and not options.json:
        sizes = {n: sum(x.numel() for x in d.model.parameters()) for n, d in decoders.items()}
        if llama is not None:
            sizes["llama"] = sum(x.numel() for x in llama.parameters())
        print(", ".join(f"{name} {size:,} parameters" for name, size in sizes.items()))
        if llama is None:
            print("llama: transformers is not installed")
    # Memory first: blocks that long contexts leave behind would hide what grows.
    for name in ("recurrent", "hybrid") if options.tokens else ():
        row = bench_memory(decoders[name], options.tokens, options.written)
        figures["memory"][name] = row
        if not options.json:
            print(
                f"{name:10} memory {row['resident_bytes'][-1] / 1e6:.0f} MB, changes by "
                f"{100 * row['memory_change']:.2f} %, of what is allocated by "
                f"{100 * (row['allocated_change'] or math.nan):.2f} %; "
                f"step {row['step_us_at_1000']:.0f} µs at "
                f"1,000, {row['step_us_at_end']:.0f} µs at the end; reads "
                f"{row['read_tokens_per_s']:,.0f} tokens/s"
            )
    for context in options.contexts:
        rows = bench_contexts(decoders | {"compiled": compiled}, llama, context)
        figures["contexts"][context] = rows
        for name, row in rows.items() if not options.json else ():
            print(
                f"context {context:7,} {name:10} {row['tokens_per_s']:8.1f} tokens/s, state "
                f"{row['state_bytes'] / 1e6:8.2f} MB",
                flush=True,
            )
    for name in ("recurrent", "hybrid"):
        figures["parity"][name] = parity(decoders[name])
        if not options.json:
            print(f"{name:10} logits of a text cut in two differ by {figures['parity'][name]:.1e}")
    if options.json:
        print(json.dumps(figures, indent=2))
    if options.plot:
        plot(figures, options.plot)


if __name__ == "__main__":
    main()
