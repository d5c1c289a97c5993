"""Where the chunks of a call lie: rows, packed documents, tails, and segments that stay in cache.

Sizes: B rows, T tokens, H heads, C tokens of a chunk, N sequences.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gla.ops.memory import Buffers, is_one, multiply

# Elements of one [tiles, C, dim] buffer of a segment: 1 MB in fp32. A call holds ten to forty.
_SEGMENT_ELEMENTS = 256 * 1024


def chunk_size_for(tokens: int, sequences: int) -> int:
    """64, or less (a power of two from 16) where sequences are shorter than that on average."""
    mean = -(-tokens // max(sequences, 1))
    return min(64, max(16, 1 << (mean - 1).bit_length()))


@dataclass(frozen=True)
class Segment:
    """Chunks first..first + count of rows row..row + rows; index into the saved boundary states."""

    row: int
    rows: int
    first: int
    count: int
    index: int


def _segment_elements(q: Tensor, log_decay: Tensor | None) -> int:
    """Twice as many where products read bf16 in both directions: no gate that channels share."""
    bf16 = q.dtype == torch.bfloat16 and (log_decay is None or log_decay.dim() == 4)
    return _SEGMENT_ELEMENTS * (2 if bf16 else 1)


def segment_tokens(q: Tensor, value_dim: int, log_decay: Tensor | None, chunk_size: int) -> int:
    """Tokens of a segment of one row: a multiple of every chunk size up to the given one (0: 64).

    It does not depend on T, so a compiled graph serves every length. Chunks are even in number, for
    the scan in halves.
    """
    B, _, H, K = q.shape
    C = chunk_size or 64
    tiles = max(1, _segment_elements(q, log_decay) // (C * max(K, value_dim)))
    rows = max(1, min(B, tiles // (4 * H)))
    count = max(1, tiles // (rows * H))
    return C * (count if count < 3 else count // 2 * 2)


def boundaries(
    q: Tensor,
    value_dim: int,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> int:
    """States to save a row: one before each segment, at most."""
    T = q.shape[1]
    size = segment_tokens(q, value_dim, log_decay, chunk_size)
    most = T if cu_seqlens is None else T + (cu_seqlens.shape[0] - 1) * (chunk_size or 64)
    return (most + size - 1) // size


class Layout:
    """Chunks of every row, each of one sequence only, and the segments in which they are worked on.

    Args:
        q: [B, T, H, K].
        value_dim: V.
        log_decay: the gate, or None.
        cu_seqlens: [N+1] or None.
        chunk_size: C, or 0 to choose it from T and N.

    Attributes:
        C: tokens of a chunk.
        chunks: chunks a row.
        segments: in forward order; the chunks of a row follow one another.
        starts, ends: {chunk: index of the sequence that starts / ends with it}; without cu_seqlens
            each row is one sequence, and the index is None.
    """

    def __init__(
        self,
        q: Tensor,
        value_dim: int,
        log_decay: Tensor | None,
        cu_seqlens: Tensor | None,
        chunk_size: int,
    ) -> None:
        B, T, H, K = q.shape
        sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.C = C = chunk_size or chunk_size_for(T, sequences)
        self.T, self.H = T, H
        self._index: Tensor | None = None
        self._pads: Tensor | None = None
        self._stage = Buffers(q.dtype, q.dtype, q.device)
        self.starts: dict[int, int | None] = {}
        self.ends: dict[int, int | None] = {}
        if cu_seqlens is None:
            self.chunks = -(-T // C)
            self.starts, self.ends = {0: None}, {self.chunks - 1: None}
        else:
            self._place_documents(cu_seqlens)
        count = min(segment_tokens(q, value_dim, log_decay, chunk_size) // C, max(1, self.chunks))
        tile = C * max(K, value_dim)
        rows = max(1, min(B, _segment_elements(q, log_decay) // (tile * H * count)))
        self.segments = [
            Segment(r, min(rows, B - r), c, min(count, self.chunks - c), c // count)
            for r in range(0, B, rows)
            for c in range(0, self.chunks, count)
        ]

    def _place_documents(self, cu_seqlens: Tensor) -> None:
        """Give each document whole chunks; remember which token each place of a chunk holds."""
        ends, C = cu_seqlens.tolist(), self.C
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        self.chunks = 0
        for n, size in enumerate(sizes):
            if size:
                self.starts[self.chunks] = n
                self.chunks += -(-size // C)
                self.ends[self.chunks - 1] = n
        if all(size % C == 0 for size in sizes):
            return
        places = torch.full((self.chunks * C,), -1)
        for chunk, n in self.starts.items():
            if n is not None:
                places[chunk * C : chunk * C + sizes[n]] = torch.arange(ends[n], ends[n + 1])
        self._pads = (places < 0).to(cu_seqlens.device)
        self._index = places.clamp_(min=0).to(cu_seqlens.device)

    def rows_of(self, sequence: int | None, segment: Segment) -> slice:
        """Rows of an [N, H, K, V] state that a sequence of the segment uses."""
        if sequence is None:
            return slice(segment.row, segment.row + segment.rows)
        return slice(sequence, sequence + 1)

    def load(self, x: Tensor, s: Segment, out: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        """Write the segment of x [B, T, G, D], times factor, to out [rows * count * H, C, D].

        Args:
            x: [B, T, G, D]; pads of the segment become 0.
            s: the segment.
            out: [M, C, D] with M = rows * count * H.
            factor: a number, or by tokens [rows, count * C, H, D or 1].

        Returns:
            out.
        """
        G = x.shape[2]
        if isinstance(factor, Tensor):
            # Before tiles are cut: memory is read in its order, and converted on the way.
            stage = self._stage("scaled", *factor.shape[:3], x.shape[3], dtype=factor.dtype)
            by_group = (2, (G, self.H // G))
            scaled, factor = stage.unflatten(*by_group), factor.unflatten(*by_group)
            multiply(self.tokens(x, s).unsqueeze(3), factor, scaled)
            out.view(s.rows, s.count, self.H, self.C, -1).copy_(self._cut(stage, s))
            return out
        tiles = self._cut(self.tokens(x, s, staged=x.itemsize < 4), s)
        multiply(tiles.unsqueeze(3), factor, self._grouped(out, s, G))
        return out

    def _cut(self, tokens: Tensor, s: Segment) -> Tensor:
        """[rows, count * C, G, D] -> view [rows, count, G, C, D]."""
        return tokens.view(s.rows, s.count, self.C, *tokens.shape[2:]).transpose(2, 3)

    def tokens(self, x: Tensor, s: Segment, staged: bool = False) -> Tensor:
        """The segment of x [B, T, G, D] as [rows, count * C, G, D], pads 0; a view or a copy.

        A copy on the CPU if ``staged``: rows of 2-byte numbers are so short that reading them out
        of order, from memory, takes longer than reading them in order first.
        """
        first, stop = s.first * self.C, (s.first + s.count) * self.C
        shape = (s.rows, stop - first, *x.shape[2:])
        if self._index is not None and self._pads is not None:
            part = self._stage(str(x.dtype), *shape, dtype=x.dtype)
            torch.index_select(x, 1, self._index[first:stop], out=part)
            return part.masked_fill_(self._pads[first:stop].view(1, -1, 1, 1), 0)
        part = x[s.row : s.row + s.rows, first : min(stop, self.T)]
        if stop <= self.T and not (staged and x.device.type == "cpu"):
            return part
        tokens = self._stage(str(x.dtype), *shape, dtype=x.dtype)
        tokens[:, : part.shape[1]].copy_(part)
        tokens[:, part.shape[1] :].zero_()
        return tokens

    def store(self, tiles: Tensor, s: Segment, out: Tensor, factor: Tensor | float = 1.0) -> None:
        """Write tiles [rows * count * H, C, D], times factor, to the tokens of out [B, T, G, D].

        With G < H the heads of a group are summed. ``factor`` is that of ``load``, or [M, C, D or
        1]; the tiles may be overwritten.
        """
        C, first, stop = self.C, s.first * self.C, (s.first + s.count) * self.C
        G, D = out.shape[2:]
        by_tokens = factor if isinstance(factor, Tensor) and factor.dim() == 4 else None
        if by_tokens is not None and tiles.dtype != out.dtype:
            # In the order of memory first, so that it is scaled and rounded in long rows.
            flat = self._stage("scaled", *by_tokens.shape[:3], D, dtype=tiles.dtype)
            cut = self._cut(flat, s)
            cut.copy_(tiles.view(cut.shape))
            flat.mul_(by_tokens)
            self._write(flat if G == self.H else flat.unflatten(2, (G, -1)).sum(3), s, out)
            return
        tiles = self._grouped(tiles, s, G)
        if by_tokens is not None:
            factor = self._cut(by_tokens, s).unflatten(2, tiles.shape[2:4])
        else:
            factor = self._grouped(factor, s, G)
        if G != self.H:
            tiles, factor = (tiles * factor).sum(3, keepdim=True), 1.0
        elif tiles.dtype != out.dtype and not is_one(factor):
            tiles, factor = tiles.mul_(factor), 1.0  # in cache, and rounded as it is written
        order = (0, 1, 4, 2, 3, 5)  # to [rows, count, C, G, 1, D]
        tiles = tiles.permute(order)
        factor = factor.permute(order) if isinstance(factor, Tensor) else factor
        if self._index is None and stop <= self.T:
            into = out[s.row : s.row + s.rows, first:stop]
            multiply(tiles, factor, into.view(s.rows, s.count, C, G, 1, D))
        else:
            self._write((tiles * factor).reshape(s.rows, s.count * C, G, D), s, out)

    def _write(self, flat: Tensor, s: Segment, out: Tensor) -> None:
        """Write [rows, count * C, G, D], without pads, to the segment's tokens of out [B, T, G, D].

        Rounded to out's dtype.
        """
        first, stop = s.first * self.C, (s.first + s.count) * self.C
        if self._index is None or self._pads is None:
            stop = min(stop, self.T)
            out[s.row : s.row + s.rows, first:stop].copy_(flat[:, : stop - first])
            return
        real = ~self._pads[first:stop]
        out.index_copy_(1, self._index[first:stop][real], flat[:, real].to(out.dtype))

    def _grouped(self, x: Any, s: Segment, G: int) -> Any:
        """[rows * count * H, C, D] -> view [rows, count, G, H / G, C, D]; a number stays one."""
        if isinstance(x, (float, int)):
            return x
        return x.view(s.rows, s.count, G, self.H // G, *x.shape[-2:])
