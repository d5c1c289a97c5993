"""Compiled steps and narrow weights: the same text, states that stay in place, honest refusals."""

from __future__ import annotations

import copy
import itertools
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from gla import state
from gla.errors import ConfigError, StateError
from gla.generate.decoder import Decoder, narrow
from gla.generate.int8 import Int8Linear
from gla.generate.session import Session
from gla.layers.linear import WideModule, linear
from gla.models.weights import gather

from .conftest import CONFIG, make_model

CONSTANT = CONFIG.replace(', "softmax"', "")
SMALL = CONFIG.replace('"short", "softmax"', "").replace('"near", ', '"near"')


def run_graphs_eagerly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Leave out the C++ compiler; the number of graphs made is the length of what is returned."""
    made: list[int] = []

    def compile_(graph, inputs, options):
        made.append(len(made))
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compile_)
    return made


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (7, 5), (100, 320)])
def test_an_int8_product_is_close_to_the_exact_one(rows, inputs, outputs):
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    want = x @ weight.T
    layer = Int8Linear(weight, torch.ones(outputs))
    for dtype, limit in ((torch.float32, 0.01), (torch.bfloat16, 0.015)):
        got = layer.to(dtype)(x.to(dtype)).float() - 1
        assert (got - want).square().mean().sqrt() / want.square().mean().sqrt() < limit


def test_int8_rounds_each_row_by_its_own_scale():
    weight = torch.tensor([[127.0, -127, 1, 0], [0.5, 0.25, 0, 0], [0, 0, 0, 0]])
    layer = Int8Linear(weight, None)
    assert (
        layer.weight[0].tolist() == [127, -127, 1, 0]
        and layer.weight[2].tolist() == [0] * 4
        and layer.scale.shape == (32,)
    )
    torch.testing.assert_close(layer(torch.eye(4)).T, weight, atol=2e-3, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_narrow_weights_change_little(tokenizer, weights, tied):
    config = CONFIG.replace("[model]\n", f"[model]\ntie_embeddings = {str(tied).lower()}\n")
    exact = Session(make_model(config=config), tokenizer)
    session = Session(narrow(make_model(config=config), weights), tokenizer)
    text = "abc de fgh " * 30
    assert session.score(text).loss == pytest.approx(exact.score(text).loss, rel=0.03)
    assert session._state.model.layers[0].recurrent.S.dtype == torch.float32  # pyright: ignore
    linears = [m for m in session._decoder.model.modules() if isinstance(m, torch.nn.Linear)]
    wide = [isinstance(m, WideModule) for m in linears]
    assert all(m.weight.dtype == torch.float32 for m in linears if isinstance(m, WideModule))
    assert all(wide) if weights == "int8" else not all(wide)
    assert "".join(session.generate(20, temperature=0))


def test_one_row_of_a_compiled_graph_is_the_same_product():
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 33), torch.randn(40)
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    for shape in ((33,), (1, 33), (1, 1, 33), (3, 33)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, weight, bias), linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_int8_row_of_a_compiled_graph_is_the_product_with_its_integers(dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(40, 100), torch.randn(100).to(dtype)
    layer = Int8Linear(weight, torch.ones(40)).to(dtype)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    integers = layer.weight[:40].double() * layer.scale[:40].double().unsqueeze(1)
    want = x.double() @ integers.T
    for shape in ((100,), (1, 100), (1, 1, 100)):
        with torch.no_grad():
            got = compiled(x.view(shape)).double() - 1
        assert got.shape == (*shape[:-1], 40)
        error = (got.flatten() - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < (1e-6 if dtype == torch.float32 else 0.004)  # the rounding of the result


def test_a_compiled_step_writes_over_its_state(tokenizer, monkeypatch):
    run_graphs_eagerly(monkeypatch)
    model = make_model(config=SMALL)
    plain, compiled = Decoder(model), Decoder(model, compiled=True)
    for rows in (1, 3):
        ours, theirs = model.init_state(rows), model.init_state(rows)
        places = [x.data_ptr() for _, x in state.named_tensors(theirs)]
        for i in range(8):
            tokens = torch.arange(rows) + i
            want, ours = plain.step(tokens, ours)
            got, theirs = compiled.step(tokens, theirs)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert [x.data_ptr() for _, x in state.named_tensors(theirs)] == places
        for (_, a), (_, b) in zip(
            state.named_tensors(ours), state.named_tensors(theirs), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_compiled_step_refuses_other_states(tokenizer, monkeypatch):
    run_graphs_eagerly(monkeypatch)
    model = make_model(config=SMALL)
    decoder, token = Decoder(model, compiled=True), torch.zeros(1, dtype=torch.int64)
    good = model.init_state(1)
    decoder.step(token, good)
    wide = state.map_tensors(good, lambda x: x.double())
    longer = state.map_tensors(good, lambda x: torch.cat([x, x], 1) if x.dim() > 1 else x)
    for bad in (wide, longer, model.init_state(2), good._replace(layers=good.layers[1:])):
        with pytest.raises(StateError, match=r"^state: got "):
            decoder.step(token, bad)


def test_a_graph_serves_any_rows_and_states_and_follows_the_weights(tokenizer, monkeypatch):
    made = run_graphs_eagerly(monkeypatch)
    model = make_model(config=SMALL)
    decoder = Decoder(model, compiled=True)

    def agrees(rows: int) -> None:
        start = model.init_state(rows)
        start = decoder.prefill(torch.arange(3 * rows).view(rows, 3), start)[1]
        turned = state.map_tensors(start, lambda x: x.mT.contiguous().mT if x.dim() > 2 else x)
        want, after = Decoder(model).step(torch.arange(rows), start)
        got, ours = decoder.step(torch.arange(rows), turned)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        for (_, a), (_, b) in zip(
            state.named_tensors(ours), state.named_tensors(after), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    for rows in (1, 3, 2, 40):
        agrees(rows)
    assert len(made) == 2  # of one row, and of more
    with torch.no_grad():
        model.norm.weight.mul_(2)  # in place: the graphs read it
        agrees(1)
        assert len(made) == 2
    for weights in ("bf16", "int8"):
        narrow(model, weights)
        agrees(1)
    assert len(made) == 4


def test_compiled_steps_take_tokens_as_eager_ones_do(tokenizer, monkeypatch):
    run_graphs_eagerly(monkeypatch)
    model = make_model(config=SMALL)
    plain, compiled = Decoder(model), Decoder(model, compiled=True)
    text = torch.arange(12).view(3, 4)
    for tokens in (text[:, 2], text[:, 1].int(), text[:1, 0], text[0, :0]):
        want, after = plain.step(tokens, model.init_state(len(tokens)))
        got, ours = compiled.step(tokens, model.init_state(len(tokens)))
        torch.testing.assert_close(got, want)
        assert torch.equal(ours.position, after.position)
    for decoder in (plain, compiled):
        with pytest.raises(ValueError, match=r"^tokens: got shape \[3, 4\], expected \[B\]"):
            decoder.step(text, model.init_state(3))


def test_int8_graphs_keep_to_the_rows_that_their_product_is_for(tokenizer, monkeypatch):
    made = run_graphs_eagerly(monkeypatch)
    model = narrow(make_model(config=SMALL), "int8")
    decoder = Decoder(model, compiled=True)
    for rows in (1, 2, 16, 17, 40):
        start = model.init_state(rows)
        want, _ = Decoder(model).step(torch.arange(rows), start)
        got, _ = decoder.step(torch.arange(rows), start)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)
    assert len(made) == 3


@pytest.mark.parametrize("width", ["fp32", "bf16"])
def test_gathered_weights_are_the_same_in_one_block(tmp_path, width):
    model = make_model(config=CONFIG).to({"fp32": torch.float32, "bf16": torch.bfloat16}[width])
    weights = {name: (x, x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    gather(model)
    ranges = sorted((x.data_ptr(), x.nbytes) for x in model.state_dict().values() if x.numel())
    for (start, size), (following, _) in itertools.pairwise(ranges):
        assert 0 <= following - start - size < 64  # one after the other, at lines of the cache
    for name, x in model.state_dict(keep_vars=True).items():
        was, value = weights[name]
        assert x is was and torch.equal(x, value)
        assert x.data_ptr() % 64 == 0 or x.numel() == 0
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for name, x in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(x, weights[name][1])
    save_model(model, str(tmp_path / "whole.safetensors"))
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in model.state_dict().values())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.embed.weight.zero_()
    assert model.embed.weight.any()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory as Linux tells it")
def test_weights_are_gathered_without_a_second_copy_of_all():
    code = """
