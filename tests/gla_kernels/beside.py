"""Cases of what lies beside the op: norm and gate, the short convolution, the loss, and layers.

Run by ``interpreted.py``. Each returns errors over limits against fp64 computed here.
"""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils._python_dispatch import TorchDispatchMode

from gla.testing import error, limit

FP32 = torch.float32


def run_norm_gate(
    norm_gate: tuple[int, ...],
    dtype: torch.dtype = FP32,
    gate_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """The kernel of norm and gate, of this shape, against its formula in fp64."""
    import gla_kernels.ops  # noqa: F401

    x, z = (torch.randn(norm_gate) for _ in range(2))
    leaves = [x.to(dtype), (3 * z).to(gate_dtype or dtype), torch.rand(norm_gate[-1]) + 0.5]
    wide = [u.double().requires_grad_() for u in leaves]
    leaves = [u.requires_grad_() for u in leaves]
    y = torch.ops.gla_kernels.norm_gate(*leaves, 1e-5)
    x, z, w = wide
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * w * z / (1 + (-z).exp())
    dy = torch.randn(norm_gate).to(dtype)
    grads = torch.autograd.grad(y, leaves, dy)
    wanted = torch.autograd.grad(expected, wide, dy.double())
    assert [g.dtype for g in grads] == [u.dtype for u in leaves]
    if not y.numel():
        return {"y": float(y.shape != x.shape), "dw": grads[2].abs().sum().item()}
    errors = {"y": error(y, expected) / limit(dtype)}
    for name, grad, reference in zip("xzw", grads, wanted, strict=True):
        errors["d" + name] = error(grad, reference) / limit(dtype, gradient=True)
    return errors


def run_convolution(
    tokens: int,
    channels: int,
    width: int,
    dtype: torch.dtype = FP32,
    batch: int = 1,
    offsets: list[int] | None = None,
    state: bool = True,
    strided: bool = False,
    only: str = "",
) -> dict[str, float]:
    """The layer of the short convolution, in kernels, against sums over its window in fp64.

    ``only``: "y" or "final", the one result that a loss uses.
    """
    import gla_kernels.ops  # noqa: F401

    from gla.layers.short_convolution import ShortConvolution

    N = batch if offsets is None else len(offsets) - 1
    conv = ShortConvolution(channels, width)
    given = {"x": torch.randn(batch, tokens, channels).to(dtype)}
    if state:  # such as a convolution has left it
        given["state"] = torch.randn(N, width - 1, channels).to(dtype).float()
    leaves = {n: u.clone().requires_grad_() for n, u in given.items()} | {"weight": conv.weight}
    x = leaves["x"]
    if strided:
        x = torch.cat([x, torch.full_like(x, math.nan)], -1)[..., :channels]
    cu = None if offsets is None else torch.tensor(offsets)
    y, final = conv(x, leaves.get("state"), cu, True)

    wide = {n: u.detach().double().requires_grad_() for n, u in leaves.items()}
    rows, ends = wide["x"].flatten(0, 1), offsets or range(0, (batch + 1) * tokens, tokens or 1)
    bounds = [*pairwise(ends)] if tokens else [(0, 0)] * N
    outputs, states = [], []
    for n, (start, end) in enumerate(bounds):
        before = wide["state"][n] if state else rows.new_zeros(width - 1, channels)
        u = torch.cat([before, rows[start:end]])
        a = [(wide["weight"] * u[t : t + width]).sum(0) for t in range(end - start)]
        outputs += [v / (1 + (-v).exp()) for v in a]
        states.append(u[end - start :])
    expected = torch.stack(outputs).view(y.shape) if outputs else wide["x"] * 0
    results = {"y": (y, expected), "final": (final, torch.stack(states))}
    errors = {n: error(*pair) / limit(dtype) for n, pair in results.items()}
    assert (y.dtype, final.dtype) == (dtype, FP32)

    used = [pair for name, pair in results.items() if only in ("", name)]
    upstream = [torch.randn(got.shape).to(got.dtype) for got, _ in used]
    grads = torch.autograd.grad([u for u, _ in used], [*leaves.values()], upstream)
    wanted = torch.autograd.grad(
        [u for _, u in used],
        [*wide.values()],
        [u.double() for u in upstream],
        materialize_grads=True,
    )
    assert [g.dtype for g in grads] == [u.dtype for u in leaves.values()]
    for name, grad, reference in zip(leaves, grads, wanted, strict=True):
        errors["d" + name] = error(grad, reference) / limit(dtype, gradient=True)
    return errors


def run_loss(
    rows: int,
    vocabulary: int,
    dtype: torch.dtype = FP32,
    chunk: int = 2**22,
    ignore: float = 0.2,
    ignore_index: int = -100,
    size: float = 1.0,
    weight_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """Loss of a linear head and its gradients against fp64; ``ignore``: share of such targets."""
    import gla_kernels.ops  # noqa: F401

    from gla.models import loss as module

    module._CHUNK_LOGITS = chunk
    leaves = [size * torch.randn(rows, 8), torch.randn(vocabulary, 8) / 8**0.5]
    leaves = [x.to(d) for x, d in zip(leaves, (dtype, weight_dtype or dtype), strict=True)]
    wide = [x.double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    targets = torch.randint(vocabulary, (rows,))
    targets[: int(ignore * rows)] = ignore_index
    logits_of, held = F.linear, []

    def watched(x: Tensor, w: Tensor) -> Tensor:
        out = logits_of(x, w)
        held.append(out.numel() * out.element_size())
        return out

    F.linear = watched
    got = module.linear_cross_entropy(leaves[0], leaves[1], targets, ignore_index, True)
    F.linear = logits_of
    assert max(held, default=0) <= 8 * chunk  # what the torch form holds
    with torch.no_grad():
        evaluated = module.linear_cross_entropy(leaves[0], leaves[1], targets, ignore_index, True)
    logits = wide[0] @ wide[1].T
    counted = (targets != ignore_index).nonzero().flatten()
    picked = logits[counted, targets[counted]]
    expected = (logits[counted].exp().sum(1).log() - picked).sum()
    grads = torch.autograd.grad(3 * got, leaves)
    wanted = torch.autograd.grad(3 * expected, wide, materialize_grads=True)
    assert got.dtype == FP32 and torch.equal(got, evaluated)
    errors = {"loss": error(got, expected) / limit(dtype)}
    for name, grad, reference in zip("hw", grads, wanted, strict=True):
        errors["d" + name] = error(grad, reference) / limit(dtype, gradient=True)
    return errors


def run_logits(dtype: torch.dtype) -> dict[str, float]:
    """Losses and gradients of logits, -inf and ignored NaN among them, against torch in fp64."""
    import gla_kernels.ops  # noqa: F401

    logits = (20 * torch.randn(6, 5000)).to(dtype)
    logits[0, :4500] = -math.inf  # a whole block
    logits[1, 7] = 3e4
    logits[2] = math.nan
    targets = torch.tensor([4999, 7, -100, 0, 5000, -1])
    x = logits.double().requires_grad_()
    expected = x.logsumexp(1)[[0, 1, 3]] - x[[0, 1, 3], [4999, 7, 0]]
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    losses = torch.ops.gla_kernels.cross_entropy(logits, targets, -100, True)
    assert losses[4:].isnan().all()  # targets that are no tokens
    assert losses[2] == 0 and (logits[2] == 0).all()
    return {
        "loss": error(losses[[0, 1, 3]], expected) / limit(FP32),
        "gradient": error(logits[[0, 1, 3]], wanted[[0, 1, 3]]) / limit(dtype, gradient=True),
    }


def run_operator(operator: str, segment: int | None = None) -> dict[str, float]:
    """What torch checks of an operator: schema, autograd, fake tensors, dynamic shapes."""
    import gla_kernels.ops  # noqa: F401

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape).requires_grad_()

    tokens = 17 if segment is None else 70
    q, g = leaf(1, tokens, 2, 8), (-torch.rand(1, tokens, 2, 8)).requires_grad_()
    arguments: dict[str, tuple[Any, ...]] = {
        "chunkwise": (q, leaf(1, tokens, 1, 8), leaf(1, tokens, 2, 4), g, None, None, 0.3, segment),
        "norm_gate": (leaf(5, 2, 24), leaf(5, 2, 24), leaf(24), 1e-5),
        "short_convolution": (leaf(1, 20, 8), leaf(4, 8), leaf(1, 3, 8), None),
        "cross_entropy": (torch.randn(6, 40), torch.arange(6), -100, True),
    }
    found = torch.library.opcheck(
        getattr(torch.ops.gla_kernels, operator), arguments[operator], raise_exception=False
    )
    assert len(found) == 4
    return {name: 0.0 if said == "SUCCESS" else math.inf for name, said in found.items()}


class Kernels(TorchDispatchMode):
    """The operators of ``gla_kernels`` that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def note(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile nothing; see which operators a graph calls."""
        for node in graph.graph.nodes:
            for called in (node.target, *node.args[:1]):  # an argument where it writes in place
                if getattr(called, "namespace", None) == "gla_kernels":
                    self.seen.add(called.__name__.split(".")[0])
        return boxed_nop(graph, inputs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gla_kernels":
            self.seen.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def run_model(
    kind: str, compiled: bool = False, packed: bool = False, autocast: bool = False
) -> dict[str, float]:
    """Loss and a decoded token of a model through kernels, against "auto", which takes none.

    With ``autocast`` (bf16) "auto" is in fp32, and the limit twice its error under autocast.
    """
    from gla.models.config import ModelConfig
    from gla.models.language_model import LanguageModel

    tables: dict[str, dict[str, Any]] = {
        "linear_attention": {"num_heads": 2, "conv_width": 4},
        "mamba2": {"num_heads": 2, "state_dim": 16},
    }
    models = []
    for impl in ("triton", "auto", *["auto"] * autocast):
        mixers = {"mine": {"kind": kind, "impl": impl} | tables[kind]}
        torch.manual_seed(0)
        config = ModelConfig(d_model=16, vocab_size=40, layers=["mine"], mixers=mixers)
        models.append(LanguageModel(config))
        with torch.no_grad():
            for p in models[-1].parameters():
                p *= 10 if p.dim() > 1 else 1  # large enough that all parts matter
    tokens, targets = torch.randint(40, (2, 1, 35) if packed else (2, 2, 20))
    targets[:, ::7] = -100
    cu = torch.tensor([0, 2, 2, 35]) if packed else None
    results = []
    for model in models:

        def loss(model: LanguageModel = model) -> Tensor:
            return model.loss(tokens, targets, cu_seqlens=cu)

        kernels = Kernels()
        if compiled and model is models[0]:
            backend = aot_autograd(fw_compiler=kernels.note, bw_compiler=boxed_nop)
            loss = torch.compile(loss, backend=backend, fullgraph=True)
        narrow = torch.autocast("cpu", torch.bfloat16, enabled=autocast and model is not models[1])
        # A mode would stop compiling.
        with narrow, contextlib.nullcontext() if compiled else kernels:
            value = loss()
        used = {"norm_gate"} if kind == "linear_attention" else set()
        used |= {"chunkwise", "short_convolution", "cross_entropy"}
        assert kernels.seen == (used if model is models[0] else set()), kernels.seen
        gradients = torch.autograd.grad(value, [*model.parameters()])
        state = model(tokens, cu_seqlens=cu).state
        assert state is not None
        step, _ = model.decode_step(tokens[0, : state.position.numel()], state)
        results.append({"loss": value, "step": step})
        results[-1] |= {n: g for (n, _), g in zip(model.named_parameters(), gradients, strict=True)}
    got, want, *torch_way = results
    allowed = {name: limit(FP32, gradient=name not in ("loss", "step")) for name in want}
    for way in torch_way:
        allowed = {n: max(x, 2 * error(way[n], want[n])) for n, x in allowed.items()}
    return {name: error(x, want[name]) / allowed[name] for name, x in got.items()}
