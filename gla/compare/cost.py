"""What mixers cost over the length: training step, prefill and decoding, time and memory.

All of one width and depth, one sequence at a time. A length is left out where the one before took
so long that it would pass the limit, even if time grew no faster than the length.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from gla.compare.measure import best_time, peak_memory_of
from gla.layers.cache import SoftmaxState
from gla.layers.mixer import build_mixer, mixer_config
from gla.models.config import ModelConfig, presets
from gla.models.language_model import LanguageModel
from gla.state import ModelState, nbytes

KINDS = ("training", "prefill", "decode")
_READ_TOKENS = 512  # by which a state is made that is then lengthened
_DECODED = 200  # tokens at most in a measurement


class Options(NamedTuple):
    """Sizes of the models, and how long to measure.

    Attributes:
        d_model, layers, vocab_size: Of each model.
        lengths: Tokens.
        seconds: Of each timing.
        limit: Seconds of a single run, above which longer lengths are left out.
    """

    d_model: int
    layers: int
    vocab_size: int
    lengths: list[int]
    seconds: float
    limit: float


def causal_presets(d_model: int) -> list[str]:
    """The presets that a language model takes."""
    tables = presets()
    return [n for n, table in tables.items() if build_mixer(d_model, mixer_config(table)).causal]


def measure_variant(
    name: str, options: Options, device: torch.device, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row {"variant", "kind", "length", "seconds", "bytes"} for each length and kind.

    ``seconds`` are of the whole training step or prefill, and of one token in decoding; ``bytes``
    are the peak beside weights and optimizer, and in decoding the state. None where left out.
    """
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=options.d_model,
        vocab_size=options.vocab_size,
        layers=[f"{name}*{options.layers}"],
        tie_embeddings=False,
    )
    model = LanguageModel(config).to(device)
    rows = []
    for kind in KINDS:
        last = (0, 0.0)
        for length in options.lengths:
            note(f"{name}: {kind} at {length:,} tokens")
            seconds = size = None
            if last[0] == 0 or last[1] * length / last[0] <= options.limit:
                seconds, size = _MEASURES[kind](model, length, options, device)
                last = (length, seconds)
            rows.append(
                {
                    "variant": name,
                    "kind": kind,
                    "length": length,
                    "seconds": seconds,
                    "bytes": size,
                }
            )
    return rows


def _training(
    model: LanguageModel, length: int, options: Options, device: torch.device
) -> tuple[float, int | None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(0, options.vocab_size, (1, length + 1), device=device)

    def update() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    update_once = best_time(update, device, options.seconds)  # makes gradients and moments
    return update_once, peak_memory_of(update, device)


def _prefill(
    model: LanguageModel, length: int, options: Options, device: torch.device
) -> tuple[float, int | None]:
    tokens = torch.randint(0, options.vocab_size, (1, length), device=device)
    read = partial(model.prefill, tokens)
    return best_time(read, device, options.seconds), peak_memory_of(read, device)


@torch.no_grad()
def _decode(
    model: LanguageModel, length: int, options: Options, device: torch.device
) -> tuple[float, int]:
    read = math.gcd(length, _READ_TOKENS)
    tokens = torch.randint(0, options.vocab_size, (1, read), device=device)
    state: ModelState = lengthen(model.prefill(tokens)[1], length // read)
    size = nbytes(lengthen(state, 1))  # without spare room
    token, taken, start = tokens[:, -1], [], time.perf_counter()
    for i in range(_DECODED):
        before = time.perf_counter()
        _, state = model.decode_step(token, state)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 3:  # the first grow the caches
            taken.append(time.perf_counter() - before)
        if i >= 10 and time.perf_counter() - start > options.seconds:
            break
    return statistics.median(taken), size


_MEASURES: dict[str, Callable[..., tuple[float, int | None]]] = {
    "training": _training,
    "prefill": _prefill,
    "decode": _decode,
}


def lengthen(state: Any, times: int) -> Any:
    """Return a state as large as after ``times`` as many tokens: caches that grow are repeated.

    The numbers in it are not those of a text: for measurements.
    """
    if isinstance(state, SoftmaxState) and state.filled is not None:
        used = int(state.filled.max())
        k, v = (x[:, :used].repeat(1, times, 1, 1) for x in (state.k, state.v))
        return SoftmaxState(k, v, state.position * times, state.filled * times)
    if isinstance(state, torch.Tensor) or state is None:
        return state
    parts = [lengthen(part, times) for part in state]
    fields = getattr(state, "_fields", None)
    if fields is None:
        return tuple(parts)
    if "position" in fields:  # of rotary angles, rings and the model
        place = fields.index("position")
        parts[place] = parts[place] if parts[place] is None else parts[place] * times
    return type(state)(*parts)


def crossover(
    lengths: Sequence[int], ours: Sequence[float | None], theirs: Sequence[float | None]
) -> float | None:
    """Return the length from which on ours is below theirs, at every longer measured one.

    Between two lengths both are taken as powers of the length (lines on logarithmic axes). The
    shortest length where it is so everywhere; None where it is not at the longest that both have.
    """
    both = [
        (length, math.log(a / b))
        for length, a, b in zip(lengths, ours, theirs, strict=True)
        if a and b
    ]
    if not both or both[-1][1] >= 0:
        return None
    for (short, above), (long, below) in reversed(list(itertools.pairwise(both))):
        if above >= 0:
            share = above / (above - below)
            return short * (long / short) ** share
    return float(both[0][0])


def crossovers(rows: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Compare each variant with a baseline.

    Returns:
        Rows of ``variant``, ``kind``, ``figure``; ``below``, ``equal`` and ``above``: the measured
        lengths at which it is so; and ``length``: that of ``crossover``.
    """
    found = []
    variants = dict.fromkeys(row["variant"] for row in rows)
    for variant, kind, figure in itertools.product(variants, KINDS, ("seconds", "bytes")):
        if variant == baseline:
            continue
        ours, theirs = (
            {r["length"]: r[figure] for r in rows if (r["variant"], r["kind"]) == (name, kind)}
            for name in (variant, baseline)
        )
        at = crossover(list(ours), list(ours.values()), [theirs.get(n) for n in ours])
        both = [(n, ours[n], theirs[n]) for n in ours if None not in (ours[n], theirs.get(n))]
        found.append(
            {
                "variant": variant,
                "kind": kind,
                "figure": figure,
                "length": at,
                "below": [n for n, a, b in both if a < b],
                "equal": [n for n, a, b in both if a == b],
                "above": [n for n, a, b in both if a > b],
            }
        )
    return found
