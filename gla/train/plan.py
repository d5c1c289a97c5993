"""What a recipe would do, without doing it: sizes, memory and data sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla import state as states
from gla.data.loader import Loader, TokenDataset
from gla.data.prepare import made_from
from gla.models.encoder import Encoder
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig
from gla.train.device import autocast, resolve_device, resolve_precision
from gla.train.encoder_objective import encoder_config, loader_of, with_classes
from gla.train.inputs import is_prepared, tokenizer_of, with_vocab_size
from gla.train.model import build_encoder, build_language_model
from gla.train.optim import build_optimizer, moment_bytes

_PROBE_TOKENS = (128, 256)


def plan(config: RunConfig, device: str = "auto") -> dict[str, Any]:
    """Say what training would take. Nothing is written, downloaded or trained.

    Returns:
        ``parameters``, ``tokens_per_step``, ``tokens`` (of the whole run), ``epochs`` (how often
        these read the training split; None where it is not prepared), ``precision``,
        ``weights_bytes`` (with gradients and moments), ``activation_bytes`` (what a micro-batch
        keeps for its backward pass, measured on two short rows and extended),
        ``checkpoint_bytes``, ``decode_state_bytes`` (of one sequence), ``data`` (path, whether it
        is prepared, its sources: those it was prepared from where the recipe names none) and
        ``layers``.
    """
    place = resolve_device(device)
    precision = resolve_precision(config.train.precision, place)
    prepared = is_prepared(config.data)
    size = tokenizer_of(config.data).vocab_size if prepared else config.data.new_vocab_size
    config = with_vocab_size(config, size)
    model, train = _build(config), config.train
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = moment_bytes(build_optimizer(model, config.optim))
    # Some of it does not grow with the tokens: the head's gradient, made in the forward pass.
    probes = [(1, length) for length in _PROBE_TOKENS]
    if isinstance(model, Encoder):  # which may have a longest row
        probes = [(rows, train.seq_len) for rows in (1, 2)]
    (a, short), (b, long) = (
        (rows * length, _saved_bytes(model, rows, length, precision)) for rows, length in probes
    )
    activations = long + (long - short) / (b - a) * (train.rows * train.seq_len - b)
    return {
        "parameters": model.num_parameters(),
        "layers": list(config.model.layers),
        "device": str(place),
        "precision": precision,
        "tokens_per_step": train.global_batch_size * train.seq_len,
        "tokens": train.steps * train.global_batch_size * train.seq_len,
        "epochs": _epochs(config) if prepared else None,
        "weights_bytes": 2 * weights + moments,
        "activation_bytes": max(0, round(activations)),
        "checkpoint_bytes": weights + moments,
        "decode_state_bytes": 0
        if isinstance(model, Encoder)
        else states.nbytes(model.init_state(1)),
        "data": {
            "path": config.data.path,
            "prepared": prepared,
            "sources": list(config.data.sources or _made_from(config.data.path)),
            "vocab_size": size,
        },
    }


def describe(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures of ``plan`` as lines for a reader."""
    data = figures["data"]
    state = "prepared" if data["prepared"] else "not prepared yet"
    gib = {k: f"{figures[k] / 2**30:.2f} GiB" for k in ("weights_bytes", "activation_bytes")}
    epochs = None if figures["epochs"] is None else f"{figures['epochs']:.2f}"
    unnamed = "not recorded in the prepared data" if data["prepared"] else "none named"
    return [
        f"parameters        {figures['parameters']:,}",
        f"layers            {', '.join(figures['layers'])}",
        f"device            {figures['device']}, {figures['precision']}",
        f"tokens per step   {figures['tokens_per_step']:,}",
        f"tokens in all     {figures['tokens']:,}",
        f"epochs            {'known once the data are prepared' if epochs is None else epochs}",
        f"memory            {gib['weights_bytes']} for weights, gradients and moments, "
        f"about {gib['activation_bytes']} for a micro-batch",
        f"checkpoint        {figures['checkpoint_bytes'] / 2**20:.1f} MiB",
        f"decode state      {figures['decode_state_bytes']:,} bytes",
        f"data              {data['path']} ({state}), vocabulary {data['vocab_size']:,}",
        f"data sources      {', '.join(data['sources']) or unnamed}",
    ]


def _epochs(config: RunConfig) -> float:
    """How often the steps of a recipe go through its training split, as its loader reads it."""
    train, dataset = config.train, TokenDataset.open(Path(config.data.path) / "train", verify=False)
    rows = train.steps * train.global_batch_size
    if train.carry_state:
        return rows * train.seq_len / dataset.num_tokens
    if config.objective.kind == "next_token":
        source = Loader(dataset, train.seq_len, train.seed, isolate=train.isolate_documents)
    else:
        tokenizer = tokenizer_of(config.data)
        config = with_classes(config, dataset)
        source = loader_of(config, dataset, tokenizer, train.seq_len, train.seed)
    return rows / source.num_samples


def _made_from(path: str) -> list[str]:
    """Sources that prepared data say they were made from; none where they do not say."""
    sources = (made_from(Path(path)) or {}).get("sources")
    return [str(source) for source in sources] if isinstance(sources, list) else []


def _build(config: RunConfig) -> LanguageModel | Encoder:
    """Build the model; where the classes are still to be found in the data, with two of them."""
    if config.objective.kind == "next_token":
        return build_language_model(config)
    encoder = encoder_config(config)
    if config.objective.kind == "classify" and not encoder.classes:
        encoder = encoder.model_copy(update={"classes": ["", ""]})
    return build_encoder(config, encoder)


def _saved_bytes(model: LanguageModel | Encoder, rows: int, length: int, precision: str) -> int:
    """Measure what a forward pass of a few rows keeps for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}
    kept = []  # storages must live until all are counted, or an address could come twice

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    tokens = torch.zeros(rows, length, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        autocast(torch.device("cpu"), precision),
    ):
        if isinstance(model, LanguageModel):
            model.loss(tokens, tokens, reduction="sum")
        elif model.class_head is None:
            model.masked_loss(tokens, torch.where(torch.arange(length) % 7 == 0, tokens, -100))
        else:
            model.class_loss(tokens, tokens[:, 0])
    return sum(saved.values())
