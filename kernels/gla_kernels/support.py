"""What the kernels support, and their configuration: by rule from sizes and device, no tuning.

Sizes: B rows, T tokens, H heads, K key dimension, V value dimension, C tokens of a chunk, L of a
segment, N sequences.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHORT = 16  # so many tokens a sequence, or fewer, run token after token


@dataclass(frozen=True)
class Device:
    """What the rules need to know of a GPU.

    Attributes:
        name: for messages.
        capability: compute capability of an NVIDIA GPU, (0, 0) for an AMD one.
        shared: bytes of shared memory one program may use.
        processors: programs that run at once, one a multiprocessor.
    """

    name: str
    capability: tuple[int, int]
    shared: int
    processors: int

    @property
    def is_nvidia(self) -> bool:
        return self.capability[0] > 0


INTERPRETER = Device("Triton's interpreter", (9, 0), 232448, 132)


class Config(NamedTuple):
    """What kernels know of a call when they are compiled; device code reads it as ``s``.

    Attributes:
        K, V: key and value dimension.
        GK: channels of the gate: 0 without one, 1 for a gate a head, or K.
        wide: products are in fp32, not bf16.
        precision: Triton's name for how fp32 is multiplied.
        PARTS: bf16 parts of a gate that its sums take.
        C: tokens of a chunk.
        BK: K as a power of two, the rows of a sweep's state.
        KS: those of a part of it.
        KB: key channels of a block of scores.
        BV: value channels of a sweep's program.
        grad_BK: key channels of a program of the gradients.
        grad_BV: its value channels; fewer than V, and programs write sums to be added up.
        grad_VB: value channels of a block; fewer than grad_BV, and values are read twice.
        stages: of the pipeline that loads a sweep's tiles ahead; 1 is none.
    """

    K: int
    V: int
    GK: int
    wide: bool
    precision: str
    PARTS: int
    C: int
    BK: int
    KS: int
    KB: int
    BV: int
    grad_BK: int
    grad_BV: int
    grad_VB: int
    stages: int


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels: then they take CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


@functools.cache
def device_of(device: torch.device) -> Device:
    """Look up a device; in the interpreter, the CPU stands for an H100."""
    if device.type == "cpu":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    capability = (0, 0) if torch.version.hip else (found.major, found.minor)
    shared = 65536 if torch.version.hip else found.shared_memory_per_block_optin
    return Device(found.name, capability, shared, found.multi_processor_count)


def refusal(
    device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype, K: int, V: int
) -> str | None:
    """What the kernels expect of such a call and do not get; None if they take it."""
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"a GPU, or TRITON_INTERPRET=1, in place of device {device}"
    if dtype not in DTYPES or value_dtype not in DTYPES:
        return f"fp32, bf16 or fp16 in place of {dtype}"
    for name, size in (("key", K), ("value", V)):
        if size > MAX_HEAD_DIM:
            more = ", one of them the normalizer" if size == MAX_HEAD_DIM + 1 == V else ""
            return f"a {name} dimension of at most {MAX_HEAD_DIM} in place of {size}{more}"
    found = device_of(device)
    if found.is_nvidia and found.capability < (8, 0):
        name = f"{found.name} (sm_{found.capability[0]}{found.capability[1]})"
        return f"a GPU with bf16, sm_80 or later, in place of {name}"
    return None


@functools.cache
def config_for(
    device: Device, K: int, V: int, dtype: torch.dtype, GK: int, gate_dtype: torch.dtype
) -> Config:
    """The configuration of a call; ``dtype``: of q and v, or fp32.

    Chunks of 64 tokens suit Hopper's matrix units, and halve the states that go through memory;
    large heads and GPUs with little shared memory get shorter ones, and so does fp32, whose
    products hold each operand three times. Widths of the programs are the largest at which heads
    of 64 and 128 spill no registers. fp16 is multiplied as bf16: its tiles go through registers.
    """
    BK, BV = (max(16, 1 << (n - 1).bit_length()) for n in (K, V))
    wide, gated = dtype == torch.float32, GK > 0
    small = device.capability not in ((9, 0), (10, 0), (10, 3)) or max(BK, BV) > 128
    roomy = device.capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3))
    narrow = BV > 128 or wide or dtype == torch.float16 or (gated and not roomy)
    grad_BV = min(BV, 64) if wide else BV
    halved = (small or wide or dtype == torch.float16) and grad_BV > 32
    return Config(
        K=K,
        V=V,
        GK=GK,
        wide=wide,
        precision="tf32x3" if device.is_nvidia else "ieee",
        PARTS=1 if gate_dtype == torch.bfloat16 else 3 if wide else 2,
        C=16 if wide else 32 if small else 64,
        BK=BK,
        KS=min(BK, 32 if wide and gated and BK > 64 else 64),
        KB=min(BK, 32 if gated else 64),
        BV=min(BV, max(16, 2048 // BK) if wide else max(32, 4096 // BK) if small else 128),
        grad_BK=min(BK, 16 if narrow else 32),
        grad_BV=grad_BV,
        grad_VB=max(32, grad_BV // 2) if halved else grad_BV,
        stages=3 if device.capability == (9, 0) and not small and not wide else 2,
    )


def segment_length(device: Device, config: Config, B: int, T: int, H: int) -> int:
    """Tokens of a segment, a multiple of C; T (rounded up) if sequences are not cut.

    Sequences are cut when their number, times heads and blocks of V, leaves half of the GPU idle.
    """
    whole = -(-T // config.C) * config.C
    programs = max(1, B * H * -(-config.V // config.BV))
    if 2 * programs > device.processors or T <= 2 * 256:
        return whole
    wanted = -(-device.processors // programs)
    return max(256, -(-T // (wanted * config.C)) * config.C)


def launch(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, unless there is nothing to do."""
    if all(grid):
        kernel[grid](*arguments, **options)


def shapes_only(x: Tensor) -> bool:
    """Whether x has no values, and an operator returns new tensors before it launches anything."""
    return isinstance(x, FakeTensor) or x.device.type == "meta"


def operator(name: str, schema: str | None = None, mutates: tuple[str, ...] = ()) -> Any:
    """Register a function as an operator of torch, and as its own fake: see ``shapes_only``."""

    def register(function: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(
            f"gla_kernels::{name}", function, mutates_args=mutates, schema=schema
        )
        made.register_fake(function)
        return functools.update_wrapper(made, function)

    return register


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def room_for(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors of the same shapes and dtypes, not initialized."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
