"""Triton's CPU interpreter made fit for proof: right bf16, and checks that a GPU does not make.

Import it with TRITON_INTERPRET=1 set, before any kernel runs; ``fix_bf16()`` and ``add_checks()``
then patch the interpreter of this process. Triton keeps bf16 as 16-bit integers there: products,
sums and comparisons would work on bit patterns and casts would truncate, silently.

The checks raise `Violation` for an access outside the tensors that a launch was given, for two
programs of a launch that write one address or read what another wrote; loads show NaN where they
are masked off without a value; programs run in a shuffled order.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import triton.language as tl
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle


class Violation(AssertionError):
    """A kernel did what a GPU would not stop it from doing."""


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) to fp32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bit patterns, rounded to nearest even; NaN stays NaN."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _is_bf16(x: Any) -> bool:
    return x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16


def _wide(x: Any) -> Any:
    return Handle(widen(x.data), tl.float32) if _is_bf16(x) else x


def _bf16(x: np.ndarray) -> Any:
    return Handle(narrow(x), tl.bfloat16)


def fix_bf16() -> None:
    """Make bf16 arithmetic, casts, products and reductions right in this process."""
    cast, to_fp, binary = Builder.cast_impl, Builder.create_fp_to_fp, Builder.binary_op
    unary, dot, language = Builder.unary_op, Builder.create_dot, interpreter._patch_lang_tensor

    def cast_impl(self, source, target):
        scalar = target.scalar
        if _is_bf16(source) and scalar != tl.bfloat16:
            return Handle(widen(source.data).astype(interpreter._get_np_dtype(scalar)), scalar)
        if scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            return _bf16(source.data.astype(np.float32))
        return cast(self, source, target)

    def create_fp_to_fp(self, source, target, rounding):
        scalars = {source.dtype.scalar, target.scalar}
        if scalars == {tl.bfloat16, tl.float32} and rounding == interpreter._ir.ROUNDING_MODE.RTNE:
            return cast_impl(self, source, target)
        return to_fp(self, source, target, rounding)

    def binary_op(self, a, b, op):
        if not (_is_bf16(a) and _is_bf16(b)):
            return binary(self, a, b, op)
        result = op(widen(a.data), widen(b.data))
        return Handle(result, tl.int1) if result.dtype == bool else _bf16(result)

    def unary_op(self, a, op):
        return _bf16(op(widen(a.data))).reshape(a.data.shape) if _is_bf16(a) else unary(self, a, op)

    def create_dot(self, a, b, accumulator, precision, imprecise):
        return dot(self, _wide(a), _wide(b), accumulator, precision, imprecise)

    def patch_language(tensor, scope):
        # Triton 3.6 with numpy 2.4: int() of a one-element array is a TypeError, so range() dies.
        language(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: int(np.asarray(x.handle.data).reshape(-1)[0]))

    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    Builder.binary_op, Builder.unary_op, Builder.create_dot = binary_op, unary_op, create_dot
    interpreter._patch_lang_tensor = patch_language


class _Accesses:
    """What the programs of one launch may touch, and what they touched."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.writers: dict[int, tuple[int, ...]] = {}
        self.readers: dict[int, set[tuple[int, ...]]] = {}

    def launch(self, arguments: list[Any]) -> None:
        self.ranges.clear()
        self.writers.clear()
        self.readers.clear()
        for x in tree_leaves(arguments):
            if hasattr(x, "data_ptr") and x.numel():
                last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
                self.ranges.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()))

    def check(self, pointers: Any, mask: Any, store: bool) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses, active = np.broadcast_arrays(pointers.data, mask.data)
        touched = addresses[active].astype(np.uint64)
        inside = np.zeros(touched.shape, bool)
        for low, high in self.ranges:
            inside |= (touched >= low) & (touched + size <= high)
        me, kind = interpreter.interpreter_builder.grid_idx, "store" if store else "load"
        if not inside.all():
            raise Violation(
                f"out-of-bounds {kind} of {int((~inside).sum())} elements in program {me}"
            )
        for address in touched.tolist():
            self._check_race(address, me, store)

    def _check_race(self, address: int, me: tuple[int, ...], store: bool) -> None:
        if self.writers.get(address, me) != me:
            what = "stores to" if store else "reads"
            raise Violation(f"program {me} {what} what program {self.writers[address]} wrote")
        if not store:
            self.readers.setdefault(address, set()).add(me)
            return
        if self.readers.get(address, {me}) != {me}:
            raise Violation(f"program {me} stores where program {self.readers[address]} read")
        self.writers[address] = me


def add_checks(seed: int = 0) -> None:
    """Check every launch of this process; ``seed`` orders the programs."""
    load, store = Builder.create_masked_load, Builder.create_masked_store
    call, set_dim, set_index = (
        interpreter.GridExecutor.__call__,
        Builder.set_grid_dim,
        Builder.set_grid_idx,
    )
    accesses, order = _Accesses(), {}

    def checked_call(self, *args, **kwargs):
        accesses.launch([*args, *kwargs.values()])
        return call(self, *args, **kwargs)

    def checked_load(self, pointers, mask, other, *rest, **options):
        accesses.check(pointers, mask, store=False)
        dtype = pointers.get_element_ty()
        if other is None and not mask.data.all() and dtype.is_floating():
            fill = np.uint16(0x7FC0) if dtype == tl.bfloat16 else np.nan
            shape = np.broadcast(pointers.data, mask.data).shape
            other = Handle(np.full(shape, fill, dtype=interpreter._get_np_dtype(dtype)), dtype)
        return load(self, pointers, mask, other, *rest, **options)

    def checked_store(self, pointers, value, mask, *rest, **options):
        accesses.check(pointers, mask, store=True)
        return store(self, pointers, value, mask, *rest, **options)

    def set_grid_dim(self, nx, ny, nz):
        set_dim(self, nx, ny, nz)
        programs = [(x, y, z) for x in range(nx) for y in range(ny) for z in range(nz)]
        shuffled = programs[:]
        random.Random(seed).shuffle(shuffled)  # noqa: S311
        order.clear()
        order.update(zip(programs, shuffled, strict=True))

    def set_grid_idx(self, x, y, z):
        set_index(self, *order[x, y, z])

    interpreter.GridExecutor.__call__ = checked_call
    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    Builder.set_grid_dim, Builder.set_grid_idx = set_grid_dim, set_grid_idx
