"""The block-causal Linformer against a loop over tokens, and the size of its state."""

from __future__ import annotations

import pytest
import torch

from gla.errors import ConfigError
from gla.state import nbytes


def turned(x, place):
    """Rotary embedding as a product of complex numbers. x [T, H, D], place [T]."""
    half = x.shape[-1] // 2
    angle = place[:, None] * 10_000.0 ** (-torch.arange(half) / half).double()
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)[:, None]
    return torch.cat([z.real, z.imag], -1)


def loop(layer, x):
    """One token and head at a time, written from the definition. x [T, D] -> [T, D]."""
    T, H, G, c = x.shape[0], layer.num_heads, layer.num_kv_heads, layer.config.block
    q = layer.q_proj(x).view(T, H, layer.dim)
    k = layer.k_proj(x).view(T, G, layer.dim)
    v = layer.v_proj(x).view(T, G, layer.dim)
    place = torch.arange(T)
    q_turned, k_turned = (turned(u, place) if layer.config.rotary else u for u in (q, k))
    E = layer.slots.log_E.exp()  # [G, k, c]
    decay = layer.slots.decay_logits.sigmoid()
    rows = []
    for t in range(T):
        block, heads = t // c, []
        start = max(0, (block - 1) * c)
        for h in range(H):
            g = h // (H // G)
            values, scores = [], []
            for j in range(E.shape[1] if block >= 2 else 0):
                # weight of every token before ``start`` in slot j
                weights = [
                    decay[g, j] ** (block - 2 - s // c) * E[g, j, s % c] for s in range(start)
                ]
                weights = torch.stack(weights)
                weights = weights / weights.sum()
                scores.append((weights @ k[:start, g]) @ q[t, h])
                values.append(weights @ v[:start, g])
            for s in range(start, t + 1):
                scores.append(k_turned[s, g] @ q_turned[t, h])
                values.append(v[s, g])
            p = (torch.stack(scores) / layer.dim**0.5).softmax(0)
            heads.append(p @ torch.stack(values))
        rows.append(torch.cat(heads))
    return layer.out_proj(torch.stack(rows))


@pytest.mark.parametrize(
    "table",
    [
        {"num_heads": 2, "k": 3, "block": 4},
        {"num_heads": 4, "num_kv_heads": 2, "k": 2, "block": 5, "rotary": False},
        {"num_heads": 1, "k": 1, "block": 1},
        {"num_heads": 2, "k": 5, "block": 32},
    ],
)
@pytest.mark.parametrize("T", [1, 4, 5, 19, 20, 21])
def test_equals_a_loop(make, table, T):
    layer = make({"kind": "linformer_causal", **table})
    x = torch.randn(2, T, 16, dtype=torch.float64)
    wanted = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-11, atol=1e-12)


def test_a_token_far_back_still_counts_and_none_ahead_does(make):
    layer = make({"kind": "linformer_causal", "num_heads": 2, "k": 3, "block": 4})
    x = torch.randn(30, 16, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda u: layer(u[None])[0][0].sum(-1), x)
    size = jacobian.abs().sum(-1)  # [output, input]
    assert size.triu(1).abs().max() == 0
    past = torch.ones_like(size).tril().bool()
    assert bool((size[past] > 0).all())  # the first token as well as the own one


def test_the_state_never_grows(make):
    layer = make({"kind": "linformer_causal", "k": 8, "block": 16}, torch.float32)
    state = layer.init_state(2)
    size = nbytes(state)
    k, c, D = 8, 16, 16
    assert size == 2 * (4 * (2 * D * (k + 2 * c) + k) + 8)  # rows; fp32; an int64 position each
    for T in (1, 15, 1, 16, 100, 1000):
        _, state = layer(torch.randn(2, T, 16), state)
        assert nbytes(state) == size


def test_half_lives_are_spread_at_the_start_and_weights_are_drawn(make):
    from gla.layers.linformer_causal import BlockSlots

    torch.manual_seed(0)
    slots = BlockSlots(2, 64, 64)
    half_life = -(torch.tensor(2.0).log() / slots.decay_logits.sigmoid().log())
    torch.testing.assert_close(
        half_life[:, [0, -1]], torch.tensor([[1.0, 1024.0]] * 2), rtol=1e-2, atol=0
    )
    assert abs(float(slots.log_E.std()) - 1) < 0.05


def test_wrong_options_say_what_is_wrong(make):
    with pytest.raises(ConfigError, match="rotary: got true with d_model / num_heads = 1"):
        make({"kind": "linformer_causal", "num_heads": 16})
    with pytest.raises(ConfigError, match="num_kv_heads: got 3 for 4 heads"):
        make({"kind": "linformer_causal", "num_heads": 4, "num_kv_heads": 3})
