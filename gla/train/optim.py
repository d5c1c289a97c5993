"""Which parameter is decayed and how fast it learns, and the optimizer over these groups.

Weight decay pulls a weight to 0, which is right for matrices and wrong for what has another natural
value: norms, biases, and the projections that make forget gates, where 0 means half of the memory
is lost at every token.
"""

from __future__ import annotations

import fnmatch
from typing import Any

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
    """Return the optimizer over one group for each pair of (learning-rate factor, weight decay).

    A group keeps its factor as ``group["lr_factor"]``; ``set_lr`` uses it. AdamW is the fused form:
    one pass over the memory of each parameter. Muon takes the decayed weights of the linear maps
    inside ``blocks``; embedding, head, convolutions, norms and gates stay with AdamW.
    """
    facts = parameter_facts(model, config)
    inside = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name
        if not getattr(module, "no_weight_decay", False)
    }
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        muon = config.kind == "muon" and name in inside
        groups.setdefault((muon, *facts[name]), []).append(parameter)
    tables = [
        (muon, {"params": parameters, "weight_decay": decay, "lr_factor": factor})
        for (muon, factor, decay), parameters in groups.items()
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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to ``lr`` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
