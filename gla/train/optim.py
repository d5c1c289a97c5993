"""Which parameter is decayed and how fast it learns, and the optimizer over these groups.

Weight decay pulls a weight to 0, which is right for matrices and wrong for what has another natural
value: norms, biases, and the projections that make forget gates, where 0 means half of the memory
is lost at every token.
"""

from __future__ import annotations

import fnmatch

import torch
from torch import nn

from gla.train.config import OptimConfig


def parameter_facts(model: nn.Module, config: OptimConfig) -> dict[str, tuple[float, float]]:
    """Return (learning-rate factor, weight decay) of each parameter by name.

    By default a parameter is decayed if it has two or more dimensions and its module does not set
    ``no_weight_decay = True`` (gate projections do). The first of ``config.groups`` whose pattern
    matches the name decides instead.
    """
    owners = {
        id(parameter): module
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    }
    facts = {}
    for name, parameter in model.named_parameters():
        spared = parameter.ndim < 2 or getattr(owners[id(parameter)], "no_weight_decay", False)
        factor, decay = 1.0, 0.0 if spared else config.weight_decay
        for group in config.groups:
            if fnmatch.fnmatchcase(name, group.pattern):
                factor = group.lr_factor
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        facts[name] = (factor, decay)
    return facts


def unmatched_groups(model: nn.Module, config: OptimConfig) -> list[str]:
    """Return the patterns of ``config.groups`` that match no parameter."""
    names = [name for name, _ in model.named_parameters()]
    return [
        g.pattern
        for g in config.groups
        if not any(fnmatch.fnmatchcase(n, g.pattern) for n in names)
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over one group for each pair of (learning-rate factor, weight decay).

    A group keeps its factor as ``group["lr_factor"]``; ``set_lr`` uses it. The fused form is used:
    one pass over the memory of each parameter.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    facts = parameter_facts(model, config)
    for name, parameter in model.named_parameters():
        groups.setdefault(facts[name], []).append(parameter)
    tables = [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        for (factor, decay), parameters in groups.items()
    ]
    return torch.optim.AdamW(tables, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to ``lr`` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
