"""Widths that give variants the same number of parameters.

Parameters are linear in the width inside the feed-forward layers, so two models tell them for every
such width. The width of the model itself is changed only where that does not suffice, and as little
as it has to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gla.errors import ConfigError

TOLERANCE = 0.02
_STEP = 32  # of the width inside the feed-forward layers
# What it costs a width of the model to be a multiple of this number only, in shares of the width by
# which it could as well lie further away.
_ODDNESS = {16: 0.0, 8: 0.05, 4: 0.1}
_FURTHEST = 0.5  # of the width of the model, relative

Table = dict[str, Any]
Counter = Callable[[Table], int]


class Widths(NamedTuple):
    """What a search found.

    Attributes:
        d_model: Of the model.
        mlp_ratio: Width inside the feed-forward layers over it; 0: there are none.
        parameters: Of the whole model.
    """

    d_model: int
    mlp_ratio: float
    parameters: int


def count_on_meta(build: Callable[[], torch.nn.Module]) -> int:
    """Return the parameters of a model, which is built without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def match_widths(model: Mapping[str, Any], target: int, count: Counter) -> Widths:
    """Find widths with which a model has ``target`` parameters within 2 %.

    Args:
        model: A table [model], whose ``d_model`` is changed as little as possible.
        target: Parameters.
        count: Returns those of a table [model].

    Raises:
        ConfigError: No widths do; the message has the nearest.
    """
    base = int(model["d_model"])
    has_mlp = model.get("mlp_ratio", 1) != 0
    best: Widths | None = None
    for width in _candidates(base):
        found = _at_width({**model, "d_model": width}, target, count, has_mlp)
        if found is None:
            continue
        if abs(found.parameters - target) <= TOLERANCE * target:
            return found
        if best is None or abs(found.parameters - target) < abs(best.parameters - target):
            best = found
    got = "no width that works" if best is None else f"{best.parameters:,} at {best.d_model}"
    raise ConfigError(
        f"model.d_model: got {got} as the nearest to {target:,} parameters, expected some within "
        f'{TOLERANCE:.0%}; fix with a larger model.d_model, or with match = "width"'
    )


def _candidates(base: int) -> list[int]:
    """Widths from half to one and a half of ``base``, itself first, near and even ones early."""
    step, reach = min(_ODDNESS), int(base * _FURTHEST)
    widths = {base, *range(-(-(base - reach) // step) * step, base + reach + 1, step)} - {0}

    def cost(width: int) -> float:
        odd = next((c for even, c in _ODDNESS.items() if width % even == 0), 1.0)
        return abs(width - base) / base + (odd if width != base else 0.0)

    return sorted(widths, key=cost)


def _at_width(model: Table, target: int, count: Counter, has_mlp: bool) -> Widths | None:
    """Return the best widths at one ``d_model``, or None where no mixer has that one."""
    width = model["d_model"]
    try:
        if not has_mlp:
            return Widths(width, 0.0, count(model))
        low, high = (count({**model, "mlp_ratio": n * _STEP / width}) for n in (1, 2))
    except ConfigError:
        return None
    steps = max(1, 1 + round((target - low) / (high - low)))
    return Widths(width, steps * _STEP / width, low + (steps - 1) * (high - low))
