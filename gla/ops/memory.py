"""Memory of the chunkwise form: buffers that stay in cache, large outputs on huge pages.

The C library maps a block over 32 MB afresh at every call, and smaller ones that were at the top of
the heap often too; filling an output by 4 KB page faults takes as long as a third of the forward
pass. Asking Linux for 2 MB pages removes most of that. The threads write a segment at a time, whose
parts lie on one such page, so that one waits for the other's fault: outputs that the C library maps
are touched first, each part of them by a thread of its own.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys

import torch
from torch import Tensor

_LARGE = 4 << 20  # bytes from which a tensor lies on huge pages
_MAPPED = 32 << 20  # bytes from which glibc, left as it is, maps every block afresh
_STRIDE = 256  # bytes between touched places: enough of them for torch to use its threads


@functools.cache
def _madvise():
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if not sys.platform.startswith("linux") or advice is None:
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lambda start, size: call(start, size, advice)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty``; large CPU tensors on huge pages where the system has them."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.nbytes >= _LARGE and device.type == "cpu" and (advise := _madvise()) is not None:
        page = mmap.PAGESIZE
        start = -(-out.data_ptr() // page) * page
        # Advice: it may be refused.
        advise(start, (out.data_ptr() + out.nbytes - start) // page * page)
    return out


def new_output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``empty`` for what is written at once as a whole: large CPU tensors are in memory already."""
    out = empty(shape, dtype, device)
    if out.nbytes >= _MAPPED and device.type == "cpu":
        out.view(-1)[:: _STRIDE // out.itemsize].zero_()
    return out


def fresh(x: Tensor) -> Tensor:
    """A contiguous copy of x, as compiled graphs take an operator's outputs to be."""
    return x.clone(memory_format=torch.contiguous_format)


def is_one(factor: Tensor | float) -> bool:
    """Whether it is the number 1, by which nothing need be multiplied."""
    return not isinstance(factor, Tensor) and factor == 1


def multiply(x: Tensor, factor: Tensor | float, out: Tensor) -> None:
    """out = x * factor; where their dtypes differ, x is converted first."""
    if is_one(factor):
        out.copy_(x)
    elif x.dtype == out.dtype:
        torch.mul(x, factor, out=out)
    else:
        out.copy_(x).mul_(factor)


class Buffers:
    """Scratch tensors by name.

    Segments of a call reuse the same memory, so it is not mapped afresh and the busiest of it stays
    in cache; nothing is shared between calls.

    Args:
        dtype: of states, factors and sums: fp32 or fp64.
        product: of what matrix products read and write: the same, or bf16.
    """

    def __init__(self, dtype: torch.dtype, product: torch.dtype, device: torch.device) -> None:
        self.dtype, self.product, self.device = dtype, product, device
        self._room: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The buffer of this name; its content is whatever the last use left.

        Room grows to the largest shape asked for. A name has one dtype.
        """
        last, dtype = self._last.get(name), dtype or self.dtype
        if last is not None and last.shape == shape:
            assert last.dtype == dtype, name
            return last
        size, room = math.prod(shape), self._room.get(name)
        if room is None or room.numel() < size:
            room = self._room[name] = torch.empty(size, dtype=dtype, device=self.device)
        assert room.dtype == dtype, name
        self._last[name] = last = room[:size].view(shape)
        return last

    def narrow(self, name: str, x: Tensor) -> Tensor:
        """x as operands of products are held: itself, or its copy in the buffer of this name."""
        if x.dtype == self.product:
            return x
        return self(name, *x.shape, dtype=self.product).copy_(x)

    def widen(self, name: str, x: Tensor) -> Tensor:
        """x as states and sums are held: itself, or its copy in the buffer of this name."""
        return x if x.dtype == self.dtype else self(name, *x.shape).copy_(x)
