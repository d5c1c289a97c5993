"""Where the documents of a packed row are.

Sizes: T tokens, N documents, cu_seqlens [N+1] their offsets, 0 first and T last. Documents may be
empty.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_LENGTH_STEP = 32  # lengths are rounded up to it, so that few groups pad few tokens


def document_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N+1] -> [T] int64, the document that each token belongs to. Reads no value on the host."""
    t = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], t, right=True)


class DocumentGroup(NamedTuple):
    """Documents of about one length, laid out as the rows of a batch, padded on the right.

    Attributes:
        documents: [n] int64, which they are.
        tokens: [n, L] int64, where each token stands in the pack; pads repeat the last token.
        real: [n, L] bool, False at pads.
    """

    documents: Tensor
    tokens: Tensor
    real: Tensor


def group_documents(cu_seqlens: Tensor) -> list[DocumentGroup]:
    """Sort the non-empty documents into groups of similar length.

    A group wastes fewer than 32 tokens a document, and T tokens make at most about sqrt(T / 16)
    groups. The lengths are read on the host.
    """
    offsets = cu_seqlens.tolist()
    by_length: dict[int, list[int]] = {}
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            by_length.setdefault(-(-(end - start) // _LENGTH_STEP) * _LENGTH_STEP, []).append(n)
    ends = torch.tensor(offsets)
    groups = []
    for length, documents in by_length.items():
        rows = torch.tensor(documents)
        longest = int((ends[rows + 1] - ends[rows]).max())
        index = ends[rows].unsqueeze(1) + torch.arange(min(length, longest))
        end = ends[rows + 1].unsqueeze(1)
        group = DocumentGroup(rows, index.minimum(end - 1), index < end)
        groups.append(DocumentGroup(*(x.to(cu_seqlens.device) for x in group)))
    return groups
