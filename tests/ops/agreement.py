"""One measure for all tests of the op: values and every gradient against the float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gla
from gla.testing import Inputs, error, limit, state_dtype
from tests import oracle

# The forms under test; tests take them from here only.
IMPLS = ("recurrent", "torch")

LOSSES = ("o", "state", "both")  # what the loss reads: the output, the final state, or both


class Evaluation(NamedTuple):
    """Tensors by name: values (o, S, z) and gradients (of q, k, v, log_decay, S, z)."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def contiguous(x: Tensor) -> Tensor:
    """An upstream gradient as it is."""
    return x.contiguous()


def transposed(x: Tensor) -> Tensor:
    """The same values at other strides: the first and the last dimension swapped in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(x: Tensor) -> Tensor:
    """One number at every place, with stride 0 throughout, as the backward of a sum gives it."""
    return x.new_tensor(0.7).expand(x.shape)


def named(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors of the op's arguments, by the names of the result's gradients."""
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if inputs.log_decay is not None:
        tensors["log_decay"] = inputs.log_decay
    if inputs.initial_state is not None:
        tensors["S"] = inputs.initial_state.S
        if inputs.initial_state.z is not None:
            tensors["z"] = inputs.initial_state.z
    return tensors


def call(tensors: dict[str, Tensor], impl: str, **options: Any) -> gla.Output:
    """Call the op with tensors named as `named` does."""
    state = gla.LinearState(tensors["S"], tensors.get("z")) if "S" in tensors else None
    return gla.gated_linear_attention(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        tensors.get("log_decay"),
        initial_state=state,
        impl=impl,
        **options,
    )


def op_values(tensors: dict[str, Tensor], impl: str, **options: Any) -> dict[str, Tensor]:
    """The op's results by name."""
    out = call(tensors, impl, **options)
    values = {"o": out.o, "S": out.final_state.S}
    return values if out.final_state.z is None else values | {"z": out.final_state.z}


def oracle_values(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The oracle's results by name."""
    options = {key: value for key, value in options.items() if key != "chunk_size"}
    o, S, z = oracle.recurrence(**tensors, **options)
    return {"o": o, "S": S} if z is None else {"o": o, "S": S, "z": z}


def upstream_of(
    values: dict[str, Tensor], loss: str, layout: Callable[[Tensor], Tensor], seed: int = 7
) -> dict[str, Tensor]:
    """Unit-scale upstream gradients for the values that the loss reads."""
    draws = torch.Generator().manual_seed(seed)
    read = {"o": ["o"], "state": ["S", "z"], "both": ["o", "S", "z"]}[loss]
    result = {}
    for name in read:
        if name in values:
            x = values[name]
            draw = torch.randn(x.shape, generator=draws, dtype=torch.float64)
            result[name] = layout(draw.to(x.device, x.dtype))
    return result


def differentiate(
    values: dict[str, Tensor], leaves: dict[str, Tensor], upstream: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of every leaf; zeros where a leaf is not read."""
    # A zero state after no tokens depends on nothing.
    read = [name for name in upstream if values[name].requires_grad]
    if not read:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(
        [values[name] for name in read],
        [*leaves.values()],
        [upstream[name].to(values[name].dtype) for name in read],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, grads, strict=True))


def evaluate(
    inputs: Inputs,
    impl: str,
    *,
    loss: str = "both",
    layout: Callable[[Tensor], Tensor] = contiguous,
    **options: Any,
) -> Evaluation:
    """The op's values and gradients, with upstream gradients drawn from a fixed seed."""
    leaves = {name: x.detach().requires_grad_() for name, x in named(inputs).items()}
    values = op_values(leaves, impl, **options)
    gradients = differentiate(values, leaves, upstream_of(values, loss, layout))
    return Evaluation({n: x.detach() for n, x in values.items()}, gradients)


def expect(
    inputs: Inputs,
    *,
    loss: str = "both",
    layout: Callable[[Tensor], Tensor] = contiguous,
    **options: Any,
) -> Evaluation:
    """What `evaluate` should give, from the oracle, everything in float64."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in named(inputs).items()}
    values = oracle_values(leaves, **options)
    # The upstream gradients have to be the very numbers the op gets: rounded to its dtypes.
    wide = state_dtype(inputs.v.dtype)
    as_op = {n: x.to(inputs.v.dtype if n == "o" else wide) for n, x in values.items()}
    gradients = differentiate(values, leaves, upstream_of(as_op, loss, layout))
    return Evaluation({n: x.detach() for n, x in values.items()}, gradients)


def assert_agree(got: Evaluation, want: Evaluation, inputs: Inputs) -> None:
    """Compare shapes, dtypes and values of everything, and name all that is over its limit."""
    given, dtype = named(inputs), inputs.v.dtype
    assert got.values.keys() == want.values.keys()
    assert got.gradients.keys() == want.gradients.keys()
    for name, x in got.values.items():
        assert x.dtype == (dtype if name == "o" else state_dtype(dtype)), f"dtype of {name}"
        assert x.shape == want.values[name].shape, f"shape of {name}"
    for name, x in got.gradients.items():
        assert x.dtype == given[name].dtype, f"dtype of the gradient of {name}"
        assert x.shape == given[name].shape, f"shape of the gradient of {name}"

    def too_far(of: dict[str, Tensor], reference: dict[str, Tensor], gradient: bool) -> list[str]:
        found = []
        for name, x in of.items():
            bound = limit(dtype, x.dtype, gradient=gradient)
            if not (distance := error(x, reference[name])) <= bound:
                label = f"gradient of {name}" if gradient else name
                found.append(f"{label}: error {distance:.2e}, limit {bound:.0e}")
        return found

    faults = too_far(got.values, want.values, False)
    faults += too_far(got.gradients, want.gradients, True)
    assert not faults, "; ".join(faults)


def assert_correct(inputs: Inputs, impl: str, **options: Any) -> None:
    """Hold the op to the oracle; options as those of `evaluate`."""
    assert_agree(evaluate(inputs, impl, **options), expect(inputs, **options), inputs)
