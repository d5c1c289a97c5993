"""Device code that every kernel shares: where a program works, and the tiles it reads and writes.

A *sequence* is a row of the batch, or a document of a pack; n counts them. A sequence is cut into
*segments* of L tokens, one program (a head and a block of channels of it) each, and a segment into
*chunks* of C tokens, the rows of a tile. L is a multiple of C. A segment never spans two sequences.

Storage for one state a segment (or a chunk) is indexed by slots, in order of the tokens. Packed
documents need no table for that: document n starts at slot cu[n] // L + n, which leaves room for
all of its segments and grows with n, so that a program finds its document by bisection.

Sizes: B rows, T tokens, H heads, K key dimension, V value dimension, N sequences.
"""

import triton
import triton.language as tl

from gla_kernels.decay import FLOOR


@triton.jit
def first_slot(cu, n, T, L, PACKED: tl.constexpr):
    """Slot of the first segment (of L tokens) of sequence n."""
    if PACKED:
        slot = tl.load(cu + n).to(tl.int32) // L + n
    else:
        slot = n * tl.cdiv(T, L)
    return slot


@triton.jit
def find_sequence(cu, slot, T, N, L, PACKED: tl.constexpr):
    """The sequence that a segment slot belongs to."""
    if PACKED:
        low = slot * 0
        high = low + N - 1
        while low < high:
            middle = (low + high + 1) // 2
            inside = first_slot(cu, middle, T, L, PACKED) <= slot
            low = tl.where(inside, middle, low)
            high = tl.where(inside, high, middle - 1)
    else:
        low = slot // tl.cdiv(T, L)
    return low


@triton.jit
def bounds_of(cu, n, T, PACKED: tl.constexpr):
    """(row, first token, end token) of sequence n within its row."""
    if PACKED:
        row = n * 0
        start = tl.load(cu + n).to(tl.int32)
        end = tl.load(cu + n + 1).to(tl.int32)
    else:
        row = n
        start = n * 0
        end = start + T
    return row, start, end


@triton.jit
def rows_at(pointer, row, token, head, stride_b, stride_t, stride_h):
    """Pointer to one head of one token; offsets in 64 bits."""
    offset = row.to(tl.int64) * stride_b + token.to(tl.int64) * stride_t
    return pointer + offset + head.to(tl.int64) * stride_h


@triton.jit
def load_tile(pointer, stride, left, d, D: tl.constexpr, C: tl.constexpr):
    """Rows of C tokens, [C, len(d)]; zero past ``left`` tokens or D channels."""
    t = tl.arange(0, C)
    mask = (t < left)[:, None] & (d < D)[None, :]
    return tl.load(pointer + t[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_gates(pointer, stride, left, d, D: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr):
    """Tile of floored gates [C, len(d)] fp32, SHIFT tokens further on; 0 past the chunk."""
    t = tl.arange(0, C)
    mask = (t + SHIFT < tl.minimum(left, C))[:, None] & (d < D)[None, :]
    g = tl.load(pointer + (t + SHIFT)[:, None] * stride + d[None, :], mask=mask, other=0.0)
    return tl.maximum(g.to(tl.float32), FLOOR)


@triton.jit
def store_tile(pointer, tile, stride, left, d, D: tl.constexpr, C: tl.constexpr):
    """Write what ``load_tile`` reads, in the dtype of the pointer."""
    t = tl.arange(0, C)
    mask = (t < left)[:, None] & (d < D)[None, :]
    tl.store(
        pointer + t[:, None] * stride + d[None, :], tile.to(pointer.dtype.element_ty), mask=mask
    )


@triton.jit
def state_at(pointer, slot, head, H, K: tl.constexpr, V: tl.constexpr):
    """Pointer to the [K, V] state of a head in [slots, H, K, V]; offsets in 64 bits."""
    return pointer + (slot.to(tl.int64) * H + head) * (K * V)


@triton.jit
def state_offsets(k, v, K: tl.constexpr, V: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Offsets and mask of a block of a [K, V] state, as [len(k), len(v)] or its transpose."""
    if TRANSPOSED:
        offsets = k[None, :] * V + v[:, None]
        mask = (k < K)[None, :] & (v < V)[:, None]
    else:
        offsets = k[:, None] * V + v[None, :]
        mask = (k < K)[:, None] & (v < V)[None, :]
    return offsets, mask


@triton.jit
def load_state(pointer, k, v, K: tl.constexpr, V: tl.constexpr):
    """Block [len(k), len(v)] of the state at ``pointer``; zero outside."""
    offsets, mask = state_offsets(k, v, K, V, False)
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store_state(pointer, S, k, v, K: tl.constexpr, V: tl.constexpr):
    """Write what ``load_state`` reads, in the dtype of the pointer."""
    offsets, mask = state_offsets(k, v, K, V, False)
    tl.store(pointer + offsets, S.to(pointer.dtype.element_ty), mask=mask)
