"""Which form computes a call: the rule of ``impl="auto"``, and the refusals of a named one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from gla.errors import ConfigError
from gla.ops import chunked, recurrent, whole

IMPLS = ("auto", "recurrent", "torch", "triton")
CHUNK_SIZES = (16, 32, 64, 128, 256)

# (q, k, v, log_decay, S_0, cu_seqlens, scale) -> (o, S_T)
Form = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, float],
    tuple[Tensor, Tensor],
]


def resolve(
    impl: str,
    tokens: int,
    device: torch.device | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    dims: tuple[int, int] = (64, 64),
) -> str:
    """The form that ``impl`` stands for.

    "auto" is "recurrent" for one token (decoding) and "torch" for more, on every device. The Triton
    kernels run when named: they have been proven in Triton's interpreter, not yet on a GPU.

    Args:
        impl: one of IMPLS.
        tokens: T.
        device: of the tensors; a CPU if None.
        dtypes: of q (and k), and of v.
        dims: K and V.

    Raises:
        ValueError: an unknown impl.
        ConfigError: "triton" where its kernels do not take the call; one line of the command line
            too, where a model built for a GPU is put on a CPU.
    """
    if impl not in IMPLS:
        raise ValueError(
            f"impl: got {impl!r}, expected one of {', '.join(IMPLS)}; fix with impl='auto'"
        )
    device = device or torch.device("cpu")
    if impl == "triton":
        reason = _no_kernels(device, dtypes, dims)
        if reason is not None:
            raise ConfigError(f"impl: got 'triton', expected {reason}; fix with impl='torch'")
    if impl != "auto":
        return impl
    return "recurrent" if tokens == 1 else "torch"


def _no_kernels(
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], dims: tuple[int, int]
) -> str | None:
    """Why the Triton kernels do not take such a call; None if they do."""
    try:
        kernels = importlib.import_module("gla_kernels.ops")
    except ImportError as reason:
        return f"Triton to be installed ({reason})"
    return kernels.refusal(device, *dtypes, *dims)


# What torch.compiler.assume_constant_result sets; calling it would import torch._dynamo, a second.
_no_kernels._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The operator that ``gla_kernels.ops`` registers, once ``_no_kernels`` has imported it."""
    o, final, _ = torch.ops.gla_kernels.chunkwise(
        q, k, v, log_decay, state, cu_seqlens, scale, None
    )
    return o, final


def choose(
    impl: str, q: Tensor, v: Tensor, chunk_size: int | None, causal: bool, normalize: bool
) -> Form:
    """Return the function that computes this call, or raise ValueError naming the option."""
    for name, value, wanted in (("impl", impl, "auto"), ("chunk_size", chunk_size, None)):
        if not causal and value != wanted:
            raise ValueError(
                f"{name}: got {value!r}, expected {wanted!r} with causal=False, which has "
                f"one way to be computed; fix by leaving {name} out"
            )
    dims = (q.shape[-1], v.shape[-1] + normalize)  # the normalizer is one more value
    form = resolve(impl, q.shape[1], q.device, (q.dtype, v.dtype), dims)
    if chunk_size is not None and impl in ("recurrent", "triton"):
        why = "recurrent has no chunks" if impl == "recurrent" else "triton sizes its own"
        raise ValueError(
            f"chunk_size: got {chunk_size}, expected None ({why}); fix by leaving it out, or with "
            "impl='torch'"
        )
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        raise ValueError(
            f"chunk_size: got {chunk_size}, expected one of {CHUNK_SIZES}; fix by leaving it out"
        )
    if q.shape[1] == 0:
        return whole.no_tokens
    if not causal:
        return whole.whole_sequence
    if form == "recurrent":
        return recurrent.recurrent
    if form == "triton":
        return _triton
    return functools.partial(chunked.chunked, chunk_size=chunk_size)
