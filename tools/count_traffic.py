"""Count what the kernels move and compute, in Triton's interpreter: the budget, measured.

    python tools/count_traffic.py [--tokens 1024] [--size 128] [--gate channel] [--segment 512]
        [--growth]

For each launch of a forward and a backward call (B = H = 1, bf16, the gate in bf16 too): the
distinct bytes it touches and the bytes it asks for, dot FLOPs and exponentials, per token and
head. Then both passes as one segment and cut into segments, with floor times for an H200 (4.3
TB/s, 790 TFLOP/s bf16) at B 8, H 16, T 4096, beside the least any implementation can move.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gla_kernels import ops  # noqa: E402
from gla_kernels.support import MAX_HEAD_DIM  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gla.testing import ordinary_log_decay  # noqa: E402
from tools import interpreter  # noqa: E402
from tools.interpreter import Builder  # noqa: E402

BANDWIDTH, FLOPS = 4.3e12, 790e12
ALLOCATION = ("empty", "new_empty", "view", "expand", "unsqueeze", "detach", "slice", "reshape")


@dataclass
class Launch:
    """Totals of one launch; addresses by element size."""

    kernel: str
    requested: int = 0
    flops: int = 0
    exponentials: int = 0
    addresses: dict[tuple[str, int], list[np.ndarray]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def distinct(self) -> int:
        """Distinct bytes read plus distinct bytes written."""
        return sum(
            np.unique(np.concatenate(parts)).size * size
            for (_, size), parts in self.addresses.items()
        )


class Operations(TorchDispatchMode):
    """Names the tensor operations that run beside the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.in_kernel = False  # the interpreter copies tensors of its own

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name not in ALLOCATION and not self.in_kernel:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting(operations: Operations) -> Iterator[list[Launch]]:
    """Record every launch inside the block; what it does to tensors is not counted beside it."""
    launches: list[Launch] = []
    executor = interpreter.interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_dot", "create_exp2", "create_exp")
    saved: dict[str, Any] = {name: getattr(Builder, name) for name in names}
    call = executor.__call__

    def counted_call(self, *args, **kwargs):
        launches.append(Launch(self.fn.__name__))
        operations.in_kernel = True
        result = call(self, *args, **kwargs)
        operations.in_kernel = False
        return result

    def access(kind: str, pointers, mask) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses, active = np.broadcast_arrays(pointers.data, mask.data)
        touched = addresses[active]
        launches[-1].requested += touched.size * size
        launches[-1].addresses[kind, size].append(touched)

    def load(self, pointers, mask, *rest, **options):
        access("read", pointers, mask)
        return saved["create_masked_load"](self, pointers, mask, *rest, **options)

    def store(self, pointers, value, mask, *rest, **options):
        access("written", pointers, mask)
        return saved["create_masked_store"](self, pointers, value, mask, *rest, **options)

    def dot(self, a, b, *rest):
        rows, inner = a.data.shape[-2:]
        launches[-1].flops += 2 * rows * inner * b.data.shape[-1]
        return saved["create_dot"](self, a, b, *rest)

    def exponential(name: str):
        def run(self, x):
            launches[-1].exponentials += x.data.size
            return saved[name](self, x)

        return run

    replaced = (load, store, dot, exponential("create_exp2"), exponential("create_exp"))
    executor.__call__ = counted_call
    for name, function in zip(names, replaced, strict=True):
        setattr(Builder, name, function)
    try:
        yield launches
    finally:
        executor.__call__ = call
        for name, function in saved.items():
            setattr(Builder, name, function)


@dataclass(frozen=True)
class Totals:
    """Of one pass, per token and head."""

    launches: int
    distinct: float
    requested: float
    flops: float
    exponentials: float
    operations: tuple[str, ...]