import re
from torch import nn
from gla.models.weights import gather
def megabytes(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
model = nn.Sequential(*(nn.Linear(3072, 3072, bias=False) for _ in range(5)))  # 36 MB each
before = megabytes("VmRSS")
gather(model)
print(megabytes("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 90


def test_marks_and_forks_survive_compiled_steps(tokenizer, monkeypatch):
    run_graphs_eagerly(monkeypatch)
    model = make_model(config=SMALL)
    session = Session(model, tokenizer, compiled=True)
    session.read("abc de ")
    mark, fork = session.mark(), session.fork()
    first = "".join(session.generate(15, temperature=0))
    assert "".join(fork.generate(15, temperature=0)) == first
    session.rewind(mark)
    assert "".join(session.generate(15, temperature=0)) == first


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "weights", ["fp32", *(pytest.param(w, marks=pytest.mark.slow) for w in ("bf16", "int8"))]
)
def test_the_compiler_of_the_cpu_gives_the_same(tokenizer, weights):
    torch.compiler.reset()
    exact, model = make_model(config=CONSTANT), narrow(make_model(config=CONSTANT), weights)
    decoders = [Decoder(exact), Decoder(model), Decoder(model, compiled=True)]
    for rows in (1, 3, 5):
        states = [decoder.model.init_state(rows) for decoder in decoders]
        steps = []
        for i in range(8):
            logits = []
            for n, decoder in enumerate(decoders):
                y, states[n] = decoder.step(torch.arange(rows) + i, states[n])
                logits.append(y.float().clone())
            steps.append(torch.stack(logits))
        want, plain, compiled = torch.stack(steps, 1)
        # Both round as they go, in another order: the compiled one must be as near to fp32.
        eager, ours = ((x - want).square().mean().sqrt() for x in (plain, compiled))
        assert ours <= 1.2 * eager + 1e-4 * want.std()


def test_a_state_that_grows_is_not_compiled(tokenizer):
    with pytest.raises(ConfigError, match=r"^compile: got the layer 'softmax', whose state grows"):
        Session(make_model(), tokenizer, compiled=True)


def test_a_step_that_depends_on_its_position_is_not_compiled():
    config = SMALL.replace('"near"', '"near", "linformer_causal"')
    with pytest.raises(ConfigError, match=r"^compile: got the layer 'linformer_causal', whose"):
        Decoder(make_model(config=config), compiled=True)


def test_unknown_weights_are_refused():
    with pytest.raises(ConfigError, match=r"^weights: got 'fp8', expected one of fp32, bf16, int8"):
        narrow(make_model(), "fp8")


def test_the_fingerprint_follows_the_weights(tokenizer):
    model = make_model()
    decoder = Decoder(model)
    first = decoder.fingerprint()
    assert decoder.fingerprint() == first == Decoder(make_model()).fingerprint()
    with torch.no_grad():
        model.norm.weight[0] += 1
    assert decoder.fingerprint() != first
