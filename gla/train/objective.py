"""What a run learns: its batches, its loss, its evaluation.

The loop knows steps, processes and files; an objective knows what a batch is. ``LanguageModeling``
predicts the next token. An objective of another kind gives the methods of ``Objective``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gla import state as states
from gla.data.loader import Batch, Loader
from gla.data.streams import StreamBatch, Streams
from gla.data.tokenizer import Tokenizer
from gla.data.workers import Reader
from gla.errors import CheckpointError, ConfigError
from gla.layers.feature_maps import RandomFeatures
from gla.models.diagnose import diagnose, projection_gradients
from gla.models.language_model import LanguageModel
from gla.state import ModelState
from gla.train.config import RunConfig
from gla.train.device import autocast, evaluating
from gla.train.distributed import Ranks
from gla.train.evaluate import count_targets, evaluate
from gla.train.flops import BACKWARD, flops_per_token, peak_flops
from gla.train.inputs import Inputs
from gla.train.model import build_language_model

# Writes a sample at each evaluation: (model in eval mode, tokenizer) -> text.
Sampler = Callable[[LanguageModel, Tokenizer], str]


class Objective(Protocol):
    """What the loop asks of an objective. A batch is a NamedTuple of tensors.

    Attributes:
        model: The model that learns, on its device.
        rows: Rows of a micro-batch.
        fingerprints: What a resumed run compares with what it started from, by name.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def rows(self) -> int: ...

    @property
    def fingerprints(self) -> dict[str, str]: ...

    def describe(self) -> str:
        """One line for the log: model and data."""
        ...

    def batches(self, step: int) -> Sequence[Any]:
        """This process's micro-batches of an update: they depend on the step alone."""
        ...

    def count(self, batch: Any) -> tuple[int, int, int]:
        """Targets of a batch, over which the loss is a mean, tokens, and bytes of the targets."""
        ...

    def loss(self, batch: Any, index: int) -> Tensor:
        """Sum of the losses of the targets of the index-th micro-batch, fp32."""
        ...

    def settle(self, taken: bool) -> None:
        """The update with the latest losses was taken, or was not."""
        ...

    def rehearsal(self, step: int, rows: int) -> Tensor:
        """Mean loss of a batch of ``rows`` rows at a step: to see whether it fits into memory."""
        ...

    def utilization(self, tokens_per_s: float) -> dict[str, float]:
        """What a process that reads so many tokens a second makes of its device."""
        ...

    def evaluate(self, whole: bool) -> dict[str, float | int]:
        """Figures on the validation split (or its first part), the same in all processes.

        ``loss`` is among them: the lowest is the best. They are recorded as ``val_loss`` and so on.
        """
        ...

    def watch(self) -> tuple[dict[str, Tensor], str | None]:
        """Values to see as histograms, by name, and a sample of what the model writes."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What an update depends on beside weights, of all processes; all call it together."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Undo ``tensors``, perhaps with another number of processes."""
        ...

    def close(self) -> None:
        """End what runs beside the training process."""
        ...


