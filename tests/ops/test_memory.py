"""Work and memory grow in proportion to T; counted, not timed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gla.testing import GATE_SHAPES, Inputs, make_inputs
from tests.ops.agreement import (
    IMPLS,
    assert_correct,
    call,
    differentiate,
    evaluate,
    named,
    upstream_of,
)


def _work(inputs: Inputs, impl: str) -> tuple[int, int]:
    """Operators called, and bytes they allocated, by one forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        evaluate(inputs, impl)
    events = recorded.events() or []
    calls = [event for event in events if event.name.startswith("aten::")]
    return len(calls), sum(max(event.self_cpu_memory_usage, 0) for event in calls)


@pytest.mark.parametrize("impl", IMPLS)
def test_work_is_linear(impl: str) -> None:
    """Autograd through slices would allocate a whole sequence for every token or chunk."""
    # The recurrent form calls operators for each token: shorter runs show the same.
    base = 1024 if impl != "recurrent" else 16
    small, large = (_work(make_inputs(1, n, 2, 8, 8), impl) for n in (base, 4 * base))
    assert large[0] <= 4.2 * small[0]
    assert large[1] <= 4.2 * small[1]


def _saved(inputs: Inputs, impl: str, **options) -> int:
    """Bytes that the forward pass keeps for the backward beyond inputs and outputs."""
    leaves = {n: x.requires_grad_() for n, x in named(inputs).items()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call(leaves, impl, **options)
    results = [x for x in (out.o, *out.final_state) if x is not None]
    for x in (*leaves.values(), *results):
        kept.pop(x.untyped_storage().data_ptr(), None)
    # The graph has to be alive while its tensors are counted, and has to work afterwards.
    values = {"o": out.o, "S": out.final_state.S}
    differentiate(values, leaves, upstream_of(values, "both", lambda x: x))
    return sum(kept.values())


def _bytes(inputs: Inputs) -> int:
    return sum(x.numel() * x.element_size() for x in named(inputs).values())


@pytest.mark.parametrize("gate", GATE_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_for_backward(gate: str, dtype: torch.dtype) -> None:
    """The chunked form keeps its inputs and a few states: no more than half the inputs again."""
    saved = []
    for tokens in (4096, 8192, 16384):  # of one segment and more
        inputs = make_inputs(1, tokens, 2, 64, 64, gate=gate, state=False, dtype=dtype)
        saved.append(_saved(inputs, "torch"))
        assert saved[-1] <= 0.5 * _bytes(inputs)
    assert saved[2] - saved[1] <= 2.2 * (saved[1] - saved[0]) + 1


@pytest.mark.parametrize("impl", IMPLS)
def test_a_warm_state_adds_no_more_than_itself(impl: str) -> None:
    cold = make_inputs(1, 512, 2, 16, 16, state=False)
    warm = make_inputs(1, 512, 2, 16, 16)
    assert warm.initial_state is not None
    size = warm.initial_state.S.numel() * 4
    assert _saved(warm, impl) <= _saved(cold, impl) + size


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_is_kept_without_gradients(impl: str) -> None:
    tensors, saved = named(make_inputs(1, 64, 2, 16, 16)), []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(tensors, impl)
        assert not saved
        call({name: x.requires_grad_() for name, x in tensors.items()}, impl)
        assert saved


@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_that_are_mapped_by_themselves(impl: str) -> None:
    inputs = make_inputs(1, 2048, 8, 2, 512)
    assert inputs.v.nbytes == 32 * 2**20  # and so the output, and the gradient of v
    assert_correct(inputs, impl)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library of Linux")
@pytest.mark.parametrize("kept", [True, False])
def test_freed_blocks_stay_where_that_is_asked_for(kept: bool) -> None:
    code = f"""
import torch
from gla.process import keep_freed_memory
if {kept}:
    keep_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
blocks = [torch.ones(1 << 20) for _ in range(20)]  # 80 MB
before = resident()
del blocks
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (float(done.stdout) < 10) == kept
