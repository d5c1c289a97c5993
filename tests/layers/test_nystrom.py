"""Nyströmformer against a loop over documents and heads with torch's pseudo-inverse."""

from __future__ import annotations

import pytest
import torch

from gla.errors import ConfigError, StateError
from gla.layers.nystrom import pseudo_inverse

LENGTHS = [1, 2, 33, 0, 9, 1, 40]
TABLES = {
    "plain": {"num_heads": 2, "landmarks": 5, "conv_width": 3},
    "no convolution": {"num_heads": 1, "landmarks": 8, "conv_width": 0},
}


def table(name, **changes):
    return {"kind": "nystrom"} | TABLES[name] | changes


@pytest.fixture(params=TABLES)
def layer(request, make):
    return make(table(request.param))


def segments(L, m):
    """The tokens of each landmark: token t belongs to segment floor(t m / L)."""
    m = min(m, L)
    return [[t for t in range(L) if t * m // L == j] for j in range(m)]


def iterated(A, steps):
    Z = A.T / (torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(A, torch.inf))
    eye = torch.eye(len(A), dtype=A.dtype)
    for _ in range(steps):
        Z = 0.25 * Z @ (13 * eye - A @ Z @ (15 * eye - A @ Z @ (7 * eye - A @ Z)))
    return Z


def loop(layer, x):
    """One document, x [L, D] -> [L, D]."""
    L, heads = len(x), []
    for h in range(layer.num_heads):
        part = slice(h * layer.dim, (h + 1) * layer.dim)
        q, k, v = (p(x)[:, part] for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q = q / layer.dim**0.5
        groups = segments(L, layer.config.landmarks)
        q_l, k_l = (torch.stack([u[g].mean(0) for g in groups]) for u in (q, k))
        A = (q_l @ k_l.T).softmax(-1)
        o = (q @ k_l.T).softmax(-1) @ iterated(A, layer.config.iterations)
        o = o @ (q_l @ k.T).softmax(-1) @ v
        width = layer.config.conv_width
        for t in range(L if width else 0):
            for i in range(width):
                s = t + i - width // 2
                if 0 <= s < L:
                    o[t] = o[t] + layer.conv_weight[h, i] * v[s]
        heads.append(o)
    return layer.out_proj(torch.cat(heads, -1))


@pytest.mark.parametrize("L", [1, 2, 5, 8, 17, 40])
@torch.no_grad()
def test_equals_a_loop(layer, L):
    x = torch.randn(2, L, 16, dtype=torch.float64)
    wanted = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-9, atol=1e-10)


def test_packed_documents_equal_separate_ones_with_gradients(layer):
    x = torch.randn(1, sum(LENGTHS), 16, dtype=torch.float64, requires_grad=True)
    y, state = layer(x, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))
    assert state is None
    separate = torch.cat([layer(part)[0] for part in x.split(LENGTHS, 1) if part.numel()], 1)
    torch.testing.assert_close(y, separate, rtol=1e-9, atol=1e-10)
    weights = torch.randn_like(y)
    variables = [x, *layer.parameters()]
    grads = [torch.autograd.grad((u * weights).sum(), variables) for u in (y, separate)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_rows_do_not_act_on_each_other(layer):
    """The start of the iteration is a matrix's own, not one maximum over the batch."""
    x = torch.randn(3, 30, 16, dtype=torch.float64)
    x[1] *= 50
    y = layer(x)[0]
    for row in range(3):
        torch.testing.assert_close(y[row], layer(x[row : row + 1])[0][0], rtol=1e-11, atol=1e-12)


def test_with_as_many_landmarks_as_tokens_it_is_softmax_attention(make):
    layer = make(table("no convolution", landmarks=12, iterations=30))
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    q, k, v = (p(x[0]) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    wanted = layer.out_proj((q @ k.T / 4).softmax(-1) @ v)
    torch.testing.assert_close(layer(x)[0][0], wanted, rtol=1e-6, atol=1e-6)


def test_the_pseudo_inverse_of_regular_and_singular_matrices():
    torch.manual_seed(0)
    A = torch.randn(4, 6, 6, dtype=torch.float64).softmax(-1)
    A[3, :, 4:] = A[3, 4:, :] = 0  # landmarks that have no token
    torch.testing.assert_close(pseudo_inverse(A, 30), torch.linalg.pinv(A), rtol=1e-8, atol=1e-8)


def test_every_token_reads_every_other(layer):
    x = torch.randn(9, 16, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda u: layer(u[None])[0][0].sum(-1), x)
    assert bool((jacobian.abs().sum(-1) > 0).all())


def test_half_precision_keeps_the_inverse_wide(make):
    layer = make(table("plain"), torch.float32)
    x = torch.randn(2, 30, 16)
    wanted = layer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)[0]
    assert (y.float() - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_what_needs_a_past_is_refused(layer):
    with pytest.raises(StateError, match="Nystrom with causal = false"):
        layer.init_state(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, "causal: got true, expected false: landmarks are means over the whole"),
        ({"conv_width": 4}, "conv_width: got 4, expected 0 or an odd number"),
        ({"landmarks": 0}, "landmarks: got 0, expected greater than or equal to 1"),
    ],
)
def test_wrong_options_say_what_is_wrong(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(table("plain", **changes))
