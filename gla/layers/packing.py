"""Where the documents of a packed row are, and how they become the rows of a few batches.

Sizes: T tokens, N documents, P places in all batches together, cu_seqlens [N+1] the offsets of the
documents, 0 first and T last. Documents may be empty.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

_LENGTH_STEP = 32  # documents whose lengths round up to the same multiple share a batch


def document_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N+1] -> [T] int64, the document that each token belongs to. Reads no value on the host."""
    t = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], t, right=True)


def outside_graph(function: Function) -> Function:
    """A function whose shapes depend on the lengths of documents, as a compiled model calls it.

    As a decorator this would import the compiler, and with it Triton, wherever a model is imported.
    """
    if torch.compiler.is_compiling():
        return cast(Function, torch.compiler.disable(function))
    return function


class Batches(NamedTuple):
    """Documents of similar length as the rows of a batch, padded on the right; a few batches.

    Attributes:
        documents: one [n] int64 tensor a batch, the documents that are its rows.
        lengths: the padded length L of each batch.
        token: [P] int64, the token at each place of the batches laid out one after another; a pad
            repeats the last token of its document.
        place: [T] int64, the place of each token.
        real: [P] bool, False at pads; None if there are no pads.
    """

    documents: list[Tensor]
    lengths: list[int]
    token: Tensor
    place: Tensor
    real: Tensor | None

    def split(self, x: Tensor) -> list[Tensor]:
        """x [T, ...] -> one tensor [n, L, ...] a batch. Pads must have a gradient of zero."""
        sizes = [len(d) * length for d, length in zip(self.documents, self.lengths, strict=True)]
        parts = _Move.apply(x, self.token, self.place, None).split(sizes)
        return [p.unflatten(0, (-1, n)) for p, n in zip(parts, self.lengths, strict=True)]

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of ``split``, which drops the pads."""
        x = torch.cat([part.flatten(0, 1) for part in parts])
        return _Move.apply(x, self.place, self.token, self.real)


def batch_documents(cu_seqlens: Tensor) -> Batches:
    """Sort the non-empty documents into batches.

    A document is padded by less than 32 tokens, and T tokens make at most about sqrt(T / 16)
    batches. The lengths are read on the host.
    """
    offsets = cu_seqlens.tolist()
    by_length: dict[int, list[int]] = {}
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            by_length.setdefault(-(-(end - start) // _LENGTH_STEP), []).append(n)
    edges = torch.tensor(offsets)
    documents, lengths, tokens, real = [], [], [], []
    for members in by_length.values():
        rows = torch.tensor(members)
        start, end = edges[rows].unsqueeze(1), edges[rows + 1].unsqueeze(1)
        longest = int((end - start).max())
        index = start + torch.arange(longest)
        documents.append(rows.to(cu_seqlens.device))
        lengths.append(longest)
        tokens.append(index.minimum(end - 1).flatten())
        real.append((index < end).flatten())
    token = torch.cat([edges.new_zeros(0), *tokens])
    kept = torch.cat([edges.new_zeros(0, dtype=torch.bool), *real])
    place = kept.nonzero().squeeze(1)
    place = place[token[place].argsort()]
    token, place, kept = (x.to(cu_seqlens.device) for x in (token, place, kept))
    return Batches(documents, lengths, token, place, kept if len(place) < len(token) else None)


class _Move(torch.autograd.Function):
    """x[index]; the gradient is read back in the same way, not added up entry by entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, real: Tensor | None) -> Tensor:
        ctx.back, ctx.real = back, real
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].index_select(0, ctx.back)
        if ctx.real is not None:
            grad = grad * ctx.real.view(-1, *[1] * (grad.dim() - 1))
        return grad, None, None, None
