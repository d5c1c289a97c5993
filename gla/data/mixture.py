"""Several sources mixed by weight into one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def mix(
    streams: Sequence[Iterator[Item]], weights: Sequence[float], size: Callable[[Item], int]
) -> Iterator[Item]:
    """Take items from streams in turn, so that each has its share of the size at any moment.

    The next item comes from the stream that is furthest behind its share, so the shares are right
    to within one item. It ends where a stream whose turn it is has ended: the mixture holds its
    shares to the end, nothing is repeated, and what the other streams still have is left out.

    Args:
        streams: One for each source.
        weights: Positive; only their ratios count.
        size: What an item counts.
    """
    taken = [0] * len(streams)
    while True:
        behind = min(range(len(streams)), key=lambda i: (taken[i] / weights[i], i))
        for item in streams[behind]:
            taken[behind] += size(item)
            yield item
            break
        else:
            return