def measure(T: int, K: int, V: int, gate: str, segment: int) -> dict[str, Totals]:
    """{"forward": .., "backward": ..} of one call; prints a line a launch."""
    draws = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, 1, K, generator=draws).bfloat16() for _ in range(2))
    v, do = (torch.randn(1, T, 1, V, generator=draws).bfloat16() for _ in range(2))
    shape = {"none": None, "head": (1, T, 1), "channel": (1, T, 1, K)}[gate]
    g = None if shape is None else ordinary_log_decay(shape, dtype=torch.bfloat16)
    call = (q, k, v, g, None, None, 0.1, segment)
    with Operations() as operations, counting(operations) as forward:
        _, _, bounds = ops.chunkwise.__wrapped__(*call)
    first = tuple(operations.names)
    with Operations() as operations, counting(operations) as backward:
        ops._backward.__wrapped__(*call, bounds, do, None)
    return {
        "forward": _totals(forward, T, first),
        "backward": _totals(backward, T, tuple(operations.names)),
    }


def _totals(launches: list[Launch], T: int, operations: tuple[str, ...]) -> Totals:
    for x in launches:
        print(
            f"  {x.kernel:18} distinct {x.distinct() / T:7.0f} B"
            f"  requested {x.requested / T:7.0f} B"
            f"  {x.flops / T / 1e3:6.0f} kFLOP  {x.exponentials / T:6.0f} exponentials"
        )
    return Totals(
        len(launches),
        sum(x.distinct() for x in launches) / T,
        sum(x.requested for x in launches) / T,
        sum(x.flops for x in launches) / T,
        sum(x.exponentials for x in launches) / T,
        operations,
    )


def least(K: int, V: int, gate: str) -> dict[str, int]:
    """Bytes that no implementation can do without: inputs read once, results written once."""
    g = {"none": 0, "head": 2, "channel": 2 * K}[gate]
    inputs = 2 * (2 * K + V) + g
    return {"forward": inputs + 2 * V, "backward": 2 * inputs + 2 * V}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--size", type=int, default=128, help="K = V")
    parser.add_argument("--gate", default="channel", choices=("none", "head", "channel"))
    parser.add_argument("--segment", type=int, default=512)
    parser.add_argument("--growth", action="store_true", help="FLOPs at twice the tokens, too")
    options = parser.parse_args()
    if not 1 <= options.size <= MAX_HEAD_DIM:
        parser.error(f"--size: got {options.size}, expected 1 to {MAX_HEAD_DIM}")
    if options.tokens < 1:
        parser.error(f"--tokens: got {options.tokens}, expected 1 or more")
    if options.segment % 64 or options.segment < 64:
        parser.error(f"--segment: got {options.segment}, expected a multiple of 64")
    interpreter.fix_bf16()
    floor = least(options.size, options.size, options.gate)
    lines = []
    ways = [("one pass", options.tokens)]
    if options.segment < options.tokens:
        ways.append(("segmented", options.segment))
    for name, segment in ways:
        print(f"{name}, gate {options.gate}, K = V = {options.size}, T = {options.tokens}")
        totals = measure(options.tokens, options.size, options.size, options.gate, segment)
        for which, x in totals.items():
            count = 8 * 16 * 4096
            bytes_ms = x.distinct * count / BANDWIDTH * 1e3
            flops_ms = x.flops * count / FLOPS * 1e3
            lines.append(
                f"{name:10} {which:8}  {x.distinct:6.0f} B (least {floor[which]:5})"
                f"  requested / distinct {x.requested / x.distinct:4.2f}"
                f"  {x.launches} launches  {x.exponentials:5.0f} exponentials"
                f"  floor {bytes_ms:5.2f} ms (bytes) {flops_ms:5.2f} ms (FLOPs)"
                f"  beside the kernels: {', '.join(x.operations) or 'nothing'}"
            )
        if options.growth and name == "one pass":
            T = 2 * options.tokens
            longer = measure(T, options.size, options.size, options.gate, T)
            lines += [
                f"FLOPs per token, {which}, T {T} over {options.tokens}:"
                f" {longer[which].flops / x.flops:5.3f}"
                for which, x in totals.items()
            ]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
