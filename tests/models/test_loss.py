"""The chunked cross entropy against the plain one: values, gradients, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gla.models import loss as module
from gla.models.loss import linear_cross_entropy


def problem(M=23, D=6, V=11, dtype=torch.float64):
    torch.manual_seed(0)
    h, w = (torch.randn(n, D, dtype=dtype).requires_grad_() for n in (M, V))
    targets = torch.randint(0, V, (M,))
    targets[::5] = -100
    return h, w, targets


def plain(h, w, targets, ignore_index=-100):
    return F.cross_entropy(h @ w.T, targets, reduction="sum", ignore_index=ignore_index)


@pytest.mark.parametrize("rows", [1, 4, 23, 100])
def test_equals_the_plain_loss_for_any_chunk(monkeypatch, rows):
    monkeypatch.setattr(module, "_CHUNK_LOGITS", rows * 11)
    h, w, targets = problem()
    loss = linear_cross_entropy(h, w, targets, -100)
    torch.testing.assert_close(loss, plain(h, w, targets))
    got = torch.autograd.grad(3 * loss, [h, w])
    wanted = torch.autograd.grad(3 * plain(h, w, targets), [h, w])
    torch.testing.assert_close(got, wanted)


def test_any_index_can_be_ignored_and_all_targets_too():
    h, w, targets = problem()
    targets = targets.clamp_min(0)
    loss = linear_cross_entropy(h, w, targets, 0)
    torch.testing.assert_close(loss, plain(h, w, targets, 0))
    nothing = linear_cross_entropy(h, w, torch.full_like(targets, -100), -100)
    assert nothing == 0
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(nothing, [h, w]))


def test_only_wanted_gradients_are_computed():
    h, w, targets = problem()
    frozen = w.detach()
    loss = linear_cross_entropy(h, frozen, targets, -100)
    (got,) = torch.autograd.grad(loss, [h])
    torch.testing.assert_close(got, torch.autograd.grad(plain(h, frozen, targets), [h])[0])
    with torch.no_grad():
        assert not linear_cross_entropy(h, w, targets, -100).requires_grad


def test_large_logits_and_half_precision():
    h, w, targets = problem(dtype=torch.float32)
    huge = linear_cross_entropy(h * 1e4, w, targets, -100)
    torch.testing.assert_close(huge, plain(h * 1e4, w, targets))
    for dtype in (torch.bfloat16, torch.float16):
        a, b = (x.detach().to(dtype).requires_grad_() for x in (h, w))
        loss = linear_cross_entropy(a, b, targets, -100)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, plain(h, w, targets), rtol=2e-2, atol=2e-2)
        got = torch.autograd.grad(loss, [a, b])
        assert all(g.dtype == dtype for g in got)
        wanted = torch.autograd.grad(plain(h, w, targets), [h, w])
        torch.testing.assert_close([g.float() for g in got], list(wanted), rtol=0.1, atol=0.1)


def test_gradients_of_gradients_are_refused():
    h, w, targets = problem()
    loss = linear_cross_entropy(h, w, targets, -100).square()
    (g,) = torch.autograd.grad(loss, [h], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_all_logits_are_never_in_memory(monkeypatch, make):
    sizes = []
    original = F.linear

    def watched(x, w, b=None):
        out = original(x, w, b)
        if w.shape == (32, 16):
            sizes.append(out.shape[0])
        return out

    monkeypatch.setattr(module, "_CHUNK_LOGITS", 8 * 32)
    model = make(["gla"])
    monkeypatch.setattr(F, "linear", watched)
    tokens = torch.zeros(1, 50, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    assert sizes == [8] * 6 + [2]


def test_mean_and_sum_and_a_carried_state(make):
    model = make(["gla", "ring"])
    tokens = torch.randint(0, 32, (2, 12))
    targets = torch.randint(0, 32, (2, 12))
    targets[0, :3] = -100
    total = model.loss(tokens, targets, reduction="sum")
    torch.testing.assert_close(model.loss(tokens, targets), total / 21)
    state = model(tokens[:, :5]).state
    parts = model.loss(tokens[:, :5], targets[:, :5], reduction="sum")
    parts = parts + model.loss(tokens[:, 5:], targets[:, 5:], reduction="sum", state=state)
    torch.testing.assert_close(parts, total)
    assert model.loss(tokens, torch.full_like(targets, 7), ignore_index=7) == 0
