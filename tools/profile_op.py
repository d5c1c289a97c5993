"""Where the time of the op's torch form goes, by kind of operation.

    python tools/profile_op.py [--tokens 8192] [--threads 2] [--calls 10]

B 1, H 8, K = V = 64. Microseconds for 512 tokens of the 8 heads, a segment in fp32: the whole as
it runs alone, and its parts, from calls in between whose operations are timed one by one, each with
its dispatch. What is left is Python and views. torch's profiler would count this too, but writing
its records between the operations makes those that wait for memory up to ten times as long.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from bench_op import both, forward, inputs, op
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

SEGMENT = 512

PRODUCTS = {"bmm", "baddbmm"}
EXPONENTIALS = {"exp", "exp2", "threshold", "reciprocal"}
COPIES = {"copy", "clone", "to", "_to_copy", "reshape", "flatten", "contiguous"}
MEMORY = {"empty", "new_empty", "zeros", "new_zeros"}
REST = "Python and views"


class Clock(TorchDispatchMode):
    """Adds up the time of every operation inside the op, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "gla":  # the body, past this mode: it is operations too
            with self:
                return func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        before = time.perf_counter()
        result = func(*args, **kwargs)
        spent = time.perf_counter() - before
        if not (func.is_view and shares(result, args[0])):
            self.spent[kind(func.overloadpacket.__name__.rstrip("_"), args, result)] += spent
        return result


def shares(result: Any, x: torch.Tensor) -> bool:
    """Whether what a view operation returned is one: some copy where they must."""
    return not isinstance(result, torch.Tensor) or (
        result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    )


def kind(name: str, args: tuple, result: Any) -> str:
    """What an aten operation is counted as."""
    if name in PRODUCTS:
        return f"products, {str(args[0].dtype).removeprefix('torch.')}"
    if name in EXPONENTIALS:
        return "exponentials, reciprocals"
    if name in MEMORY:
        return "memory"
    if name in COPIES:
        source = args[1] if name == "copy" else args[0]
        return "copies" if source.dtype == result.dtype else "copies that convert"
    return "sums, factors, masks"


def measure(run: Callable[[], Any], calls: int) -> tuple[float, dict[str, float]]:
    """Median seconds of a call and of its kinds of operations, of as many calls each, in turns."""
    whole, parts = [], defaultdict(list)
    for _ in range(2):
        run()
    for _ in range(calls):
        before = time.perf_counter()
        run()
        whole.append(time.perf_counter() - before)
        with Clock() as clock:
            run()
        for name, seconds in clock.spent.items():
            parts[name].append(seconds)
    return median(whole), {name: median(times) for name, times in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for passes, way in (("forward", forward), ("forward + backward", both)):
        for gates in ("no", "head", "channel"):
            for dtype in (torch.float32, torch.bfloat16):
                *x, g = inputs(options.tokens, dtype, grad=True)
                if gates == "head":
                    g = g.detach()[..., 0].clone().requires_grad_()
                if gates != "no":
                    x.append(g)
                whole, parts = measure(way(op, x), options.calls)
                parts[REST] = whole - sum(parts.values())
                scale = 1e6 * SEGMENT / options.tokens
                print(f"{passes}, {gates} gate, {str(dtype)[6:]}: {whole * scale:.0f} us")
                for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
                    print(f"    {name:32s} {seconds * scale:7.0f}  {seconds / whole:5.0%}")


if __name__ == "__main__":
    main()
