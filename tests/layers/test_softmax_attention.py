"""The softmax layer against a loop over tokens, its caches, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gla.errors import ConfigError, StateError
from gla.layers.attention import attend, attend_to_cache
from gla.state import nbytes


def loop(layer, x):
    """One query at a time, written from the definition. x [T, D] -> [T, D]."""
    T, H, G = x.shape[0], layer.num_heads, layer.num_kv_heads
    q = layer.q_proj(x).view(T, H, layer.dim)
    k = layer.k_proj(x).view(T, G, layer.dim)
    v = layer.v_proj(x).view(T, G, layer.dim)
    if layer.config.rotary:
        q, k = turned(q), turned(k)
    rows = []
    for t in range(T):
        read = reads(layer, t)
        heads = []
        for h in range(H):
            g = h // (H // G)
            scores = k[read, g] @ q[t, h] / layer.dim**0.5
            heads.append(scores.softmax(0) @ v[read, g])
        rows.append(torch.cat(heads))
    return layer.out_proj(torch.stack(rows))


def reads(layer, t):
    """The places that token t reads."""
    config, window = layer.config, layer.config.window
    if window is None:
        return list(range(t + 1))
    read = {s for s in range(t + 1) if s > t - window or s < config.global_tokens}
    if config.random_blocks:
        chosen = layer._choose_blocks(torch.tensor(t // window)).tolist()
        read |= {s for c in chosen if c >= 0 for s in range(c * window, (c + 1) * window)}
    return sorted(read)


def turned(x):
    """Rotary embedding as a product of complex numbers. x [T, H, D]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0])[:, None] * 10_000.0 ** (-torch.arange(half) / half).double()
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)[:, None]
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("T", [1, 2, 5, 6, 16, 17, 50])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 64])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (2, 1)])
def test_equals_a_loop(make, T, window, heads):
    table = {"kind": "softmax_attention", "num_heads": heads[0], "num_kv_heads": heads[1]}
    layer = make({**table, "window": window})
    x = torch.randn(2, T, 16, dtype=torch.float64)
    y, _ = layer(x)
    wanted = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(y, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("T", [1, 3, 4, 8, 9, 40])
@pytest.mark.parametrize(
    "options", [(4, 1, 0), (4, 4, 0), (1, 1, 0), (4, 0, 1), (3, 2, 2), (1, 1, 2)]
)
def test_sparse_forms_equal_a_loop(make, T, options):
    window, global_tokens, random_blocks = options
    layer = make(
        {
            "kind": "softmax_attention",
            "num_heads": 4,
            "num_kv_heads": 2,
            "window": window,
            "global_tokens": global_tokens,
            "random_blocks": random_blocks,
        }
    )
    x = torch.randn(2, T, 16, dtype=torch.float64)
    wanted = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-11, atol=1e-12)


def test_random_blocks_are_past_distinct_seeded_and_everywhere(make):
    table = {"kind": "softmax_attention", "window": 2, "random_blocks": 3}
    layer = make(table)
    c = torch.arange(2000)
    chosen = layer._choose_blocks(c)
    assert bool((chosen < (c - 1).clamp_min(0).unsqueeze(1)).all())
    for number in range(2000):
        found = [b for b in chosen[number].tolist() if b >= 0]
        assert len(set(found)) == len(found) == min(3, max(0, number - 1))
    share = (chosen[1000:] / (c[1000:] - 1).unsqueeze(1)).flatten()
    counts = torch.histc(share.float(), 10, 0, 1)
    assert bool(((counts - 300).abs() < 70).all())  # 300 draws in each tenth, 4 standard errors
    other = make(table)
    assert not torch.equal(other.seed, layer.seed)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other._choose_blocks(c), chosen)


def test_fewer_queries_than_keys_stand_at_the_end_of_the_keys():
    q, k, v = (torch.randn(1, 7, 2, 4, dtype=torch.float64) for _ in range(3))
    whole = attend(q, k, v)
    last = attend_to_cache(q[:, 4:], k, v, torch.tensor([4]))
    torch.testing.assert_close(last, whole[:, 4:])


