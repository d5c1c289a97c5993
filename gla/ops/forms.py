"""Which form computes a call: the rule of ``impl="auto"``, and the refusals of a named one."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from gla.ops import chunked, recurrent, whole

IMPLS = ("auto", "recurrent", "torch", "triton")
CHUNK_SIZES = (16, 32, 64, 128, 256)

# (q, k, v, log_decay, S_0, cu_seqlens, scale) -> (o, S_T)
Form = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, float],
    tuple[Tensor, Tensor],
]


def resolve(impl: str, tokens: int) -> str:
    """The form that ``impl`` stands for.

    "auto" is "recurrent" for one token (decoding) and "torch" for more.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl: got {impl!r}, expected one of {', '.join(IMPLS)}; fix impl")
    if impl == "triton":
        raise ValueError("impl: got 'triton', expected a form that is here; fix impl='torch'")
    if impl != "auto":
        return impl
    return "recurrent" if tokens == 1 else "torch"


def choose(impl: str, q: Tensor, v: Tensor, chunk_size: int | None, causal: bool) -> Form:
    """Return the function that computes this call, or raise ValueError naming the option."""
    form = resolve(impl, q.shape[1])
    if chunk_size is not None and (form == "recurrent" and impl != "auto"):
        raise ValueError(f"chunk_size: got {chunk_size}, expected None; fix impl (recurrent has no chunks)")
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: got {chunk_size}, expected one of {CHUNK_SIZES}; fix chunk_size")
    if q.shape[1] == 0:
        return whole.no_tokens
    if not causal:
        return whole.whole_sequence
    if form == "recurrent":
        return recurrent.recurrent
    return functools.partial(chunked.chunked, chunk_size=chunk_size)
