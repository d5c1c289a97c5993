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


def evaluate_masked(
    model: Encoder,
    loader: MaskedLoader,
    *,
    batch_size: int,
    batches: int = 0,
    precision: str = "fp32",
) -> dict[str, float | int]:
    """Measure a model on the first batches of a loader.

    Args:
        model: Left in the mode (train or eval) in which it came.
        loader: Unshuffled, over the split.
        batch_size: Rows at once.
        batches: How many batches; 0: the whole split.
        precision: "fp32" or "bf16" (autocast).

    Returns:
        ``loss`` (nats per token asked for), ``ppl``, ``accuracy``, ``targets`` (tokens asked for)
        and ``tokens`` (read).
    """
    device = next(model.parameters()).device
    last = min(loader.num_samples, batches * batch_size) if batches else loader.num_samples
    loss, right, targets, tokens = 0.0, 0, 0, 0
    with evaluating(model), autocast(device, precision):
        for position in range(0, last, batch_size):
            batch = loader.batch(position, min(batch_size, last - position))
            asked = batch.targets != IGNORE
            wanted = batch.targets[asked].to(device)
            h = model(batch.tokens.to(device), batch.cu_seqlens.to(device))[asked.to(device)]
            logits = model.token_logits(h).float()
            loss += F.cross_entropy(logits, wanted, reduction="sum").item()
            right += int((logits.argmax(-1) == wanted).sum())
            targets += len(wanted)
            tokens += batch.tokens.numel()
    mean = loss / max(targets, 1)
    return {
        "loss": mean,
        "ppl": math.exp(mean) if mean < 700 else math.inf,
        "accuracy": right / max(targets, 1),
        "targets": targets,
        "tokens": tokens,
    }


def evaluate_classes(
    model: Encoder,
    loader: ChunkLoader,
    *,
    batch_size: int,
    batches: int = 0,
    precision: str = "fp32",
) -> dict[str, float | int]:
    """Measure a model on the first batches of a loader; arguments as for ``evaluate_masked``.

    Returns:
        ``loss`` (nats per chunk), ``accuracy``, ``macro_f1``, ``majority`` (the accuracy of always
        naming the most frequent class of this split), ``chunks`` and ``tokens``.
    """
    device = next(model.parameters()).device
    last = min(loader.num_samples, batches * batch_size) if batches else loader.num_samples
    loss, tokens = 0.0, 0
    labels, guesses = [], []
    with evaluating(model), autocast(device, precision):
        for position in range(0, last, batch_size):
            batch = loader.batch(position, min(batch_size, last - position))
            logits = model.class_logits(batch.tokens.to(device), batch.cu_seqlens.to(device))
            wanted = batch.labels.to(device)
            loss += F.cross_entropy(logits.float(), wanted, reduction="sum").item()
            labels.append(batch.labels)
            guesses.append(logits.argmax(-1).cpu())
            tokens += batch.tokens.numel()
    label, guess = torch.cat(labels), torch.cat(guesses)
    return {
        "loss": loss / len(label),
        "accuracy": float((label == guess).double().mean()),
        "macro_f1": macro_f1(label, guess),
        "majority": float(label.bincount().max() / len(label)),
        "chunks": len(label),
        "tokens": tokens,
    }


def macro_f1(labels: Tensor, guesses: Tensor) -> float:
    """The mean of F1 over the classes that occur among labels or guesses, [N] int64 each.

    F1 of a class is 2 tp / (2 tp + fp + fn).
    """
    scores = []
    for c in torch.cat([labels, guesses]).unique():
        label, guess = labels == c, guesses == c
        scores.append(2 * int((label & guess).sum()) / int(label.sum() + guess.sum()))
    return sum(scores) / len(scores)