class LanguageModeling:
    """Predict the next token of packed documents. See ``Objective``.

    Args:
        config: The recipe, with the vocabulary's size.
        inputs: Its data.
        device: Where the model goes.
        precision: Resolved, see ``device.resolve_precision``.
        ranks: The processes that share each batch.
        sampler: Writes text at each evaluation.

    Raises:
        ConfigError: A batch cannot be shared, or a layer's state cannot be carried.
        DataError: There are too few tokens for a batch.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        device: torch.device,
        precision: str,
        ranks: Ranks | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.config, self.inputs, self.device, self.precision = config, inputs, device, precision
        self.ranks, self.sampler = ranks or Ranks(), sampler
        self.model = build_language_model(config).to(device)
        self.fingerprints = inputs.fingerprints
        train = config.train
        self.share, self.rows = share_of(config, self.ranks)
        self.source: Any = self._open_source()
        self._reader = Reader(self.source, self._places, train.loader_workers)
        forward = sum(flops_per_token(self.model, train.seq_len).values())
        self._flops = forward * (1 + BACKWARD)
        self._peak = peak_flops(device, precision)
        micro_batches = self.share // self.rows
        self._carried: list[ModelState | None] = [None] * micro_batches
        self._next: list[ModelState | None] = [None] * micro_batches

    def _open_source(self) -> Loader | Streams:
        train, dataset = self.config.train, self.inputs.train
        isolate = train.isolate_documents
        if train.carry_state:
            check_state_is_bounded(self.model)
            return Streams(dataset, train.seq_len, train.global_batch_size, train.seed, isolate)
        loader = Loader(dataset, train.seq_len, train.seed, isolate=isolate)
        loader.require(train.global_batch_size)
        return loader

    def _places(self, step: int) -> list[tuple[int, ...]]:
        """What ``source.batch`` is asked for by this process in a step."""
        size = self.config.train.global_batch_size
        first = self.ranks.rank * self.share
        begins = range(first, first + self.share, self.rows)
        if isinstance(self.source, Streams):
            return [(step, begin, self.rows) for begin in begins]
        return [(step * size + begin, self.rows) for begin in begins]

    def describe(self) -> str:
        """See ``Objective``."""
        train, inputs = self.config.train, self.inputs
        waste = ""
        if isinstance(self.source, Loader):
            waste = f" ({self.source.waste:.1%} of places empty)"
        return (
            f"{self.model.num_parameters():,} parameters on {self.device}, {self.precision}; "
            f"{train.global_batch_size * train.seq_len:,} tokens a step, {train.steps:,} steps; "
            f"{inputs.train.num_tokens:,} training tokens{waste}, "
            f"{inputs.val.num_tokens:,} for validation"
        )

    def batches(self, step: int) -> list[Batch | StreamBatch]:
        """See ``Objective``."""
        return self._reader(step)

    def count(self, batch: Batch | StreamBatch) -> tuple[int, int, int]:
        """See ``Objective``: a token is one that is predicted."""
        targets, size = count_targets(batch.targets, self.inputs.tokenizer.piece_bytes)
        return targets, targets, size

    def loss(self, batch: Batch | StreamBatch, index: int) -> Tensor:
        """See ``Objective``."""
        tokens, targets, ends = (x.to(self.device) for x in batch[:3])
        with autocast(self.device, self.precision):
            if not isinstance(batch, StreamBatch):
                return self.model.loss(tokens, targets, cu_seqlens=ends, reduction="sum")
            before = self._state_of(batch, self._carried[index])
            loss, after = self.model.loss_and_state(tokens, targets, before, ends)
            rows = states.select(after, batch.last)
            self._next[index] = states.map_tensors(rows, Tensor.detach)
            return loss

    def _state_of(self, batch: StreamBatch, carried: ModelState | None) -> ModelState:
        """State of each window of a batch: the row's carried one where it goes on."""
        fresh = self.model.init_state(len(batch.cu_seqlens) - 1)
        rows = (batch.goes_on >= 0).nonzero().squeeze(1)
        if carried is None or len(rows) == 0:
            return fresh
        windows = batch.goes_on[rows]
        parts = iter(states.tensors(states.select(carried, rows)))

        def put(x: Tensor) -> Tensor:
            return x.index_copy(0, windows.to(x.device), next(parts).to(x.dtype))

        return states.map_tensors(fresh, put)

    def settle(self, taken: bool) -> None:
        """See ``Objective``. After a skip each row goes on from the state before it."""
        if taken:
            self._carried = self._next
        self._next = [None] * len(self._carried)

    def rehearsal(self, step: int, rows: int) -> Tensor:
        """See ``Objective``."""
        *place, _ = self._places(step)[0]
        batch = self.source.batch(*place, rows)
        carried, self._carried[0] = self._carried[0], None
        try:
            return self.loss(batch, 0) / max(self.count(batch)[0], 1)
        finally:
            self._carried[0] = carried

    def utilization(self, tokens_per_s: float) -> dict[str, float]:
        """See ``Objective``."""
        rate = tokens_per_s * self._flops
        figures = {"tflops": rate / 1e12}
        return figures | ({"mfu": rate / self._peak} if self._peak else {})

    def evaluate(self, whole: bool) -> dict[str, float | int]:
        """See ``Objective``."""
        config = self.config
        seq_len = config.eval.seq_len or config.train.seq_len
        return evaluate(
            self.model,
            self.inputs.val,
            self.inputs.tokenizer.piece_bytes,
            seq_len=seq_len,
            batch_size=max(1, config.train.rows * config.train.seq_len // seq_len),
            batches=0 if whole else config.eval.batches,
            precision=self.precision,
            ranks=self.ranks,
        )

    def watch(self) -> tuple[dict[str, Tensor], str | None]:
        """See ``Objective``: what ``diagnose`` knows, and the gradients of projections."""
        with evaluating(self.model), autocast(self.device, self.precision):
            batch = self.source.batch(*self._places(0)[0])
            tokens, ends = batch.tokens.to(self.device), batch.cu_seqlens.to(self.device)
            values = diagnose(self.model, tokens, ends)
            text = self.sampler and self.sampler(self.model, self.inputs.tokenizer)
            norms = projection_gradients(
                self.model,
                lambda: self.model.loss(tokens, batch.targets.to(self.device), cu_seqlens=ends),
            )
        return values | {f"gradient/{n}": torch.tensor([g]) for n, g in norms.items()}, text

    def tensors(self) -> dict[str, Tensor]:
        """See ``Objective``: the carried states, [global_batch_size, …] each."""
        carried = [dict(states.named_tensors(s)) for s in self._carried if s is not None]
        if not carried:
            return {}
        return {
            name: self.ranks.gather(torch.cat([part[name] for part in carried]))
            for name in carried[0]
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``Objective``."""
        if not tensors:
            return
        like = self.model.init_state(self.rows)
        for index in range(len(self._carried)):
            first = self.ranks.rank * self.share + index * self.rows
            names = iter([name for name, _ in states.named_tensors(like)])

            def take(x: Tensor, names: Any = names, first: int = first) -> Tensor:
                name = next(names)
                part = tensors.get(name, torch.empty(0))[first : first + self.rows]
                if part.shape != x.shape:
                    raise CheckpointError(
                        f"carried.safetensors: got {list(part.shape)} for {name}, expected "
                        f"{list(x.shape)}; fix by restoring the checkpoint from a copy"
                    )
                return part.to(x.device)

            self._carried[index] = states.map_tensors(like, take)

    def close(self) -> None:
        """See ``Objective``."""
        self._reader.close()


def share_of(config: RunConfig, ranks: Ranks) -> tuple[int, int]:
    """Return the rows of an update that fall to a process, and those of a micro-batch.

    Raises:
        ConfigError: They do not divide; the message shows the arithmetic.
    """
    size = config.train.global_batch_size
    if size % ranks.size:
        raise ConfigError(
            f"train.global_batch_size: got {size} for {ranks.size} processes, and {size} % "
            f"{ranks.size} = {size % ranks.size}, expected 0; fix by choosing a multiple"
        )
    share = size // ranks.size
    rows = config.train.micro_batch_size or share
    if share % rows:
        raise ConfigError(
            f"train.micro_batch_size: got {rows} for {size} / {ranks.size} = {share} rows a "
            f"process, and {share} % {rows} = {share % rows}, expected 0; fix by choosing a divisor"
        )
    return share, rows


def check_state_is_bounded(model: LanguageModel) -> None:
    """Raise a ConfigError if a layer's state cannot be carried for ever.

    It must not grow with the text, nor be made of random features that are drawn again.
    """
    for module in model.modules():
        if isinstance(module, RandomFeatures) and module.redraw_every:
            raise ConfigError(
                f"train.carry_state: got true with redraw_every = {module.redraw_every}, expected "
                "0: a state is of one draw of the random features; fix redraw_every"
            )
    device = model.embed.weight.device
    with evaluating(model):
        _, after = model.prefill(torch.zeros(1, 2, dtype=torch.int64, device=device))
    before = dict(states.named_tensors(model.init_state(1)))
    for name, tensor in states.named_tensors(after):
        if before[name].shape != tensor.shape:
            layer = model.config.layer_names[int(name.split(".")[1])]
            raise ConfigError(
                f"train.carry_state: got true with the layer {layer!r}, whose state grows with the "
                "text, expected layers with a state of constant size; fix by giving it a window"
            )
