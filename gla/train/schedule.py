"""The learning rate as a function of the step, without memory: a resumed run cannot restart it."""

from __future__ import annotations

import math

from gla.train.config import ScheduleConfig


def warmup_steps(wanted: int, steps: int, base: int = 0) -> int:
    """Return the steps of warm-up, cut where it is longer than the run.

    It is cut to a tenth of the run; that of a group of parameters, which was to be longer than that
    of all others, not below theirs.

    Args:
        wanted: Steps of warm-up.
        steps: Updates of the whole run.
        base: ``schedule.warmup_steps``, where ``wanted`` is that of a group.
    """
    if wanted < steps:
        return wanted
    return max(1, steps // 10, base if base < steps else 0)


def lr_factor(config: ScheduleConfig, steps: int, step: int, warmup: int | None = None) -> float:
    """Return what the peak learning rate is multiplied by in update ``step``.

    Linear warm-up, then half a cosine or a line down to ``min_lr_ratio``, a constant rate, or
    ("wsd", arXiv 2404.06395) a constant rate and a linear decay over the last ``decay_fraction`` of
    the steps.

    Args:
        config: The [schedule] section.
        steps: Updates of the whole run, at least 1.
        step: The update, from 0 to ``steps - 1``; the last one has the lowest rate.
        warmup: Steps of warm-up in place of those of ``config``.

    Returns:
        A factor in (0, 1], or 0 at the end where ``min_lr_ratio`` is 0.
    """
    base = config.warmup_steps
    warmup = warmup_steps(base if warmup is None else warmup, steps, base)
    if step < warmup:
        return (step + 1) / warmup
    start = warmup
    if config.kind == "wsd":
        start = max(warmup, steps - round(config.decay_fraction * steps))
    if step < start or config.kind == "constant":
        return 1.0
    # The first step after ``start`` already goes down; the last reaches the floor exactly.
    done = (step - start + 1) / (steps - start)
    shape = (1 + math.cos(math.pi * done)) / 2 if config.kind == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
