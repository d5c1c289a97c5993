"""What an encoder learns: tokens behind a mask, or the classes of chunks. See ``Objective``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla.data.chunks import ChunkLoader, ClassBatch, find_classes
from gla.data.loader import Batch
from gla.data.masking import MaskedLoader
from gla.data.shards import TokenDataset
from gla.data.tokenizer import Tokenizer
from gla.data.workers import Reader
from gla.errors import ConfigError
from gla.models.diagnose import diagnose, projection_gradients
from gla.models.encoder import IGNORE, Encoder, EncoderConfig
from gla.train.config import RunConfig
from gla.train.device import autocast, evaluating
from gla.train.distributed import Ranks
from gla.train.evaluate_encoder import evaluate_classes, evaluate_masked
from gla.train.inputs import Inputs
from gla.train.model import build_encoder
from gla.train.objective import share_of


class EncoderObjective(ABC):
    """What both have in common.

    Args:
        config: The recipe, with the vocabulary's size and the classes.
        inputs: Its data.
        device: Where the model goes.
        precision: Resolved, see ``device.resolve_precision``.
        ranks: The processes that share each batch.

    Raises:
        ConfigError: A batch cannot be shared, an option is for language models only, or a layer
            cannot do what its table or the length of the rows asks.
        DataError: There is too little text for a batch.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        device: torch.device,
        precision: str,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.inputs, self.device, self.precision = config, inputs, device, precision
        self.ranks = ranks or Ranks()
        train = config.train
        for key, only in (("carry_state", False), ("isolate_documents", True)):
            if getattr(train, key) != only:
                raise ConfigError(
                    f"train.{key}: got {str(not only).lower()} for an encoder, expected "
                    f"{str(only).lower()}; fix by leaving it out"
                )
        self.model = build_encoder(config, encoder_config(config)).to(device)
        self.fingerprints = inputs.fingerprints
        self.share, self.rows = share_of(config, self.ranks)
        self.source = loader_of(config, inputs.train, inputs.tokenizer, train.seq_len, train.seed)
        self.source.require(train.global_batch_size)
        self._reader = Reader(self.source, self._places, train.loader_workers)

    def _places(self, step: int) -> list[tuple[int, int]]:
        first = step * self.config.train.global_batch_size + self.ranks.rank * self.share
        return [(begin, self.rows) for begin in range(first, first + self.share, self.rows)]

    def describe(self) -> str:
        """See ``Objective``."""
        train, inputs = self.config.train, self.inputs
        classes = self.model.config.classes
        what = f"{len(classes)} classes, " if classes else ""
        return (
            f"{self.model.num_parameters():,} parameters on {self.device}, {self.precision}; "
            f"{what}{train.global_batch_size} rows of {train.seq_len:,} tokens a step, "
            f"{train.steps:,} steps; {self.source.num_samples:,} rows to train on, "
            f"{inputs.val.num_tokens:,} tokens for validation"
        )

    def batches(self, step: int) -> list[Any]:
        """See ``Objective``."""
        return self._reader(step)

    @abstractmethod
    def count(self, batch: Any) -> tuple[int, int, int]:
        """See ``Objective``."""

    @abstractmethod
    def loss(self, batch: Any, index: int) -> Tensor:
        """See ``Objective``."""

    def settle(self, taken: bool) -> None:  # noqa: B027 (to do nothing is right)
        """See ``Objective``: nothing is carried."""

    def rehearsal(self, step: int, rows: int) -> Tensor:
        """See ``Objective``."""
        batch = self.source.batch(self._places(step)[0][0], rows)
        return self.loss(batch, 0) / max(self.count(batch)[0], 1)

    def utilization(self, tokens_per_s: float) -> dict[str, float]:
        """See ``Objective``: not measured."""
        return {}

    def evaluate(self, whole: bool) -> dict[str, float | int]:
        """See ``Objective``."""
        return evaluate_encoder(
            self.model,
            self.config,
            self.inputs.val,
            self.inputs.tokenizer,
            batches=0 if whole else self.config.eval.batches,
            precision=self.precision,
            ranks=self.ranks,
        )

    def watch(self) -> tuple[dict[str, Tensor], str | None]:
        """See ``Objective``: what ``diagnose`` knows, and the gradients of Linformer's E and F."""
        with evaluating(self.model), autocast(self.device, self.precision):
            batch = self.source.batch(0, self.rows)
            ends = batch.cu_seqlens.to(self.device)
            values = diagnose(self.model, batch.tokens.to(self.device), ends)
        targets = max(self.count(batch)[0], 1)
        gradients = projection_gradients(self.model, lambda: self.loss(batch, 0) / targets)
        return values | {f"gradient/{n}": torch.tensor([g]) for n, g in gradients.items()}, None

    def tensors(self) -> dict[str, Tensor]:
        """See ``Objective``: there are none."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027 (the same)
        """See ``Objective``."""

    def close(self) -> None:
        """See ``Objective``."""
        self._reader.close()


class MaskedTokens(EncoderObjective):
    """Fill in masked tokens of packed documents."""

    def count(self, batch: Batch) -> tuple[int, int, int]:
        """See ``Objective``: bytes are not counted, a masked token's cost says nothing of them."""
        return int((batch.targets != IGNORE).sum()), batch.tokens.numel(), 0

    def loss(self, batch: Batch, index: int) -> Tensor:
        """See ``Objective``."""
        tokens, targets, ends = (x.to(self.device) for x in batch)
        with autocast(self.device, self.precision):
            return self.model.masked_loss(tokens, targets, cu_seqlens=ends, reduction="sum")


