"""How well an encoder fills in masked tokens, and how well it tells classes apart."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gla.data.chunks import ChunkLoader
from gla.data.loader import IGNORE
from gla.data.masking import MaskedLoader
from gla.models.encoder import Encoder
from gla.train.device import autocast, evaluating
from gla.train.distributed import Ranks


def evaluate_masked(
    model: Encoder,
    loader: MaskedLoader,
    *,
    batch_size: int,
    batches: int = 0,
    precision: str = "fp32",
    ranks: Ranks | None = None,
) -> dict[str, float | int]:
    """Measure a model on the first batches of a loader.

    Args:
        model: Left in the mode (train or eval) in which it came.
        loader: Over the split.
        batch_size: Rows at once.
        batches: How many batches; 0: the whole split.
        precision: "fp32", or "bf16" or "fp16" (autocast).
        ranks: Processes that share the work; each gets all figures.

    Returns:
        ``loss`` (nats per token asked for), ``ppl``, ``accuracy``, ``targets`` (tokens asked for)
        and ``tokens`` (read).
    """
    device = next(model.parameters()).device
    ranks = ranks or Ranks()
    last = min(loader.num_samples, batches * batch_size) if batches else loader.num_samples
    loss, right, targets, tokens = 0.0, 0, 0, 0
    with evaluating(model), autocast(device, precision):
        for position in range(ranks.rank * batch_size, last, ranks.size * batch_size):
            batch = loader.batch(position, min(batch_size, last - position))
            asked = batch.targets != IGNORE
            wanted = batch.targets[asked].to(device)
            h = model(batch.tokens.to(device), batch.cu_seqlens.to(device))[asked.to(device)]
            logits = model.logits(h).float()
            loss += F.cross_entropy(logits, wanted, reduction="sum").item()
            right += int((logits.argmax(-1) == wanted).sum())
            targets += len(wanted)
            tokens += batch.tokens.numel()
    loss, right, targets, tokens = ranks.sum([loss, right, targets, tokens])
    mean = loss / max(targets, 1)
    return {
        "loss": mean,
        "ppl": math.exp(mean) if mean < 700 else math.inf,
        "accuracy": right / max(targets, 1),
        "targets": int(targets),
        "tokens": int(tokens),
    }


def evaluate_classes(
    model: Encoder,
    loader: ChunkLoader,
    *,
    batch_size: int,
    batches: int = 0,
    precision: str = "fp32",
    ranks: Ranks | None = None,
) -> dict[str, float | int]:
    """Measure a model on the first batches of a loader; arguments as for ``evaluate_masked``.

    Returns:
        ``loss`` (nats per chunk), ``accuracy``, ``macro_f1``, ``majority`` (the accuracy of always
        naming the most frequent class of this split), ``chunks`` and ``tokens``.
    """
    device = next(model.parameters()).device
    ranks = ranks or Ranks()
    last = min(loader.num_samples, batches * batch_size) if batches else loader.num_samples
    loss, tokens = 0.0, 0
    classes = len(model.config.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.int64)  # label, guess
    with evaluating(model), autocast(device, precision):
        for position in range(ranks.rank * batch_size, last, ranks.size * batch_size):
            batch = loader.batch(position, min(batch_size, last - position))
            logits = model.class_logits(batch.tokens.to(device), batch.cu_seqlens.to(device))
            wanted = batch.labels.to(device)
            loss += F.cross_entropy(logits.float(), wanted, reduction="sum").item()
            pairs = batch.labels * classes + logits.argmax(-1).cpu()
            confusion += pairs.bincount(minlength=classes**2).view(classes, classes)
            tokens += batch.tokens.numel()
    loss, tokens, *flat = ranks.sum([loss, tokens, *confusion.flatten().tolist()])
    confusion = torch.tensor(flat).long().view(classes, classes)
    chunks = max(int(confusion.sum()), 1)
    return {
        "loss": loss / chunks,
        "accuracy": int(confusion.trace()) / chunks,
        "macro_f1": macro_f1(confusion),
        "majority": int(confusion.sum(1).max()) / chunks,
        "chunks": chunks,
        "tokens": int(tokens),
    }


def macro_f1(confusion: Tensor) -> float:
    """The mean of F1 = 2 tp / (2 tp + fp + fn) over the classes that occur.

    Args:
        confusion: int64 [C, C], how often each label (row) was taken for each class (column).
    """
    total = confusion.sum(0) + confusion.sum(1)
    occurs = total > 0
    scores = 2 * confusion.diagonal()[occurs].double() / total[occurs]
    return float(scores.mean())
