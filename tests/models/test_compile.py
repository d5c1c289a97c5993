"""Whole models pass through ``torch.compile`` as one graph, gradients included."""

from __future__ import annotations

import pytest
import torch

from gla.models.encoder import Encoder, EncoderConfig


@pytest.mark.parametrize(
    ("layers", "packed"),
    [(["conv", "kernel"], True), (["full", "ring"], False)],  # packed softmax reads the lengths
)
def test_loss_is_one_graph(make, layers, packed):
    model = make(layers, torch.float32, gain=1.0)
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, 32, (2, 1, 24))
    cu_seqlens = torch.tensor([0, 3, 3, 24]) if packed else None

    def loss(x):
        return model.loss(x, targets, cu_seqlens=cu_seqlens)

    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    wanted, got = loss(tokens), compiled(tokens)
    torch.testing.assert_close(got, wanted)
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(x, parameters) for x in (got, wanted))
    torch.testing.assert_close(next(gradients), next(gradients))


@pytest.mark.parametrize("layer", ["ring", "linformer_causal"])
def test_packed_softmax_layers_compile_with_a_break(make, layer):
    model = make([layer], torch.float32, gain=1.0)
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, 32, (2, 1, 24))
    torch.compiler.reset()
    compiled = torch.compile(model.loss, backend="eager")
    for lengths in ([3, 0, 21], [20, 4]):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        wanted = model.loss(tokens, targets, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(compiled(tokens, targets, cu_seqlens=cu_seqlens), wanted)


@pytest.mark.parametrize("layer", ["linformer", "nystrom"])
def test_encoders_compile(layer):
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(d_model=16, vocab_size=32, layers=[layer], classes=["a", "b"]))
    tokens, labels = torch.randint(0, 32, (1, 24)), torch.tensor([0, 1, 0])
    torch.compiler.reset()
    compiled = torch.compile(model.class_loss, backend="aot_eager")
    for lengths in ([3, 1, 20], [8, 8, 8]):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        wanted, got = (
            f(tokens, labels, cu_seqlens=cu_seqlens) for f in (model.class_loss, compiled)
        )
        torch.testing.assert_close(got, wanted)
        parameters = list(model.parameters())
        gradients = [torch.autograd.grad(x, parameters) for x in (got, wanted)]
        torch.testing.assert_close(*gradients)
