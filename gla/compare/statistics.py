"""Means over seeds with Student's t intervals, and paired differences.

n values x_1 … x_n with mean m and standard deviation s (over n - 1) have the 95 % interval
m ± t s / sqrt(n), where t leaves 2.5 % of Student's distribution with n - 1 degrees of freedom on
each side. Differences between two variants are taken seed by seed, which takes out what the seed
does to both (the order of the data, the examples).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean and its interval.

    Attributes:
        mean: Over ``n`` values; NaN for none.
        half_width: The interval is mean ± half_width; None for fewer than two values.
        n: How many.
    """

    mean: float
    half_width: float | None
    n: int

    @property
    def distinguishable(self) -> bool:
        """Whether 0 lies outside the interval: for differences."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of values and its 95 % interval."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, None, 0)
    mean = statistics.fmean(values)
    if n == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n), n)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate:
    """Return the mean of value - baseline over the seeds that both have."""
    return estimate([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline)])


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return t with P(|T| < t) = level for Student's T with ``freedom`` degrees of freedom."""
    low, high = 0.0, 1.0
    while _between(high, freedom) < level:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _between(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _between(t: float, freedom: int) -> float:
    """P(|T| < t): Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
