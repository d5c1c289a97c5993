"""The linear-attention layer against a loop over tokens, its defaults and its options."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gla
from gla.errors import ConfigError
from gla.layers.linear_attention import LinearAttention, LinearAttentionConfig

from .conftest import LINEAR


def unit(x):
    return x / (x.square().mean() + 1e-6).sqrt()


def features(layer, x, weight):
    """phi of one key or query [K], one feature at a time; ``weight`` is the head's map, if any."""
    K, name = len(x), layer.config.feature_map
    if name == "identity":
        return x
    if name == "silu":
        return x * x.sigmoid()
    if name == "elu":
        return torch.where(x > 0, x, x.exp() - 1) + 1
    if name == "relu":
        return x.clamp_min(0) + 1e-3
    if name == "exp":
        return unit(x).exp()
    if name.startswith("favor"):
        y = unit(x) / K**0.25
        rows = [w for w in layer.feature_map.W]
        rows += [-w for w in rows] if name == "favor_pair" else []
        values = [math.exp(w @ y - y @ y / 2) / len(rows) ** 0.5 for w in rows]
        return torch.tensor(values, dtype=x.dtype)
    if name == "taylor":
        pairs = [x[i] * x[j] / K**0.5 for i in range(K) for j in range(i + 1, K)]
        squares = [x[i] ** 2 / (2 * K) ** 0.5 for i in range(K)]
        return torch.stack([torch.ones_like(x[0]), *(x / K**0.25), *squares, *pairs])
    if name == "hedgehog":
        u = weight[0] @ x + weight[1]
        return torch.cat([2 * u, -2 * u]).softmax(0)
    assert name == "dpfp"
    r = [max(v, 0.0) for v in x.tolist()] + [max(-v, 0.0) for v in x.tolist()]
    shifts = layer.num_features // (2 * K)
    values = [r[i] * r[(i + j) % (2 * K)] for j in range(1, shifts + 1) for i in range(2 * K)]
    return torch.tensor(values, dtype=x.dtype)


def turned(x, t):
    """Rotary embedding of one vector at place t, as a product of complex numbers."""
    half = len(x) // 2
    angle = t * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:half], x[half:]) * torch.exp(1j * angle)
    return torch.cat([z.real, z.imag])


def mapped(layer, x, t, weight):
    if not layer.config.rotary:
        return features(layer, x, weight)
    if layer.config.feature_map.startswith("favor"):
        return features(layer, turned(x, t), weight)
    return turned(features(layer, x, weight), t)


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
    logits = torch.zeros(0)
    if config.gate == "channel":
        logits = F.linear(layer.gate.down(x), layer.gate.up.weight, layer.gate.up.bias)
    elif config.gate == "head":
        logits = layer.gate.proj(x)
    q_maps, k_maps = [None] * H, [None] * G
    if config.feature_map == "hedgehog":
        phi = layer.feature_map
        q_maps = list(zip(phi.q_map, phi.q_bias, strict=True))
        k_maps = list(zip(phi.k_map, phi.k_bias, strict=True))
    rows = []
    S = torch.zeros(H, layer.num_features, V, dtype=x.dtype)
    z = torch.zeros(H, layer.num_features, dtype=x.dtype)
    for t in range(T):
        heads = []
        for h in range(H):
            g = h // (H // G)
            key = mapped(layer, k[t, g * K : (g + 1) * K], t, k_maps[g])
            value = v[t, g * V : (g + 1) * V]
            decay = torch.ones(len(key), dtype=x.dtype)
            if config.gate == "fixed":
                decay = decay * (1 - 2.0 ** (-5 - g))
            elif config.gate == "fixed_by_layer":
                decay = decay * math.exp(-8 * g / G)
            elif config.gate == "head":
                decay = decay * torch.sigmoid(logits[t, g]) ** (1 / 16)
            elif config.gate == "channel":
                decay = torch.sigmoid(logits[t, g * K : (g + 1) * K]) ** (1 / 16)
            S[h] = decay[:, None] * S[h] + torch.outer(key, value)
            z[h] = decay * z[h] + key
            query = mapped(layer, q[t, h * K : (h + 1) * K], t, q_maps[h])
            if config.normalize:
                heads.append(query @ S[h] / (query @ z[h]))
            else:
                o = query @ S[h] / len(query) ** 0.5
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
    torch.testing.assert_close(y, wanted, rtol=1e-11, atol=1e-11)


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
        (
            {"feature_map": "dpfp", "normalize": True, "gate": "none"},
            "feature_map: got 'dpfp' with",
        ),
        (
            {"feature_map": "elu", "normalize": True, "rotary": True},
            "rotary: got true with normalize = true and feature_map 'elu', expected one of favor",
        ),
        ({"key_dim": 3, "rotary": True}, "rotary: got true with 3 channels of a key, expected an"),
        ({"num_features": 8}, "num_features: got 8 with feature_map 'identity', expected none"),
        ({"redraw_every": 8}, "redraw_every: got 8 with feature_map 'identity', expected 0"),
        (
            {"feature_map": "dpfp", "num_features": 8},
            "num_features: got 8 with feature_map 'dpfp', expected a multiple of 16",
        ),
        (
            {"feature_map": "taylor", "key_dim": 32},
            "key_dim: got 561 features a head, expected at most 512",
        ),
        ({"feature_map": "silu", "normalize": True}, "feature_map: got 'silu'"),
        ({"gate": "chanel"}, "gate: got 'chanel', expected 'none', 'fixed', 'fixed_by_layer'"),
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


def test_a_form_that_runs_nowhere_here_is_refused_when_built() -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("a device here takes the kernels")
    with pytest.raises(ConfigError, match="impl: got 'triton', expected"):
        LinearAttention(64, LinearAttentionConfig(impl="triton"))
