"""Which parameter is decayed and how fast it learns, and the optimizer over these groups.

Weight decay pulls a weight to 0, which is right for matrices and wrong for what has another natural
value: norms, biases, and the projections that make forget gates, where 0 means half of the memory
is lost at every token.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn

from gla.train.config import GroupConfig, OptimConfig, ScheduleConfig
from gla.train.schedule import lr_factor


class Facts(NamedTuple):
    """How a parameter is updated.

    Attributes:
        lr_factor: The learning rate is multiplied by it.
        weight_decay: Times the learning rate.
        warmup_steps: Its own warm-up, or None.
    """

    lr_factor: float
    weight_decay: float
    warmup_steps: int | None = None


def group_of(name: str, groups: list[GroupConfig]) -> GroupConfig | None:
    """Return the first group whose pattern is found in the name of a parameter."""
    return next((group for group in groups if re.search(group.pattern, name)), None)


def parameter_facts(model: nn.Module, config: OptimConfig) -> dict[str, Facts]:
    """Return how each parameter is updated, by name.

    By default a parameter is decayed if it has two or more dimensions and its module does not set
    ``no_weight_decay = True`` (gate projections do). The first of ``config.groups`` whose pattern
    is found in the name decides instead.
    """
    owners = {
        id(parameter): module
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    }
    facts = {}
    for name, parameter in model.named_parameters():
        spared = parameter.ndim < 2 or getattr(owners[id(parameter)], "no_weight_decay", False)
        decay = 0.0 if spared else config.weight_decay
        facts[name] = Facts(1.0, decay)
        if group := group_of(name, config.groups):
            own = decay if group.weight_decay is None else group.weight_decay
            facts[name] = Facts(group.lr_factor, own, group.warmup_steps)
    return facts


def unmatched_groups(model: nn.Module, config: OptimConfig) -> list[str]:
    """Return the patterns of ``config.groups`` that are found in no parameter's name."""
    names = [name for name, _ in model.named_parameters()]
    return [g.pattern for g in config.groups if not any(re.search(g.pattern, n) for n in names)]


def part_of(name: str) -> str:
    """Return the part of a model that a parameter belongs to, for norms by part.

    "blocks.3.mixer.gate.up.weight" is of "mixer.gate", "embed.weight" of "embed".
    """
    parts = [part for part in name.split(".")[:-1] if not part.isdecimal()]
    if parts[:1] == ["blocks"]:
        parts = parts[1:]
    keep = 2 if parts[1:2] == ["gate"] else 1
    return ".".join(parts[:keep]) or name


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW, each over its own parameters, as one optimizer.

    Groups and state are those of the two: a learning rate set here reaches them, and a state saved
    from here is whole.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        muon.state = adamw.state = self.state
        self.parts = (muon, adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        for part in self.parts:
            part.step()


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer over one group for each kind of ``Facts``.

    A group keeps them as ``group["facts"]``; ``set_lr`` uses them. AdamW is the fused form: one
    pass over the memory of each parameter. Muon takes the decayed weights of the linear maps
    inside ``blocks``; embedding, head, convolutions, norms and gates stay with AdamW.
    """
    facts = parameter_facts(model, config)
    inside = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name
        if not getattr(module, "no_weight_decay", False)
    }
    groups: dict[tuple[bool, Facts], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        muon = config.kind == "muon" and name in inside
        groups.setdefault((muon, facts[name]), []).append(parameter)
    tables = [
        (muon, {"params": parameters, "weight_decay": how.weight_decay, "facts": how})
        for (muon, how), parameters in groups.items()
    ]
    adamw = torch.optim.AdamW(
        [table for muon, table in tables if not muon],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    if config.kind == "adamw":
        return adamw
    matrices = [table for muon, table in tables if muon]
    return MuonAdamW(
        torch.optim.Muon(matrices, lr=config.lr, adjust_lr_fn="match_rms_adamw"), adamw
    )


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments to come, fp32 like the weights: two for AdamW, one for Muon."""

    def size(groups: list[dict[str, Any]]) -> int:
        return sum(p.numel() * p.element_size() for group in groups for p in group["params"])

    muon = size(optimizer.parts[0].param_groups) if isinstance(optimizer, MuonAdamW) else 0
    return 2 * size(optimizer.param_groups) - muon


def set_lr(
    optimizer: torch.optim.Optimizer, peak: float, schedule: ScheduleConfig, steps: int, step: int
) -> float:
    """Set the learning rate of every group for an update, and return that without a factor.

    Args:
        optimizer: From ``build_optimizer``.
        peak: ``optim.lr``.
        schedule: The [schedule] section.
        steps: Updates of the whole run.
        step: The update, from 0.
    """
    for group in optimizer.param_groups:
        how: Facts = group["facts"]
        factor = how.lr_factor * lr_factor(schedule, steps, step, how.warmup_steps)
        group["lr"] = peak * factor
    return peak * lr_factor(schedule, steps, step)
