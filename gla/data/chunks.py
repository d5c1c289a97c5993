"""Documents with a class, cut into chunks: the samples of a classification task.

The class of a document is the first folder of its name in the corpus: ``sports`` for
``sports/cup.txt``, ``json`` for ``stdlib/json/decoder.py``. A document without a folder has none.
A split by document is one by file, so no file has chunks in training and in validation.

A position counts samples since the start, as in ``gla.data.loader``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gla.data.loader import permuted
from gla.data.shards import TokenDataset
from gla.errors import DataError


class ClassBatch(NamedTuple):
    """Chunks packed into one row.

    Attributes:
        tokens: int64 [1, T].
        labels: int64 [N], the index of each chunk's class.
        cu_seqlens: int32 [N + 1], where each chunk begins and ends.
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor


def class_of(name: str) -> str | None:
    """Return the class of the document of this name, None if it has no folder."""
    folder, _, rest = name.removeprefix("stdlib/").partition("/")
    return folder if rest else None


def find_classes(
    dataset: TokenDataset, min_documents: int, exclude: Sequence[str] = ()
) -> list[str]:
    """Return the classes that have documents enough, sorted.

    Args:
        dataset: The training split.
        min_documents: Least number of documents of a class.
        exclude: Classes to leave out.

    Raises:
        DataError: Fewer than two are left, or the data have no names.
    """
    counts = Counter(map(class_of, dataset.document_names))
    found = sorted(
        name
        for name, count in counts.items()
        if name is not None and count >= min_documents and name not in exclude
    )
    if len(found) < 2:
        raise DataError(
            f"{dataset.path}: got {len(found)} folders of {min_documents} documents or more, "
            "expected two or more, one a class; fix the sources or objective.min_documents"
        )
    return found


class ChunkLoader:
    """Reads batches of chunks.

    Attributes:
        dataset: Where the tokens are.
        num_samples: Chunks of an epoch.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        classes: Sequence[str],
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Plan the chunks: a document is cut into the fewest parts of at most ``seq_len`` tokens.

        The parts of a document are equal to within a token, so no chunk is a short remainder.

        Args:
            dataset: Where the tokens are.
            classes: Their names, in the order of the labels; other documents are left out.
            seq_len: Most tokens of a chunk.
            seed: Decides the order of each epoch.
            shuffle: False: every epoch goes through the data set from front to back.

        Raises:
            DataError: No document has one of the classes.
        """
        self.dataset = dataset
        self._seed, self._shuffle = seed, shuffle
        index = {name: i for i, name in enumerate(classes)}
        starts, stops, labels = [], [], []
        edges = dataset.document_starts
        for n, name in enumerate(dataset.document_names):
            label = index.get(class_of(name) or "")
            if label is None:
                continue
            begin, tokens = int(edges[n]), int(edges[n + 1] - edges[n])
            parts = -(-tokens // seq_len)
            cuts = begin + np.arange(parts + 1) * tokens // parts
            starts.append(cuts[:-1])
            stops.append(cuts[1:])
            labels.append(np.full(parts, label))
        if not labels:
            raise DataError(
                f"{dataset.path}: got no document of {', '.join(classes)}, expected some; fix "
                "model.classes or the data"
            )
        self._starts, self._stops = np.concatenate(starts), np.concatenate(stops)
        self._labels = np.concatenate(labels)
        self.num_samples = len(self._labels)

    def require(self, batch_size: int) -> None:
        """Make sure that an epoch fills a batch.

        Raises:
            DataError: It does not.
        """
        if self.num_samples < batch_size:
            raise DataError(
                f"{self.dataset.path}: got {self.num_samples} chunks, expected {batch_size} or "
                "more for one batch; fix by adding text or lowering the batch size or seq_len"
            )

    def batch(self, position: int, size: int) -> ClassBatch:
        """Return the ``size`` chunks from ``position`` on; they may reach into the next epoch.

        Raises:
            DataError: A stored id is not below the vocabulary's size.
        """
        rows = []
        for place in range(position, position + size):
            epoch, index = divmod(place, self.num_samples)
            if self._shuffle:
                index = permuted(index, self.num_samples, self._seed, epoch)
            rows.append(index)
        tokens = [self.dataset.ids(int(self._starts[i]), int(self._stops[i])) for i in rows]
        return ClassBatch(
            torch.from_numpy(np.concatenate(tokens)[None]),
            torch.from_numpy(self._labels[rows].astype(np.int64)),
            torch.from_numpy(np.cumsum([0, *map(len, tokens)], dtype=np.int32)),
        )
