"""HGRN2 against a loop over tokens, and its bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gla.errors import ConfigError
from gla.layers.hgrn2 import HGRN2, HGRN2Config
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel


@torch.no_grad()
def test_equals_a_loop(make):
    layer: Any = make({"kind": "hgrn2", "num_heads": 2})
    layer.set_depth(2, 5)
    x = torch.randn(9, 16, dtype=torch.float64)
    low = (2 + torch.sigmoid(layer.gate.bound_logits)) / 5
    forget = low + (1 - low) * torch.sigmoid(x @ layer.gate.proj.weight.T)
    q, v = F.silu(x @ layer.q_proj.weight.T), x @ layer.v_proj.weight.T
    rows = []
    S = torch.zeros(2, 8, 8, dtype=torch.float64)
    for t in range(9):
        heads = []
        for h in range(2):
            part = slice(8 * h, 8 * h + 8)
            f = forget[t, part]
            S[h] = f[:, None] * S[h] + torch.outer(1 - f, v[t, part])
            o = q[t, part] @ S[h] / 8**0.5
            heads.append(o / (o.square().mean() + 1e-5).sqrt() * layer.norm.weight)
        rows.append(torch.cat(heads))
    wanted = torch.stack(rows) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x[None])[0][0], wanted, rtol=1e-11, atol=1e-12)


def test_bounds_near_zero(make):
    """f = b + (1 - b) sigmoid(x) down to 2.5e-8: its log and gradients against fp64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        gate: Any = make({"kind": "hgrn2", "num_heads": 2}).gate.to(dtype)
        torch.nn.init.constant_(gate.bound_logits, -17.5)
        torch.nn.init.eye_(gate.proj.weight)
        x = torch.tensor([-60.0, -17.0, -1.0, 0.0, 3.0, 17.0, 60.0], dtype=dtype)
        x = x.view(1, 7, 1).repeat(1, 1, 16).requires_grad_()
        log_f, take = gate(x)
        grads = torch.autograd.grad(log_f.sum() + take.sum(), [x, gate.bound_logits])
        found.append([log_f, take, *grads])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-12)


def test_later_layers_remember_for_longer():
    config = ModelConfig(d_model=16, vocab_size=8, layers=["hgrn2*4"])
    blocks: Any = LanguageModel(config).blocks
    x = torch.full((1, 1, 16), -100.0)
    for layer, block in enumerate(blocks):
        torch.nn.init.ones_(block.mixer.gate.proj.weight)
        log_decay, take = block.mixer.gate(x)  # a gate that wants to forget everything
        forget = log_decay.exp()
        torch.testing.assert_close(forget + take, torch.ones(1, 1, 16))
        bound = (layer + torch.sigmoid(torch.tensor(-2.0))) / 4
        torch.testing.assert_close(forget, bound.expand(1, 1, 16))


def test_wrong_heads_are_named():
    with pytest.raises(ConfigError, match="num_heads: got 3 heads for d_model = 16"):
        HGRN2(16, HGRN2Config(num_heads=3))


def test_a_gate_near_one_keeps_its_digits():
    layer = HGRN2(16, HGRN2Config())
    torch.nn.init.ones_(layer.gate.proj.weight)
    x = torch.full((1, 1, 16), 1.0)  # a logit of 16: what is taken in is 1e-7
    log_decay, take = layer.gate(x)
    torch.testing.assert_close(log_decay, -take, rtol=1e-5, atol=0)
    assert 0 < take.max() < 1.2e-7
