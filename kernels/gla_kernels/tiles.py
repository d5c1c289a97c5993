"""Device code that every kernel shares: where a program works, and the tiles it reads and writes.

A *sequence* is a row of the batch, or a document of a pack; n counts them. A sequence is cut into
*segments* of L tokens, one program (a head and a block of channels of it) each, and a segment into
*chunks* of C tokens, the rows of a tile. L is a multiple of C. A segment never spans two sequences.

Storage for one state a segment (or a chunk) is indexed by slots, in order of the tokens. Packed
documents need no table for that: document n starts at slot cu[n] // L + n, which leaves room for
all of its segments and grows with n, so that a program finds its document by bisection.

Sizes: B rows, T tokens, H heads, K key dimension, V value dimension, N sequences; GK channels of
the gate: 0 without one (what stands for it is not read), 1 for a gate a head, or K. cu: the offsets
[N + 1] of packed documents, or None. s: the call's ``support.Config``, known when a kernel is
compiled. A tensor of tokens [B, T, heads, D] comes as (pointer, three strides, how many of the H
heads share one of it, D).
"""

import triton
import triton.language as tl

from gla_kernels.decay import FLOOR


@triton.jit
def first_slot(cu, n, T, L):
    """Slot of the first segment (of L tokens) of sequence n."""
    return n * tl.cdiv(T, L) if cu is None else tl.load(cu + n).to(tl.int32) // L + n


@triton.jit
def bounds_of(cu, n, T):
    """(row, first token, end token) of sequence n within its row."""
    start = n * 0 if cu is None else tl.load(cu + n).to(tl.int32)
    end = start + T if cu is None else tl.load(cu + n + 1).to(tl.int32)
    return n if cu is None else n * 0, start, end


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
def rows_at(x, row, token, head):
    """(pointer to one head of one token of x, stride of tokens, D); offsets in 64 bits."""
    pointer, stride_b, stride_t, stride_h, shared, D = x
    pointer += row.to(tl.int64) * stride_b + token.to(tl.int64) * stride_t
    return pointer + (head // shared).to(tl.int64) * stride_h, stride_t, D


@triton.jit
def tile_cells(rows, at, d, s):
    """Pointers [C, len(d)] to the tokens of a chunk, and which there are.

    at: (tokens of the rows before the chunk, tokens from its first on).
    """
    pointer, stride, D = rows
    token, left = at
    t = tl.arange(0, s.C)
    pointer += tl.cast(token, tl.int64) * stride
    return pointer + t[:, None] * stride + d[None, :], (t < left)[:, None] & (d < D)[None, :]


@triton.jit
def load_tile(rows, at, d, s):
    """A chunk of the rows, [C, len(d)]; zero past the last token or channel."""
    cells, mask = tile_cells(rows, at, d, s)
    return tl.load(cells, mask=mask, other=0.0)


@triton.jit
def load_gates(rows, at, d, SHIFT, s):
    """Floored gates of the key channels d, SHIFT tokens further on; 0 past the chunk.

    [C, len(d)] fp32; a gate a head: [C, 1].
    """
    pointer, stride, D = rows
    d = d if s.GK == s.K else tl.arange(0, 1)
    at = at[0], tl.minimum(at[1], s.C) - SHIFT
    g = load_tile((pointer + SHIFT * stride, stride, D), at, d, s)
    return tl.maximum(g.to(tl.float32), FLOOR)


@triton.jit
def store_tile(rows, tile, at, d, s):
    """Write what ``load_tile`` reads, in the dtype of the pointer."""
    cells, mask = tile_cells(rows, at, d, s)
    tl.store(cells, tile.to(cells.dtype.element_ty), mask=mask)


@triton.jit
def state_cells(pointer, slot, head, H, k, v, s):
    """Pointers to a block of a state in [slots, H, K, V], and their mask; offsets in 64 bits.

    Channels k [n, 1] and v [1, m]; or k [1, n] and v [m, 1], for the block's transpose.
    """
    pointer += (slot.to(tl.int64) * H + head) * (s.K * s.V)
    return pointer + (k * s.V + v), (k < s.K) & (v < s.V)


@triton.jit
def load_state(pointer, slot, head, H, k, v, s):
    """A block of a state; zero outside, and everywhere where there is none (None)."""
    if pointer is None:
        return tl.zeros((k + v).shape, tl.float32)
    else:
        cells, mask = state_cells(pointer, slot, head, H, k, v, s)
        return tl.load(cells, mask=mask, other=0.0)


@triton.jit
def store_state(pointer, S, slot, head, H, k, v, s):
    """Write what ``load_state`` reads, in the dtype of the pointer."""
    cells, mask = state_cells(pointer, slot, head, H, k, v, s)
    tl.store(cells, S.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def rounded(x, s):
    """x in the dtype of products: fp32 for calls in fp32, else bf16."""
    return x.to(tl.float32 if s.wide else tl.bfloat16)


@triton.jit
def load_values(rows, at, d, s):
    """Rows of values [C, len(d)], in the dtype of products."""
    return rounded(load_tile(rows, at, d, s), s)


@triton.jit
def product(a, b, c, s):
    """a b + c, of factors in the dtype of products; c fp32 or None."""
    return tl.dot(rounded(a, s), rounded(b, s), c, input_precision=s.precision)