class Classes(EncoderObjective):
    """Tell the class of a chunk."""

    def count(self, batch: ClassBatch) -> tuple[int, int, int]:
        """See ``Objective``."""
        return len(batch.labels), batch.tokens.numel(), 0

    def loss(self, batch: ClassBatch, index: int) -> Tensor:
        """See ``Objective``."""
        tokens, labels, ends = (x.to(self.device) for x in batch)
        with autocast(self.device, self.precision):
            return self.model.class_loss(tokens, labels, cu_seqlens=ends, reduction="sum")


OBJECTIVES = {"masked": MaskedTokens, "classify": Classes}


def encoder_config(config: RunConfig) -> EncoderConfig:
    """Return the [model] section as what an encoder is built from."""
    assert isinstance(config.model, EncoderConfig)  # RunConfig made it so
    return config.model


def with_classes(config: RunConfig, train: TokenDataset) -> RunConfig:
    """Return the recipe with the classes found in the data, where it names none and needs them."""
    objective = config.objective
    if objective.kind != "classify" or encoder_config(config).classes:
        return config
    classes = find_classes(train, objective.min_documents, objective.exclude)
    model = config.model.model_copy(update={"classes": classes})
    return config.model_copy(update={"model": model})


def loader_of(
    config: RunConfig,
    dataset: TokenDataset,
    tokenizer: Tokenizer,
    seq_len: int,
    seed: int,
) -> ChunkLoader | MaskedLoader:
    """Open what the recipe's objective reads of a split, in an order that the seed decides."""
    if config.objective.kind == "classify":
        return ChunkLoader(dataset, encoder_config(config).classes, seq_len, seed)
    return MaskedLoader(
        dataset,
        seq_len,
        seed,
        mask_id=tokenizer.unk_id,
        is_text=tokenizer.piece_bytes > 0,
        fraction=config.objective.mask_fraction,
    )


def evaluate_encoder(
    model: Encoder,
    config: RunConfig,
    dataset: TokenDataset,
    tokenizer: Tokenizer,
    *,
    batches: int = 0,
    precision: str = "fp32",
    ranks: Ranks | None = None,
) -> dict[str, float | int]:
    """Measure an encoder as its recipe says; see ``evaluate_masked`` and ``evaluate_classes``.

    The order is one and the same in all runs, and mixed: the first batches stand for the split.
    """
    train = config.train
    seq_len = config.eval.seq_len or train.seq_len
    loader = loader_of(config, dataset, tokenizer, seq_len, seed=0)
    options: dict[str, Any] = {
        "batch_size": max(1, train.rows * train.seq_len // seq_len),
        "batches": batches,
        "precision": precision,
        "ranks": ranks,
    }
    if isinstance(loader, ChunkLoader):
        return evaluate_classes(model, loader, **options)
    return evaluate_masked(model, loader, **options)


def load_encoder_batch(
    config: RunConfig,
    checkpoint: Path,
    dataset: TokenDataset,
    tokens: int,
    device: torch.device,
    impl: str | None = None,
) -> tuple[Encoder, Tensor, Tensor, Callable[[], Tensor]]:
    """Load an encoder, and the first rows of a split, about so many tokens.

    Returns:
        The model, tokens [1, T], cu_seqlens [N+1], and what makes the mean loss.
    """
    model = Encoder.load(checkpoint, device, impl=impl)
    tokenizer = Tokenizer.load(Path(config.data.path) / "tokenizer")
    seq_len = min(config.train.seq_len, tokens)
    loader = loader_of(config, dataset, tokenizer, seq_len, seed=0)
    rows = min(loader.num_samples, max(1, tokens // seq_len))
    batch = type(loader.batch(0, 1))(*(x.to(device) for x in loader.batch(0, rows)))
    if isinstance(batch, ClassBatch):
        loss = partial(model.class_loss, batch.tokens, batch.labels, batch.cu_seqlens)
    else:
        loss = partial(model.masked_loss, batch.tokens, batch.targets, batch.cu_seqlens)
    return model, batch.tokens, batch.cu_seqlens, loss


@torch.no_grad()
def start_from_pretrained(model: torch.nn.Module, config: RunConfig) -> None:
    """Put the weights of the run that ``objective.pretrained`` names into a new encoder.

    Raises:
        ConfigError: It is a model of another build, or has another tokenizer.
        CheckpointError: It has no checkpoint that verifies.
    """
    if config.objective.pretrained is None:
        return
    path = Path(config.objective.pretrained)
    other = Encoder.load(path)
    theirs = Tokenizer.load(path / "tokenizer").fingerprint
    ours = Tokenizer.load(Path(config.data.path) / "tokenizer").fingerprint
    if theirs != ours:
        raise ConfigError(
            f"objective.pretrained: got a run with tokenizer {theirs[:12]}…, expected that of the "
            f"data, {ours[:12]}…; fix by preparing the data with the tokenizer of {path}"
        )
    weights = {n: w for n, w in other.state_dict().items() if not n.startswith("class_head")}
    wanted = {n: w for n, w in model.state_dict().items() if not n.startswith("class_head")}
    if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in wanted.items()}:
        raise ConfigError(
            f"objective.pretrained: got a run with layers {', '.join(other.config.layers)} of "
            f"width {other.config.d_model}, expected the [model] of this recipe; fix either"
        )
    for name, weight in weights.items():
        wanted[name].copy_(weight)
