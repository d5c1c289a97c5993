"""Where a model runs and how precisely: resolved once, by a rule, and said in the log."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gla.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Return the device of a name: "cpu", "cuda:0", …, or "auto" (CUDA if there is one, else CPU).

    Raises:
        ConfigError: No such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as reason:
        raise ConfigError(
            f"device: got {name!r}, expected auto, cpu, cuda, cuda:N or mps; fix by naming one of "
            "them"
        ) from reason
    count = torch.cuda.device_count()
    absent = {
        "cuda": not torch.cuda.is_available() or (device.index or 0) >= count,
        "mps": not torch.backends.mps.is_available(),
        "cpu": False,
    }
    if absent.get(device.type, True):
        raise ConfigError(
            f"device: got {name!r}, expected a device of this machine ({count} CUDA devices); "
            "fix with --device cpu"
        )
    return device


def resolve_precision(wanted: str, device: torch.device) -> str:
    """Return "fp32", "bf16" or "fp16" for one of them or "auto".

    "auto" is bf16 where it is faster: on CUDA devices that compute it natively (from sm_80 on), and
    on CPUs with AVX-512 bf16 instructions or AMX tiles (a step of the demo takes 0.65 of the time
    there). Elsewhere it is fp32.

    Raises:
        ConfigError: bf16 was named for a GPU that does not compute it.
    """
    native = {
        "cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
        "cpu": lambda: torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    }.get(device.type, lambda: False)
    if wanted == "auto":
        return "bf16" if native() else "fp32"
    if wanted == "bf16" and device.type == "cuda" and not native():
        raise ConfigError(
            "train.precision: got 'bf16' on a GPU without it, expected 'fp32' or 'auto'; fix with "
            "--train.precision auto"
        )
    return wanted


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a model runs at a resolved precision."""
    if precision == "fp32":
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=dtype)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into eval mode without gradients, and afterwards back.

    Random numbers drawn inside do not count: training goes on as if nothing had been evaluated.
    """
    was_training = model.training
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with torch.random.fork_rng(list(devices)), torch.no_grad():
            yield
    finally:
        model.train(was_training)


def find_compiler() -> str | None:
    """Return the C++ compiler that ``torch.compile`` would call on the CPU, if there is one."""
    names = (os.environ.get("CXX", "g++"), "clang++", "c++")
    return next((path for name in names if (path := shutil.which(name))), None)


def prepare_blocks(
    model: torch.nn.Module, device: torch.device, *, compiled: bool, checkpointing: bool
) -> None:
    """Let each block of ``model.blocks`` be compiled, or keep only its input for the backward pass.

    Names in the state dict stay as they are.

    Args:
        model: Its ``blocks`` are changed in place.
        device: Where it runs.
        compiled: Pass each block through ``torch.compile``.
        checkpointing: Compute each block again in the backward pass.

    Raises:
        ConfigError: Compiling on a CPU without a C++ compiler.
    """
    if compiled and device.type == "cpu" and find_compiler() is None:
        raise ConfigError(
            "train.compile: got true on a CPU without a C++ compiler, expected g++ or clang++; "
            "fix by installing one or with --train.compile false"
        )
    for block in model.blocks:  # type: ignore[union-attr]
        if not checkpointing:
            if compiled:
                block.compile()
            continue
        inner = torch.compile(block.forward) if compiled else block.forward
        block.forward = _recomputing(inner)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def outer(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return outer


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far: on the GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
