"""The op inside torch.compile, opcheck, autocast, checkpointing, vmap, DDP."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gla
from gla.testing import GATE_SHAPES, Inputs, error, limit, make_inputs
from tests.ops.agreement import (
    IMPLS,
    Evaluation,
    assert_agree,
    differentiate,
    evaluate,
    expect,
    named,
    op_values,
    oracle_values,
    upstream_of,
)

NO_COMPILER = not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++", "clang++"))
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="torch.compile needs a C++ compiler")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    # A graph cached on disk would be that of the operators as they were when it was written.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def _run(run: Any, inputs: Inputs) -> Evaluation:
    """Values and gradients of ``run(tensors by name) -> values by name``."""
    leaves = {name: x.detach().requires_grad_() for name, x in named(inputs).items()}
    values = run(leaves)
    gradients = differentiate(values, leaves, upstream_of(values, "both", lambda x: x))
    return Evaluation({n: x.detach() for n, x in values.items()}, gradients)


def _assert_same(got: Evaluation, want: Evaluation) -> None:
    for kind in ("values", "gradients"):
        for name, x in getattr(want, kind).items():
            assert torch.equal(getattr(got, kind)[name], x), (kind, name)


# --- torch.compile ----------------------------------------------------------------------------

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "channel": ({}, {}),
    "no gate": ({"gate": "none", "state": False}, {"scale": 0.5}),
    "fixed, grouped": ({"gate": "fixed", "kv_heads": 1}, {}),
    "head, normalized": (
        {"gate": "head", "positive": True, "normalizer": True},
        {"normalize": True},
    ),
    "bf16": ({"dtype": torch.bfloat16}, {}),
    "packed": ({"batch": 1, "sequences": 3}, {"cu_seqlens": torch.tensor([0, 5, 5, 37])}),
}
WHOLE = ({"gate": "none"}, {"causal": False})


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("impl", "call"),
    [(impl, call) for impl in ("auto", *IMPLS) for call in CALLS.values()] + [("auto", WHOLE)],
)
def test_traced_without_graph_breaks(impl: str, call: tuple[dict, dict]) -> None:
    """Traced forward and backward, run by eager kernels: the very values of eager."""
    drawn, options = call
    inputs = make_inputs(**drawn)

    def run(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return op_values(leaves, impl, **options)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    _assert_same(_run(compiled, inputs), _run(run, inputs))


@needs_compiler
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_for_the_cpu() -> None:
    inputs = make_inputs()

    def run(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = leaves | {"q": torch.nn.functional.silu(leaves["q"])}
        values = op_values(changed, "torch")
        return values | {"o": values["o"] * 2 + 1}

    got, want = (_run(f, inputs) for f in (torch.compile(run, fullgraph=True), run))
    for name, x in want.values.items():
        assert error(got.values[name], x) <= limit(torch.float32)
    for name, x in want.gradients.items():
        assert error(got.gradients[name], x) <= limit(torch.float32, gradient=True)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("impl", IMPLS)
def test_other_lengths_are_not_other_graphs(impl: str) -> None:
    """With dynamic shapes, T is a symbol: one graph for many lengths, of packs as well."""
    graphs = []

    def count(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    @functools.partial(torch.compile, backend=count, fullgraph=True, dynamic=True)
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return gla.gated_linear_attention(q, k, v, g, impl=impl).o

    for tokens in (20, 33, 64, 70):
        inputs = make_inputs(2, tokens, 3, 8, 6, state=False)
        want = gla.gated_linear_attention(*inputs[:4], impl=impl).o
        q, k, v, g, _ = inputs
        assert g is not None
        assert torch.equal(run(q, k, v, g), want)
    assert len(graphs) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_checks_inside_compile() -> None:
    def run(q: Tensor, g: Tensor) -> Tensor:
        return gla.gated_linear_attention(q, q, q, g).o

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    x = make_inputs(1, 20, 2, 8, 8, state=False)
    assert x.log_decay is not None
    with gla.checks(True):
        assert torch.equal(compiled(x.q, x.log_decay), run(x.q, x.log_decay))
        with pytest.raises(Exception, match="log_decay"):
            compiled(x.q, x.log_decay.abs() + 1)


# --- the registered operators -----------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Collects the calls of operators in the namespace gla::, with their arguments."""

    def __init__(self, differentiable: bool) -> None:
        super().__init__()
        self.differentiable = differentiable
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gla":
            copies = tuple(
                x.detach().clone().requires_grad_(self.differentiable and x.is_floating_point())
                if isinstance(x, Tensor)
                else x
                for x in args
            )
            self.calls.setdefault(str(func), (func, copies, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _recorded(impl: str, case: str) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The gla:: operators that a checked forward and a backward pass call, one call of each.

    Those of the forward pass are differentiable, those of the backward pass are not.
    """
    drawn, options = CALLS[case]
    leaves = {n: x.requires_grad_() for n, x in named(make_inputs(**drawn)).items()}
    with gla.checks(True), _Recorder(differentiable=True) as forward:
        values = op_values(leaves, impl, **options)
    with _Recorder(differentiable=False) as backward:
        differentiate(values, leaves, upstream_of(values, "both", lambda x: x))
    return backward.calls | forward.calls


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", ["channel", "no gate", "packed"])
def test_opcheck(impl: str, case: str) -> None:
    """Schema, autograd registration, fake tensors, tracing with dynamic shapes."""
    calls = _recorded(impl, case)
    assert len(calls) >= 2, f"{impl} called {[*calls]}: expected a forward and a backward operator"
    for operator, args, kwargs in calls.values():
        torch.library.opcheck(operator, args, kwargs)


@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_have_the_promised_strides(impl: str) -> None:
    """Whatever those of the states and of their gradients are."""
    state, turned = make_inputs().initial_state, 0
    assert state is not None
    for operator, args, kwargs in _recorded(impl, "channel").values():
        changed = []
        for x in args:
            if isinstance(x, Tensor) and x.shape == state.S.shape:
                x, turned = x.detach().mT.contiguous().mT, turned + 1
            changed.append(x)
        torch.library.opcheck(operator, tuple(changed), kwargs, test_utils="test_faketensor")
    assert turned >= 2


def test_every_registered_operator_is_exercised() -> None:
    seen = {name for impl in IMPLS for case in CALLS for name in _recorded(impl, case)}
    registered = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gla::")
    }
    assert registered
    assert {name.replace("::", ".") for name in registered} <= {
        name.removesuffix(".default") for name in seen
    }


# --- autocast and checkpointing ---------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATE_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(impl: str, gate: str, dtype: torch.dtype) -> None:
    """The op computes in the precision its inputs ask for; autocast is for the layers around it."""
    inputs = make_inputs(gate=gate, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = evaluate(inputs, impl)
    assert_agree(got, expect(inputs), inputs)


@pytest.mark.parametrize("normalizer", [False, True])
def test_autocast_changes_nothing_of_a_decoded_token(normalizer: bool) -> None:
    inputs = make_inputs(tokens=1, positive=normalizer, normalizer=normalizer)
    tensors = named(inputs)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got = op_values(tensors, "auto", normalize=normalizer)
    wide = {name: x.double() for name, x in tensors.items()}
    for name, want in oracle_values(wide, normalize=normalizer).items():
        assert error(got[name], want) <= limit(torch.float32), name


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_normalized(impl: str) -> None:
    inputs = make_inputs(positive=True, normalizer=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = evaluate(inputs, impl, normalize=True)
    assert_agree(got, expect(inputs, normalize=True), inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_nothing(impl: str, use_reentrant: bool, autocast: bool) -> None:
    inputs = make_inputs()

    def gradients(checkpointed: bool) -> list[Tensor | None]:
        leaves = {n: x.detach().requires_grad_() for n, x in named(inputs).items()}

        def block(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(op_values(dict(zip(leaves, tensors, strict=True)), impl).values())

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if checkpointed:
                o, S = checkpoint(block, *leaves.values(), use_reentrant=use_reentrant)
            else:
                o, S = block(*leaves.values())
        (o.square().sum() + S.square().sum()).backward()
        return [o.detach(), S.detach(), *(x.grad for x in leaves.values())]

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert got is not None and want is not None and torch.equal(got, want)


# --- functional transforms and data parallelism -----------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["none", "channel"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right_or_refused(impl: str, gate: str) -> None:
    inputs = make_inputs(6, 20, 2, 8, 5, gate=gate, state=False)
    tensors = [x for x in inputs[:4] if x is not None]

    def run(*arguments: Tensor) -> Tensor:
        return gla.gated_linear_attention(*arguments, impl=impl).o

    stacked = [x.unflatten(0, (3, 2)) for x in tensors]
    try:
        got = torch.func.vmap(run)(*stacked)
    except (RuntimeError, ValueError) as refused:
        assert "vmap" in str(refused) and "gla" in str(refused), refused
        return
    assert error(got.flatten(0, 1), run(*tensors)) <= limit(torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
def test_functional_gradient_is_right_or_refused(impl: str) -> None:
    inputs = make_inputs(1, 20, 2, 8, 5, state=False, dtype=torch.float64)
    q, k, v, g, _ = inputs

    def loss(q: Tensor) -> Tensor:
        return (gla.gated_linear_attention(q, k, v, g, impl=impl).o ** 2).sum()

    try:
        got = torch.func.grad(loss)(q)
    except RuntimeError as refused:  # custom operators of torch 2.13 do not take functorch's grad
        assert "functorch" in str(refused), refused
        return
    (want,) = torch.autograd.grad(loss(q.requires_grad_()), q)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


class _Mixer(torch.nn.Module):
    def __init__(self, impl: str) -> None:
        super().__init__()
        self.impl = impl
        self.project = torch.nn.Linear(8, 32)
        self.log_decay = torch.nn.Parameter(torch.tensor([-0.1, -0.5]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g = self.project(x).unflatten(-1, (2, 16)).split(4, dim=-1)
        g = torch.nn.functional.logsigmoid(g) + self.log_decay[:, None]
        return gla.gated_linear_attention(q, k, v, g, impl=self.impl).o


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no distributed")
@pytest.mark.parametrize("impl", IMPLS)
def test_distributed_data_parallel(impl: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixer, x = _Mixer(impl), torch.randn(2, 20, 8)
    want = torch.autograd.grad(mixer(x).square().sum(), [*mixer.parameters()])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(mixer)
        parallel(x).square().sum().backward()
    finally:
        dist.destroy_process_group()
    for parameter, grad in zip(mixer.parameters(), want, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-5)
