"""The linear-attention layer against a loop over tokens, its defaults and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gla
from gla.errors import ConfigError
from gla.layers.linear_attention import LinearAttention, LinearAttentionConfig

from .conftest import LINEAR

MAPS = {"identity": lambda x: x, "elu": lambda x: F.elu(x) + 1, "silu": F.silu}
MAPS["relu"] = lambda x: F.relu(x) + 1e-3


def loop(layer, x):
    """The layer token by token and head by head, written from the definition. x [T, D]."""
    config, T = layer.config, x.shape[0]
    H, G, K, V = layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    if layer.conv is not None:
        W = layer.conv.weight.shape[0]
        weight = layer.conv.weight.T.unsqueeze(1)
        qkv = F.silu(F.conv1d(F.pad(qkv.T, (W - 1, 0)), weight, groups=len(weight)).T)
    q, k, v = qkv.split([H * K, G * K, G * V], -1)
    q, k = (MAPS[config.feature_map](u) for u in (q, k))
    logits = torch.zeros(0)
    if config.gate == "channel":
        logits = F.linear(layer.gate.down(x), layer.gate.up.weight, layer.gate.up.bias)
    elif config.gate == "head":
        logits = layer.gate.proj(x).repeat_interleave(K, -1)
    rows = []
    S = torch.zeros(H, K, V, dtype=x.dtype)
    z = torch.zeros(H, K, dtype=x.dtype)
    for t in range(T):
        heads = []
        for h in range(H):
            g = h // (H // G)
            key, value = k[t, g * K : (g + 1) * K], v[t, g * V : (g + 1) * V]
            decay = torch.ones(K, dtype=x.dtype)
            if config.gate == "fixed":
                decay = decay * (1 - 2.0 ** (-5 - g))
            elif config.gate != "none":
                decay = torch.sigmoid(logits[t, g * K : (g + 1) * K]) ** (1 / 16)
            S[h] = decay[:, None] * S[h] + torch.outer(key, value)
            z[h] = decay * z[h] + key
            query = q[t, h * K : (h + 1) * K]
            if config.normalize:
                heads.append(query @ S[h] / (query @ z[h]))
            else:
                o = query @ S[h] / K**0.5
                heads.append(o / (o.square().mean() + config.norm_eps).sqrt() * layer.norm.weight)
        rows.append(torch.cat(heads))
    o = torch.stack(rows)
    if config.output_gate:
        o = o * F.silu(layer.gate_proj(x))
    return layer.out_proj(o)


@torch.no_grad()
@pytest.mark.parametrize("name", LINEAR)
def test_equals_a_loop(make, name):
    layer = make({"kind": "linear_attention", **LINEAR[name]})
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    y, _ = layer(x)
    wanted = torch.stack([loop(layer, row) for row in x])
    # The constants of "fixed" are fp32.
    tolerance = 1e-6 if name == "fixed" else 1e-11
    torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance)


def test_defaults_are_those_of_the_paper():
    layer: Any = LinearAttention(256, LinearAttentionConfig())
    assert (layer.num_heads, layer.key_dim, layer.value_dim) == (4, 32, 64)
    assert layer.gate.down.weight.shape == (16, 256)
    assert layer.gate.up.weight.shape == (128, 16)
    x = torch.randn(1, 50, 256)
    log_decay = layer.gate(x)
    assert log_decay.shape == (1, 50, 4, 32)
    # A gate that starts at one half: logsigmoid(0) / 16.
    torch.testing.assert_close(log_decay.mean(), torch.tensor(-0.0433), atol=1e-3, rtol=0)
    assert LinearAttention(48, LinearAttentionConfig()).num_heads == 1


def test_gates_are_never_decayed_and_compute_in_fp32_under_autocast():
    layer: Any = LinearAttention(64, LinearAttentionConfig(gate="head"))
    assert layer.gate.proj.no_weight_decay
    x = torch.randn(1, 5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_decay = layer.gate(x)
    assert log_decay.dtype == torch.float32
    assert torch.equal(log_decay, layer.gate(x))


def test_gradient_reaches_every_parameter(make):
    for table in LINEAR.values():
        layer = make({"kind": "linear_attention", **table})
        layer(torch.randn(1, 8, 16, dtype=torch.float64))[0].square().sum().backward()
        for name, p in layer.named_parameters():
            assert p.grad is not None and p.grad.abs().sum() > 0, name


def test_recording_keeps_a_detached_sample_only_when_asked():
    layer = LinearAttention(64, LinearAttentionConfig())
    layer(torch.randn(2, 500, 64))
    assert layer.last_log_decay is None
    layer.record = True
    layer(torch.randn(2, 500, 64))
    sample = layer.last_log_decay
    assert sample is not None and not sample.requires_grad
    assert 200 < len(sample) <= 256 and sample.shape[1:] == (1, 32)
    assert (sample < 0).all()
    fixed: Any = LinearAttention(128, LinearAttentionConfig(gate="fixed"))
    fixed.record = True
    fixed(torch.randn(1, 3, 128))
    torch.testing.assert_close(fixed.last_log_decay.exp(), torch.tensor([1 - 1 / 32, 1 - 1 / 64]))


def test_options_of_the_op_reach_it(make):
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    wanted, _ = make({"kind": "linear_attention"})(x)
    for options in ({"impl": "recurrent"}, {"impl": "torch"}, {"chunk_size": 16}):
        y, _ = make({"kind": "linear_attention", **options})(x)
        torch.testing.assert_close(y, wanted, rtol=1e-11, atol=1e-12)
        assert not torch.equal(y, wanted) or options == {"impl": "torch"}
    with pytest.raises(ValueError, match="chunk_size"):
        make({"kind": "linear_attention", "impl": "recurrent", "chunk_size": 16})(x)


def test_checked_mode_names_a_nan(make):
    layer = make({"kind": "linear_attention"})
    x = torch.full((1, 4, 16), torch.nan, dtype=torch.float64)
    with gla.checks(True), pytest.raises(ValueError, match="NaN"):
        layer(x)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"num_heads": 3}, r"num_heads: got 3 heads for key_dim = 8, and 8 % 3 = 2, expected 0"),
        ({"num_heads": 2, "value_dim": 9}, "for value_dim = 9, and 9 % 2 = 1"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads: got 3 for 4 heads"),
        ({"normalize": True}, "feature_map: got 'identity' with normalize = true, .* elu, relu"),
        ({"feature_map": "silu", "normalize": True}, "feature_map: got 'silu'"),
        ({"gate": "chanel"}, "gate: got 'chanel', expected 'none', 'fixed', 'head' or 'channel'"),
        ({"conv_widht": 4}, "conv_widht: got an unknown key, .* fix by writing 'conv_width'"),
        ({"num_heads": "2"}, "num_heads: got '2', expected a valid integer"),
    ],
)
def test_wrong_options_say_what_is_wrong(make, table, message):
    with pytest.raises(ConfigError, match=message):
        make({"kind": "linear_attention", **table})


def test_a_head_that_no_form_takes_is_refused_when_built() -> None:
    with pytest.raises(ConfigError, match="value_dim: got 1024 a head, expected at most 512"):
        LinearAttention(1024, LinearAttentionConfig(num_heads=1, key_dim=512))
    assert LinearAttention(512, LinearAttentionConfig(num_heads=1)).value_dim == 512
