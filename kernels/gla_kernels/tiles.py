"""Device code that every kernel shares: where a program works, and the tiles it reads and writes.

A *sequence* is a row of the batch, or a document of a pack; n counts them. A sequence is cut into
*segments* of L tokens, one program (a head and a block of channels of it) each, and a segment into
*chunks* of C tokens, the rows of a tile. L is a multiple of C. A segment never spans two sequences.

Storage for one state a segment (or a chunk) is indexed by slots, in order of the tokens. Packed
documents need no table for that: document n starts at slot cu[n] // L + n, which leaves room for
all of its segments and grows with n, so that a program finds its document by bisection.

Sizes: B rows, T tokens, H heads, K key dimension, V value dimension, N sequences. cu: the offsets
[N + 1] of packed documents, or None.
"""

import triton
import triton.language as tl

from gla_kernels.decay import CHANNEL_GATE, FLOOR


@triton.jit
def first_slot(cu, n, T, L):
    """Slot of the first segment (of L tokens) of sequence n."""
    if cu is not None:
        slot = tl.load(cu + n).to(tl.int32) // L + n
    else:
        slot = n * tl.cdiv(T, L)
    return slot


@triton.jit
def bounds_of(cu, n, T):
    """(row, first token, end token) of sequence n within its row."""
    if cu is not None:
        row = n * 0
        start = tl.load(cu + n).to(tl.int32)
        end = tl.load(cu + n + 1).to(tl.int32)
    else:
        row = n
        start = n * 0
        end = start + T
    return row, start, end


@triton.jit
def find_segment(cu, slot, T, N, L):
    """What lies in a slot: (sequence, its row, number of the segment, its first token, end token
    of the sequence). Slots that no segment has give a first token that is not before the end."""
    if cu is not None:
        n = slot * 0
        high = n + N - 1
        while n < high:
            middle = (n + high + 1) // 2
            inside = first_slot(cu, middle, T, L) <= slot
            n = tl.where(inside, middle, n)
            high = tl.where(inside, high, middle - 1)
    else:
        n = slot // tl.cdiv(T, L)
    row, start, end = bounds_of(cu, n, T)
    j = slot - first_slot(cu, n, T, L)
    return n, row, j, start + j * L, end


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
def load_gates(
    pointer, stride, left, d, K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Floored gates of the key channels d, SHIFT tokens further on; 0 past the chunk.

    [C, len(d)] fp32; a gate a head: [C, 1].
    """
    t = tl.arange(0, C)
    D: tl.constexpr = K if GATE == CHANNEL_GATE else 1
    d_g = d if GATE == CHANNEL_GATE else tl.arange(0, 1)
    mask = (t + SHIFT < tl.minimum(left, C))[:, None] & (d_g < D)[None, :]
    g = tl.load(pointer + (t + SHIFT)[:, None] * stride + d_g[None, :], mask=mask, other=0.0)
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
def state_cells(pointer, slot, head, H, k, v, K: tl.constexpr, V: tl.constexpr):
    """Pointers to a block of a state in [slots, H, K, V], and their mask; offsets in 64 bits.

    Channels k [n, 1] and v [1, m]; or k [1, n] and v [m, 1], for the block's transpose.
    """
    pointer += (slot.to(tl.int64) * H + head) * (K * V)
    return pointer + (k * V + v), (k < K) & (v < V)


@triton.jit
def load_state(pointer, slot, head, H, k, v, K: tl.constexpr, V: tl.constexpr):
    """A block of a state; zero outside, and everywhere where there is none (None)."""
    if pointer is not None:
        cells, mask = state_cells(pointer, slot, head, H, k, v, K, V)
        S = tl.load(cells, mask=mask, other=0.0)
    else:
        S = tl.zeros((k + v).shape, tl.float32)
    return S


@triton.jit
def store_state(pointer, S, slot, head, H, k, v, K: tl.constexpr, V: tl.constexpr):
    """Write what ``load_state`` reads, in the dtype of the pointer."""
    cells, mask = state_cells(pointer, slot, head, H, k, v, K, V)
    tl.store(cells, S.to(pointer.dtype.element_ty), mask=mask)
