"""Mixers in both directions: against a loop, packed, and refused where only a past would do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gla.errors import ConfigError, StateError
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel

TABLES = {
    "softmax": {"kind": "softmax_attention", "num_heads": 2, "causal": False},
    "grouped": {"kind": "softmax_attention", "num_heads": 4, "num_kv_heads": 2, "causal": False},
    "window": {"kind": "softmax_attention", "num_heads": 2, "window": 5, "causal": False},
    "longformer": {
        "kind": "softmax_attention",
        "num_heads": 4,
        "num_kv_heads": 2,
        "window": 4,
        "global_tokens": 3,
        "causal": False,
    },
    "normalized": {
        "kind": "linear_attention",
        "gate": "none",
        "num_heads": 2,
        "feature_map": "elu",
        "normalize": True,
        "causal": False,
    },
    "linear": {"kind": "linear_attention", "gate": "none", "num_heads": 2, "causal": False},
}
LENGTHS = [1, 2, 33, 0, 9, 1, 40]


@pytest.fixture(params=TABLES)
def both_ways(request, make):
    return make(TABLES[request.param])


def test_linear_equals_its_quadratic_form(make):
    layer = make(TABLES["normalized"])
    x = torch.randn(1, 11, 16, dtype=torch.float64)
    q, k = (F.elu(p(x)).view(11, 2, 4) + 1 for p in (layer.q_proj, layer.k_proj))
    v = layer.v_proj(x).view(11, 2, 8)
    weights = torch.einsum("thk,shk->hts", q, k)
    o = torch.einsum("hts,shv->thv", weights / weights.sum(-1, keepdim=True), v)
    wanted = layer.out_proj(o.reshape(11, 16) * F.silu(layer.gate_proj(x[0])))
    torch.testing.assert_close(layer(x)[0][0], wanted, rtol=1e-11, atol=1e-12)


def test_softmax_equals_its_definition(make):
    layer = make(TABLES["grouped"] | {"rotary": False})
    x = torch.randn(1, 11, 16, dtype=torch.float64)
    q = layer.q_proj(x).view(11, 4, 4)
    k, v = (p(x).view(11, 2, 4).repeat_interleave(2, 1) for p in (layer.k_proj, layer.v_proj))
    scores = torch.einsum("thk,shk->hts", q, k) / 2
    o = torch.einsum("hts,shv->thv", scores.softmax(-1), v)
    torch.testing.assert_close(
        layer(x)[0][0], layer.out_proj(o.reshape(11, 16)), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize("T", [1, 2, 4, 5, 9, 23])
def test_every_token_reads_what_it_should(both_ways, T):
    x = torch.randn(T, 16, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda u: both_ways(u[None])[0][0].sum(-1), x)
    t, s = torch.arange(T).unsqueeze(1), torch.arange(T)
    window = getattr(both_ways.config, "window", None) or T
    near = (t - s).abs() < window
    g = getattr(both_ways.config, "global_tokens", 0)
    near |= (t < g) | (s < g)
    assert torch.equal(jacobian.abs().sum(-1) > 0, near)


@pytest.mark.parametrize("T", [1, 4, 11, 30])
def test_longformer_equals_its_definition(make, T):
    layer = make(TABLES["longformer"] | {"rotary": False})
    x = torch.randn(2, T, 16, dtype=torch.float64)
    q = layer.q_proj(x).view(2, T, 4, 4)
    k, v = (p(x).view(2, T, 2, 4).repeat_interleave(2, 2) for p in (layer.k_proj, layer.v_proj))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / 2
    t, s = torch.arange(T).unsqueeze(1), torch.arange(T)
    scores = scores.masked_fill(((t - s).abs() >= 4) & (t >= 3) & (s >= 3), -torch.inf)
    o = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v)
    wanted = layer.out_proj(o.reshape(2, T, 16))
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-11, atol=1e-12)


def test_packed_documents_equal_separate_ones_with_gradients(both_ways):
    x = torch.randn(1, sum(LENGTHS), 16, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    y, state = both_ways(x, cu_seqlens=cu_seqlens)
    assert state is None
    parts = [both_ways(part)[0] for part in x.split(LENGTHS, 1) if part.numel()]
    separate = torch.cat(parts, 1)
    torch.testing.assert_close(y, separate, rtol=1e-11, atol=1e-12)
    weights = torch.randn_like(y)
    a, b = (torch.autograd.grad((u * weights).sum(), [x])[0] for u in (y, separate))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_state_is_refused(both_ways, make):
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    table = both_ways.config.model_dump(exclude_none=True) | {"causal": True}
    _, state = make(table)(x)
    for call in (
        lambda: both_ways(x, state),
        lambda: both_ways.step(x[:, 0], state),
        lambda: both_ways.init_state(1),
    ):
        with pytest.raises(StateError, match="causal = false, expected whole documents"):
            call()


@pytest.mark.parametrize("name", TABLES)
def test_a_language_model_refuses_it(name):
    config = ModelConfig(d_model=16, vocab_size=8, layers=["a"], mixers={"a": TABLES[name]})
    with pytest.raises(ConfigError, match=r"^mixers\.a: got a mixer that reads later tokens"):
        LanguageModel(config)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "linear_attention"}, "gate: got 'channel' with causal = false, expected 'none'"),
        ({"kind": "linear_attention", "gate": "none", "conv_width": 4}, "conv_width: got 4 with"),
        ({"kind": "linear_attention", "gate": "none", "impl": "torch"}, "impl: got 'torch' with"),
        ({"kind": "linear_attention", "gate": "none", "chunk_size": 16}, "chunk_size: got 16 with"),
        (
            {"kind": "softmax_attention", "window": 4, "random_blocks": 1},
            "random_blocks: got 1 with causal = false, expected 0",
        ),
    ],
)
def test_what_has_a_direction_is_refused(make, table, message):
    with pytest.raises(ConfigError, match=message):
        make(table | {"causal": False})