def test_first_tokens_stay_in_a_ring_that_never_grows(make):
    layer = make({"kind": "softmax_attention", "window": 8, "global_tokens": 3}, torch.float32)
    state = layer.init_state(1)
    assert state.k.shape == (1, 11, 1, 16)
    _, state = layer(torch.randn(1, 2, 16), state)
    _, state = layer(torch.randn(1, 5, 16), state)
    first, size = state.k[:, :3].clone(), nbytes(state)
    assert bool((first != 0).all())
    for T in (1, 4, 30, 1):
        _, state = layer(torch.randn(1, T, 16), state)
        assert torch.equal(state.k[:, :3], first) and nbytes(state) == size


def test_a_ring_has_its_window_and_never_grows(make):
    layer = make({"kind": "softmax_attention", "window": 8}, torch.float32)
    state = layer.init_state(2)
    size = nbytes(state)
    assert state.k.shape == (2, 8, 1, 16)
    for T in (1, 3, 8, 20, 1, 9, 100):
        _, state = layer(torch.randn(2, T, 16), state)
        assert nbytes(state) == size
    _, cold = layer(torch.randn(2, 300, 16))
    assert nbytes(cold) == size


@torch.no_grad()
def test_a_full_cache_moves_only_when_it_doubles(make):
    layer = make({"kind": "softmax_attention"}, torch.float32)
    state, places, capacities = layer.init_state(1), set(), set()
    for _ in range(1000):
        _, state = layer.step(torch.randn(1, 16), state)
        places.add(state.k.data_ptr())
        capacities.add(state.k.shape[1])
    assert capacities == {64, 128, 256, 512, 1024}
    assert len(places) <= 5


def test_a_cache_is_not_rounded_without_a_word(make):
    layer = make({"kind": "softmax_attention"}, torch.float32)
    _, state = layer(torch.randn(1, 4, 16))
    narrow = state._replace(k=state.k.bfloat16(), v=state.v.bfloat16())
    with pytest.raises(StateError, match=r"state\.k: got a cache in torch\.bfloat16"):
        layer(torch.randn(1, 4, 16), narrow)


def test_a_state_made_in_inference_mode_can_be_gone_on_from(make):
    layer = make({"kind": "softmax_attention"}, torch.float32)
    x = torch.randn(1, 6, 16)
    with torch.inference_mode():
        _, state = layer(x[:, :3])
    with torch.no_grad():
        y, _ = layer(x[:, 3:], state)
    torch.testing.assert_close(y, layer(x)[0][:, 3:], rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.numel():
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


OPTIONS = {
    "full": {},
    "window": {"window": 16},
    "first tokens": {"window": 16, "global_tokens": 4},
    "random blocks": {"window": 16, "random_blocks": 2},
    "both ways": {"window": 16, "global_tokens": 4, "causal": False},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["rows", "warm", "documents"])
def test_memory_is_linear_in_the_tokens(make, options, kind):
    layer = make({"kind": "softmax_attention", **OPTIONS[options]}, torch.float32)
    if kind == "warm" and not layer.causal:
        return
    T = 4096
    x = torch.randn(1, T, 16)
    state = layer(x[:, :50])[1] if kind == "warm" else None
    lengths = [1, 2, 1000, 0, 700, 3, T - 1706]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0) if kind == "documents" else None
    with Largest() as largest:
        y, _ = layer(x.requires_grad_(), state, cu_seqlens=cu_seqlens)
        y.sum().backward()
    assert largest.numel <= 300 * T  # 256 queries against all keys; T * T is 4096 * T


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"num_heads": 3}, "num_heads: got 3 heads for d_model = 16, and 16 % 3 = 1, expected 0"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads: got 3 for 4 heads, and 4 % 3 = 1"),
        ({"num_heads": 16}, "rotary: got true with d_model / num_heads = 1, expected an even"),
        ({"windows": 4}, "windows: got an unknown key, .* fix by writing 'window'"),
        ({"window": 0}, "window: got 0, expected greater than or equal to 1"),
        ({"global_tokens": 2}, "global_tokens: got 2 without a window"),
        ({"random_blocks": 2}, "random_blocks: got 2 without a window"),
        (
            {"window": 4, "global_tokens": 5},
            "global_tokens: got 5 with window = 4, expected at most the window",
        ),
    ],
)
def test_wrong_options_say_what_is_wrong(make, table, message):
    with pytest.raises(ConfigError, match=message):
        make({"kind": "softmax_attention", **table})
