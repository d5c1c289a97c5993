"""Who is decayed, and how fast each group learns."""

from __future__ import annotations

import torch

import gla
from gla.models.language_model import LanguageModel
from gla.train.config import GroupConfig, OptimConfig, ScheduleConfig
from gla.train.optim import (
    Facts,
    MuonAdamW,
    build_optimizer,
    parameter_facts,
    part_of,
    set_lr,
    unmatched_groups,
)

CONSTANT = ScheduleConfig(kind="constant", warmup_steps=0)


def model() -> LanguageModel:
    torch.manual_seed(0)
    mixers = {"a": {"kind": "linear_attention", "conv_width": 4}, "h": {"kind": "linear_attention"}}
    mixers["h"]["gate"] = "head"
    config = gla.ModelConfig(
        d_model=32, vocab_size=64, layers=["a", "h", "window"], mixers=mixers, tie_embeddings=False
    )
    return LanguageModel(config)


def test_norms_biases_and_gates_are_not_decayed_and_all_else_is() -> None:
    facts = parameter_facts(model(), OptimConfig(weight_decay=0.1))
    spared = {name for name, how in facts.items() if how.weight_decay == 0}
    for name in facts:
        part = name.split(".")[-2]
        special = "norm" in part or name.endswith("bias") or ".gate." in name
        assert (name in spared) == special, name
    assert {"blocks.0.mixer.gate.down.weight", "blocks.0.mixer.gate.up.weight"} <= spared
    assert "blocks.1.mixer.gate.proj.weight" in spared
    # The output gate is an ordinary projection of the layer, not a forget gate.
    assert "blocks.0.mixer.gate_proj.weight" not in spared


def test_every_parameter_is_in_one_group() -> None:
    net = model()
    optimizer = build_optimizer(net, OptimConfig())
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in net.parameters())


def test_the_first_matching_group_decides() -> None:
    config = OptimConfig(
        lr=1e-2,
        groups=[
            GroupConfig(pattern=r"\.gate\.", lr_factor=0.5, weight_decay=0.01),
            GroupConfig(pattern=r"^blocks\.0\.", lr_factor=0.0),
        ],
    )
    net = model()
    facts = parameter_facts(net, config)
    assert facts["blocks.0.mixer.gate.up.weight"] == Facts(0.5, 0.01)
    assert facts["blocks.0.mixer.q_proj.weight"] == Facts(0.0, 0.1)
    assert facts["blocks.0.mixer_norm.weight"] == Facts(0.0, 0.0)
    assert facts["blocks.1.mixer.q_proj.weight"] == Facts(1.0, 0.1)

    optimizer = build_optimizer(net, config)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.loss(torch.arange(8)[None], torch.arange(8)[None]).backward()
    set_lr(optimizer, 1e-2, CONSTANT, 10, 5)
    optimizer.step()
    moved = {n: float((p.detach() - before[n]).abs().max()) for n, p in net.named_parameters()}
    assert moved["blocks.0.mixer.q_proj.weight"] == 0
    # AdamW's first step moves each weight by the learning rate (beside the small decay).
    assert 0.004 < moved["blocks.0.mixer.gate.up.weight"] < 0.006
    assert 0.009 < moved["blocks.1.mixer.q_proj.weight"] < 0.011


def test_a_norm_is_told_by_part_of_the_model() -> None:
    assert part_of("blocks.3.mixer.gate.up.weight") == "mixer.gate"
    assert part_of("blocks.3.mixer.q_proj.weight") == "mixer"
    assert part_of("blocks.11.mlp_norm.weight") == "mlp_norm"
    assert part_of("embed.weight") == "embed"
    assert part_of("scale") == "scale"


def test_patterns_without_a_parameter_are_found() -> None:
    groups = [GroupConfig(pattern="gate"), GroupConfig(pattern="gaet")]
    assert unmatched_groups(model(), OptimConfig(groups=groups)) == ["gaet"]


def test_muon_takes_the_matrices_inside_the_blocks_and_keeps_one_state():
    model = gla.LanguageModel(gla.ModelConfig(d_model=32, vocab_size=48, layers=["gla"]))
    optimizer = build_optimizer(model, OptimConfig(kind="muon", lr=0.01))
    tokens = torch.arange(40).view(1, 40) % 48
    model.loss(tokens, tokens).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_lr(optimizer, 0.02, CONSTANT, 10, 5)
    optimizer.step()
    with_moments = {
        name: "exp_avg_sq" in optimizer.state[p] for name, p in model.named_parameters()
    }
    assert not with_moments["blocks.0.mixer.q_proj.weight"]  # Muon has one momentum
    assert not with_moments["blocks.0.mlp.down_proj.weight"]
    assert with_moments["embed.weight"] and with_moments["blocks.0.mixer.gate.up.weight"]
    assert with_moments["blocks.0.mixer_norm.weight"]
    # An orthogonal update of unit singular values, scaled to 0.2 of AdamW's root mean square.
    name = "blocks.0.mlp.gate_proj.weight"
    update = dict(model.named_parameters())[name].detach() - before[name] * (1 - 0.02 * 0.1)
    rms = float(update.pow(2).mean().sqrt())
    assert 0.6 * 0.2 * 0.02 < rms < 1.3 * 0.2 * 0.02


def test_muon_takes_the_matrices_inside_the_blocks_and_adamw_the_rest() -> None:
    net = model()
    optimizer = build_optimizer(net, OptimConfig(kind="muon", lr=1e-2))
    assert isinstance(optimizer, MuonAdamW)
    muon, adamw = (
        {id(p) for group in part.param_groups for p in group["params"]} for part in optimizer.parts
    )
    assert muon.isdisjoint(adamw)
    for name, parameter in net.named_parameters():
        matrix = name.split(".")[-2].endswith("_proj") and "blocks." in name
        assert (id(parameter) in muon) == matrix, name
        assert (id(parameter) in adamw) == (not matrix), name


def test_a_rate_set_reaches_both_parts_of_muon() -> None:
    net = model()
    optimizer = build_optimizer(net, OptimConfig(kind="muon"))
    net.loss(torch.arange(8)[None], torch.arange(8)[None]).backward()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    set_lr(optimizer, 0.0, CONSTANT, 10, 5)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    set_lr(optimizer, 1e-2, CONSTANT, 10, 5)
    optimizer.step()
    for name in ("embed.weight", "blocks.0.mixer.q_proj.weight"):
        assert not torch.equal(net.get_parameter(name), before[name])
