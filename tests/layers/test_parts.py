"""The parts of layers, each against its definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from gla.layers.feed_forward import SwiGLU
from gla.layers.gates import FixedByLayerGate, FixedGate
from gla.layers.linear import Linear, WideLinear
from gla.layers.norms import RMSNorm
from gla.layers.packing import batch_documents, document_of_token
from gla.layers.rotary import rotate
from gla.layers.short_convolution import ShortConvolution


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_short_convolution_equals_conv1d(width):
    conv = ShortConvolution(6, width).double()
    x = torch.randn(3, 10, 6, dtype=torch.float64)
    y, state = conv(x)
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    wanted = F.silu(F.conv1d(padded, conv.weight.T.unsqueeze(1), groups=6)).transpose(1, 2)
    torch.testing.assert_close(y, wanted)
    assert torch.equal(state, x[:, 10 - (width - 1) :])


def test_short_convolution_accepts_slices_of_a_wider_tensor():
    conv = ShortConvolution(6, 3)
    wide = torch.randn(2, 10, 20)
    assert torch.equal(conv(wide[..., 3:9])[0], conv(wide[..., 3:9].contiguous())[0])


def test_rms_norm():
    norm = RMSNorm(8, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 8) / 30  # small enough that eps counts
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), wanted)
    huge = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square is past fp16's range
    torch.testing.assert_close(norm.half()(huge)[0], norm.weight, atol=1e-2, rtol=1e-2)


def test_rotary_depends_on_distance_only_and_is_exact_far_out():
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64) for _ in range(2))

    def score(i, j):
        a, _ = rotate(q, q, torch.tensor([[i]]), 10_000.0)
        _, b = rotate(k, k, torch.tensor([[j]]), 10_000.0)
        return (a * b).sum()

    torch.testing.assert_close(score(3, 1), score(1_000_003, 1_000_001), rtol=1e-8, atol=1e-8)
    assert abs(score(3, 1) - score(4, 1)) > 1e-3
    one = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    far, _ = rotate(one, one, torch.tensor([[9_999_991]]), 10_000.0)
    wanted = torch.tensor([math.cos(9_999_991), math.sin(9_999_991)])
    torch.testing.assert_close(far.flatten(), wanted, atol=1e-6, rtol=0)


def test_fixed_gate_is_that_of_retnet():
    decay = FixedGate(4)(torch.zeros(1, 1, 1)).exp()
    torch.testing.assert_close(decay, torch.tensor([1 - 2.0 ** (-5 - h) for h in range(4)]))


def test_fixed_by_layer_gate_is_that_of_transnormer():
    gate = FixedByLayerGate(4)
    gate.rest = 1 - 3 / 12  # layer 3 of 12
    wanted = torch.tensor([0.0, -1.5, -3.0, -4.5])
    torch.testing.assert_close(gate(torch.zeros(1, 1, 1)), wanted)


def test_swiglu():
    mlp = SwiGLU(4, 6)
    x = torch.randn(2, 4)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    wanted = (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), wanted)


def test_wide_linear_stays_in_fp32():
    layer = WideLinear(4, 3, bias=True)
    before = layer.weight.clone()
    for narrow in (torch.nn.Module.bfloat16, torch.nn.Module.half):
        narrow(layer)
        assert torch.equal(layer.weight, before) and layer.bias.dtype == torch.float32
    assert layer(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert layer.double().weight.dtype == torch.float64
    assert layer.to("meta").weight.is_meta


def test_linear_starts_as_published():
    layer = Linear(300, 400, bias=True)
    assert abs(layer.weight.std().item() - 0.02) < 2e-4
    assert torch.equal(layer.bias, torch.zeros(400))


@pytest.mark.parametrize("lengths", [[5], [1, 2, 3], [0, 4, 0, 0, 2, 0], [0], [], [40, 33, 64, 1]])
def test_documents_are_found_and_batched(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    T = sum(lengths)
    owner = [n for n, length in enumerate(lengths) for _ in range(length)]
    assert document_of_token(offsets, T).tolist() == owner
    batches = batch_documents(offsets)
    x = torch.randn(T, 3, dtype=torch.float64, requires_grad=True)
    parts = batches.split(x)
    seen = []
    for part, documents in zip(parts, batches.documents, strict=True):
        sizes = [lengths[n] for n in documents.tolist()]
        assert part.shape == (len(sizes), max(sizes), 3)
        assert max(sizes) - min(sizes) < 32
        for row, n in zip(part, documents.tolist(), strict=True):
            assert torch.equal(row[: lengths[n]], x[offsets[n] : offsets[n + 1]])
            seen.append(n)
    assert sorted(seen) == [n for n, length in enumerate(lengths) if length]
    if not parts:
        return
    weights = torch.randn(T, 3, dtype=torch.float64)
    joined = batches.join([part * 2 for part in parts])
    assert torch.equal(joined, x * 2)
    (grad,) = torch.autograd.grad((joined * weights).sum(), [x])
    assert torch.equal(grad, 2 * weights)
