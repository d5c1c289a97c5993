"""Linformer against a loop over documents and heads, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gla.errors import ConfigError, StateError
from gla.layers.mixer import build_mixer, mixer_config

LENGTHS = [1, 2, 33, 0, 9, 1, 40]
TABLES = {
    "nothing shared": {"sharing": "none"},
    "heads": {"sharing": "heads"},
    "keys and values": {"sharing": "key_value"},
    "layers": {"sharing": "layers", "frozen": True},
    "mixture": {"sharing": "heads", "projection": "mixture", "experts": 3},
    "mixture, nothing shared": {"sharing": "none", "projection": "mixture", "experts": 2},
    "by input": {"sharing": "key_value", "projection": "input"},
    "by input, each head": {"sharing": "none", "projection": "input"},
}
TABLES = {
    name: {"kind": "linformer", "num_heads": 2, "k": 3}
    | table
    | ({} if table.get("projection") == "input" else {"n_max": 40})
    for name, table in TABLES.items()
}


@pytest.fixture(params=TABLES)
def layer(request, make):
    return make(TABLES[request.param])


def projections(layer, x, h):
    """E and F [k, L] of a head for the document x [L, D], from the definitions."""
    L, config = len(x), layer.config
    if config.projection == "input":
        W = layer.slot_proj.weight.view(-1, config.k, 16)
        E = (x @ W[h if config.sharing == "none" else 0].T).softmax(0).T
        return E, E
    pair = []
    for P in (layer.E, layer.E if layer.F is None else layer.F):
        if config.projection == "mixture":
            weights = torch.stack(
                [-((torch.log2(torch.tensor(L)) - c) ** 2) for c in layer.centers]
            )
            P = torch.stack([w * P[m] for m, w in enumerate(weights.softmax(0))]).sum(0)
        pair.append((P[h] if config.sharing == "none" else P)[:, :L])
    return pair


def loop(layer, x):
    """One document, x [L, D] -> [L, D]."""
    heads = []
    for h in range(layer.num_heads):
        part = slice(h * layer.dim, (h + 1) * layer.dim)
        q, k, v = (p(x)[:, part] for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        E, F = projections(layer, x, h)
        heads.append((q @ (E @ k).T / layer.dim**0.5).softmax(-1) @ (F @ v))
    return layer.out_proj(torch.cat(heads, -1))


@pytest.mark.parametrize("L", [1, 2, 17, 40])
def test_equals_a_loop(layer, L):
    x = torch.randn(2, L, 16, dtype=torch.float64)
    y, state = layer(x)
    assert state is None
    wanted = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(y, wanted, rtol=1e-11, atol=1e-12)


def test_packed_documents_equal_separate_ones_with_gradients(layer):
    x = torch.randn(1, sum(LENGTHS), 16, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))
    separate = torch.cat([layer(part)[0] for part in x.split(LENGTHS, 1) if part.numel()], 1)
    torch.testing.assert_close(y, separate, rtol=1e-11, atol=1e-12)
    weights = torch.randn_like(y)
    variables = [x, *(p for p in layer.parameters() if p.requires_grad)]
    grads = [torch.autograd.grad((u * weights).sum(), variables) for u in (y, separate)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_pads_are_gone_before_the_projection(layer):
    """Huge numbers behind a document reach no output and no gradient."""
    q, k, v = (torch.randn(1, 30, 2, 8, dtype=torch.float64) for _ in range(3))
    extra = layer.per_token(torch.randn(1, 30, 16, dtype=torch.float64))
    short = layer.attend(*(x[:, :21] for x in (q, k, v)), None, *(x[:, :21] for x in extra))
    for x in (q, k, v, *extra):
        x[:, 21:] = 1e9
    padded = layer.attend(q, k, v, torch.tensor([21]), *extra)[:, :21]
    torch.testing.assert_close(padded, short, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["heads", "mixture"])
def test_a_longer_document_is_refused(make, name):
    layer = make(TABLES[name])
    layer(torch.randn(1, 40, 16, dtype=torch.float64))
    message = "tokens: got a document of 41, expected at most n_max = 40"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 41, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 42, 16, dtype=torch.float64), cu_seqlens=torch.tensor([0, 41, 42]))


def test_projections_by_input_have_no_longest_document(make):
    y, state = make(TABLES["by input"])(torch.randn(1, 500, 16, dtype=torch.float64))
    assert y.shape == (1, 500, 16) and bool(y.isfinite().all()) and state is None


@pytest.mark.parametrize(("init", "variance"), [("normal", 1 / 512), ("xavier", 2 / (512 + 128))])
@pytest.mark.parametrize("sharing", ["none", "heads"])
def test_initialization(init, variance, sharing):
    torch.manual_seed(0)
    table = {"kind": "linformer", "num_heads": 2, "init": init, "sharing": sharing}
    layer: Any = build_mixer(64, mixer_config(table))
    for P in (layer.E, layer.F):
        assert P.shape[-2:] == (128, 512)
        assert abs(float(P.detach().square().mean()) / variance - 1) < 0.02
    assert not torch.equal(layer.E, layer.F)
    # At n_max tokens of unit scale, slots have unit scale too.
    x = torch.randn(1, 512, 2, 32)
    slots = layer._project(layer._columns(layer.E, None, 512), x)
    assert abs(float(slots.detach().std()) - variance**0.5 * 512**0.5) < 0.05


def test_a_mixture_gives_each_length_its_expert(make):
    torch.manual_seed(0)
    table = TABLES["mixture"] | {"n_max": 64, "experts": 4}
    layer: Any = build_mixer(16, mixer_config(table))
    assert layer.centers.tolist() == [6, 5, 4, 3]
    for m, n in enumerate([64, 32, 16, 8]):
        assert abs(float(layer.E[m].detach().square().mean()) * n - 1) < 0.3
    for m, n in enumerate([64, 16]):
        mixed = layer._columns(layer.E, torch.tensor([n]), n)[0, 0]
        nearest = (layer.E[..., :n] - mixed).square().mean((1, 2)).argmin()
        assert int(nearest) == 2 * m


def test_parameters_by_sharing(make):
    count = {}
    for sharing in ("none", "heads", "key_value", "layers"):
        layer = make({"kind": "linformer", "num_heads": 2, "k": 3, "n_max": 40, "sharing": sharing})
        names = [n for n, _ in layer.named_parameters() if n in "EF"]
        count[sharing] = sum(p.numel() for n, p in layer.named_parameters() if n in "EF")
        assert names == (["E", "F"] if sharing in ("none", "heads") else ["E"])
    assert count == {"none": 480, "heads": 240, "key_value": 120, "layers": 120}


def test_frozen_projections_take_no_gradient(make):
    layer = make(TABLES["heads"] | {"frozen": True})
    layer(torch.randn(1, 5, 16, dtype=torch.float64))[0].sum().backward()
    assert layer.E.grad is None and layer.F.grad is None
    assert layer.k_proj.weight.grad is not None
    assert {"E", "F"} <= set(layer.state_dict())


def test_what_needs_a_past_is_refused(layer):
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    for call in (
        lambda: layer.init_state(1),
        lambda: layer.step(x[:, 0], ()),
        lambda: layer(x, ()),
    ):
        with pytest.raises(StateError, match="Linformer with causal = false"):
            call()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"causal": True}, r"causal: got true, expected false: each of the k slots sums over all"),
        ({"projection": "input", "n_max": 40}, r"n_max: got 40 with projection = \"input\", which"),
        ({"projection": "mixture"}, "experts: got None, expected their number"),
        ({"experts": 2}, 'experts: got 2, expected none without projection = "mixture"'),
        ({"projection": "input"}, "sharing: got 'heads' with projection"),
        (
            {"projection": "input", "n_max": None, "sharing": "none", "frozen": True},
            "frozen: got True with projection",
        ),
        ({"k": 0}, "k: got 0, expected greater than or equal to 1"),
    ],
)
def test_wrong_options_say_what_is_wrong(make, table, message):
    with pytest.raises(ConfigError, match=message):
        make({"kind": "linformer", "num_heads": 2, "k": 3} | table)
