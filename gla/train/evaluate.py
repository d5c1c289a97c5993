"""Loss, perplexity and bits per byte of a model on a split."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gla.data.loader import Loader, TokenDataset
from gla.models.language_model import LanguageModel
from gla.train.device import autocast, evaluating
from gla.train.distributed import Ranks


def evaluate(
    model: LanguageModel,
    dataset: TokenDataset,
    piece_bytes: np.ndarray,
    *,
    seq_len: int,
    batch_size: int,
    batches: int = 0,
    precision: str = "fp32",
    ranks: Ranks | None = None,
) -> dict[str, float | int]:
    """Measure a model on the first batches of a split, in its stored order.

    Every token but a document's first is predicted once, from what stands before it in its row and
    document; so longer rows give more context and a lower loss.

    Args:
        model: Left in the mode (train or eval) in which it came.
        dataset: The split.
        piece_bytes: int [vocab], the bytes of text that each token stands for (control tokens: 0).
        seq_len: Tokens of a row.
        batch_size: Rows at once.
        batches: How many batches; 0: the whole split.
        precision: "fp32", or "bf16" or "fp16" (autocast).
        ranks: Processes that share the work; each gets all figures.

    Returns:
        ``loss`` (nats per token), ``ppl``, ``bpb`` (bits per byte of raw text), ``tokens``
        (predicted ones) and ``bytes`` (that they stand for).
    """
    loader = Loader(dataset, seq_len=seq_len, seed=0, shuffle=False)
    device = next(model.parameters()).device
    ranks = ranks or Ranks()
    last = min(loader.num_samples, batches * batch_size) if batches else loader.num_samples
    loss, tokens, size = 0.0, 0, 0
    with evaluating(model), autocast(device, precision):
        for position in range(ranks.rank * batch_size, last, ranks.size * batch_size):
            batch = loader.batch(position, min(batch_size, last - position))
            total = model.loss(
                batch.tokens.to(device),
                batch.targets.to(device),
                cu_seqlens=batch.cu_seqlens.to(device),
                reduction="sum",
            )
            loss += total.item()
            counted = count_targets(batch.targets, piece_bytes)
            tokens, size = tokens + counted[0], size + counted[1]
    loss, tokens, size = ranks.sum([loss, tokens, size])
    return summary(loss, int(tokens), int(size))


def summary(loss: float, tokens: int, size: int) -> dict[str, float | int]:
    """Turn a sum of nats over ``tokens`` tokens and ``size`` bytes into the figures reported."""
    mean = loss / max(tokens, 1)
    return {
        "loss": mean,
        "ppl": math.exp(mean) if mean < 700 else math.inf,
        "bpb": loss / math.log(2) / max(size, 1),
        "tokens": tokens,
        "bytes": size,
    }


def count_targets(targets: Tensor, piece_bytes: np.ndarray) -> tuple[int, int]:
    """Return how many targets count (are not negative), and the bytes of text they stand for."""
    counted = targets[targets >= 0].cpu().numpy()
    return len(counted), int(piece_bytes[counted].sum(dtype=np.int64))
