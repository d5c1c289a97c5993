"""Mamba-2 against a loop over tokens, and its initialization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gla.errors import ConfigError
from gla.layers.mamba2 import Mamba2, Mamba2Config


@torch.no_grad()
def test_equals_a_loop(make):
    layer: Any = make({"kind": "mamba2", "num_heads": 4, "state_dim": 5, "conv_width": 3})
    x = torch.randn(9, 16, dtype=torch.float64)
    mixed = x @ layer.in_proj.weight.T
    weight = layer.conv.weight.T.unsqueeze(1)
    mixed = F.silu(F.conv1d(F.pad(mixed.T, (2, 0)), weight, groups=len(weight)).T)
    u, B, C = mixed.split([32, 5, 5], -1)
    step = F.softplus(x @ layer.gate.proj.weight.T + layer.gate.proj.bias)
    S = torch.zeros(4, 5, 8, dtype=torch.float64)
    rows = []
    for t in range(9):
        heads = []
        for h in range(4):
            value = u[t, 8 * h : 8 * h + 8]
            decay = torch.exp(-torch.exp(layer.gate.log_rate[h]) * step[t, h])
            S[h] = decay * S[h] + torch.outer(B[t], step[t, h] * value)
            heads.append(C[t] @ S[h] + layer.skip[h] * value)
        o = torch.cat(heads) * F.silu(layer.gate_proj(x[t]))
        rows.append(o / (o.square().mean() + 1e-5).sqrt() * layer.norm.weight)
    wanted = torch.stack(rows) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x[None])[0][0], wanted, rtol=1e-11, atol=1e-12)


def test_steps_and_rates_start_in_their_ranges():
    layer = Mamba2(1024, Mamba2Config())
    assert (layer.num_heads, layer.value_dim, layer.config.state_dim) == (32, 64, 128)
    step, log_decay = layer.gate(torch.zeros(1, 1, 1024))
    assert 1e-3 <= step.min() < 5e-3 and 2e-2 < step.max() <= 1e-1
    rate = -log_decay / step
    assert 0.999 <= rate.min() < 4 and 12 < rate.max() <= 16.001
    assert Mamba2(16, Mamba2Config()).num_heads == 1


def test_wrong_options_say_what_is_wrong():
    with pytest.raises(ConfigError, match=r"num_heads: got 3 heads for expand \* d_model = 32"):
        Mamba2(16, Mamba2Config(num_heads=3))
    with pytest.raises(ConfigError, match="key_dim: got 600 features a head, expected at most 512"):
        Mamba2(16, Mamba2Config(state_dim=600))
