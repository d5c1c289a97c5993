"""Pretraining: from a recipe to a run folder, and on from any kill.

An update depends on the recipe, the checkpoint and the step number, and on nothing else: the data
are addressed by an integer position, the learning rate is a function of the step, random states are
in the checkpoint. So k steps, a kill and N - k steps give bit for bit what N steps give (on one
machine with one number of threads).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gla import storage
from gla.data.loader import Batch, Loader
from gla.data.tokenizer import Tokenizer
from gla.errors import CheckpointError, ConfigError, NumericsError
from gla.layers.feature_maps import redraw_features
from gla.models.language_model import LanguageModel
from gla.train import checkpoint, run_folder
from gla.train.config import RunConfig, apply_overrides, build, load_recipe, read_toml
from gla.train.device import (
    autocast,
    compile_blocks,
    evaluating,
    peak_memory,
    resolve_device,
    resolve_precision,
)
from gla.train.evaluate import count_targets, evaluate
from gla.train.inputs import Inputs, open_or_prepare, with_vocab_size
from gla.train.monitor import Monitor, gate_decays, say
from gla.train.optim import build_optimizer, set_lr, unmatched_groups
from gla.train.schedule import lr_factor, warmup_steps

# Writes a sample at each evaluation: (model in eval mode, tokenizer) -> text.
Sampler = Callable[[LanguageModel, Tokenizer], str]


class Result(NamedTuple):
    """What a finished run gives: its folder, its last step, and the last evaluation."""

    run: Path
    step: int
    validation: dict[str, float | int]


def train(
    config: RunConfig | Mapping[str, Any] | str | Path,
    run: str | Path,
    *,
    device: str = "auto",
    sampler: Sampler | None = None,
) -> Result:
    """Train a model from scratch into a new run folder.

    Where nothing stands at ``data.path`` and the recipe names ``data.sources``, these are prepared
    first. SIGINT and SIGTERM end training after the current update, with a checkpoint; a second one
    ends it at once.

    Args:
        config: A recipe: checked, as tables, or as the path of a TOML file.
        run: The folder to write.
        device: "auto", "cpu", "cuda", "cuda:N", "mps".
        sampler: Writes text at each evaluation.

    Raises:
        ConfigError: The recipe is wrong, or ``run`` holds a run already (nothing is touched).
        DataError: The data are missing or damaged.
        NumericsError: The loss or the gradient is not finite; the update was not made.
        KeyboardInterrupt, SystemExit: After SIGINT; with code 143 after SIGTERM.
    """
    if isinstance(config, str | Path):
        config = load_recipe(config)
    elif not isinstance(config, RunConfig):
        config = build(config)
    run, place = Path(run), resolve_device(device)
    precision = resolve_precision(config.train.precision, place)
    run_folder.refuse_existing(run)
    inputs = open_or_prepare(config.data, say)
    config = with_vocab_size(config, inputs.tokenizer.vocab_size)
    absolute = config.data.model_copy(update={"path": str(Path(config.data.path).resolve())})
    config = config.model_copy(update={"data": absolute})
    trainer = Trainer(config, inputs, place, precision, sampler)
    with run_folder.locked(run):
        run_folder.refuse_existing(run)  # again: another process may have begun meanwhile
        facts = {"seed": config.train.seed, "device": str(place), "precision": precision}
        run_folder.create(
            run,
            config.to_toml(),
            Path(config.data.path) / "tokenizer",
            {**facts, "data": inputs.fingerprints},
        )
        return trainer.fit(run)


def resume(
    run: str | Path,
    *,
    overrides: Iterable[tuple[str, str]] = (),
    device: str = "auto",
    sampler: Sampler | None = None,
) -> Result:
    """Go on with a run from its newest checkpoint that verifies, or from step 0 if it has none.

    Args:
        run: The run's folder.
        overrides: Changes of the recipe, such as ("train.steps", "2000"); they are kept.
        device: As in ``train``.
        sampler: As in ``train``.

    Raises:
        ConfigError: No run there, or an override is wrong.
        CheckpointError: Checkpoints are there but none verifies (each reason is given), or the
            newest belongs to another architecture, other data or another tokenizer.
    """
    run, place = Path(run), resolve_device(device)
    run_folder.require_existing(run)
    with run_folder.locked(run):
        config = build(apply_overrides(read_toml(run / run_folder.CONFIG), overrides))
        inputs = open_or_prepare(config.data, say)
        config = with_vocab_size(config, inputs.tokenizer.vocab_size)
        precision = resolve_precision(config.train.precision, place)
        trainer = Trainer(config, inputs, place, precision, sampler)
        trainer.restore(run)
        storage.write_bytes_atomic(run / run_folder.CONFIG, config.to_toml().encode())
        return trainer.fit(run)


class Trainer:
    """A model, its optimizer, its place in the data, the sums since the last line of metrics."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        device: torch.device,
        precision: str,
        sampler: Sampler | None,
    ) -> None:
        self.config, self.inputs, self.device = config, inputs, device
        self.precision, self.sampler = precision, sampler
        torch.manual_seed(config.train.seed)
        self.model = LanguageModel(config.model).to(device)
        if config.train.compile:
            compile_blocks(self.model, device)
        if unmatched := unmatched_groups(self.model, config.optim):
            raise ConfigError(
                f"optim.groups: got the pattern {unmatched[0]!r}, expected one that matches a "
                f"parameter, such as {next(iter(self.model.state_dict()))!r}"
            )
        self.optimizer = build_optimizer(self.model, config.optim)
        self.loader = Loader(inputs.train, seq_len=config.train.seq_len, seed=config.train.seed)
        self.loader.require(config.train.global_batch_size)
        self.step = 0
        self.tokens = 0  # targets learned from so far
        self.window: dict[str, float] = {"loss": 0.0, "tokens": 0, "bytes": 0, "seconds": 0.0}
        self.validation: dict[str, float | int] = {}
        self.notes: list[str] = []  # said before the log is open

    def restore(self, run: Path) -> None:
        """Continue from the newest checkpoint of a run that verifies."""
        parent = run / "checkpoints"
        folder, skipped = storage.newest_verified(parent)
        self.notes += [f"skipped a damaged checkpoint: {reason}" for reason in skipped]
        if folder is None:
            if skipped:
                raise CheckpointError("\n".join([f"{parent}: got no valid checkpoint", *skipped]))
            self.notes.append("no checkpoint was written yet: starting at step 0")
            return
        checkpoint.check_same(folder, self.config, self.inputs.fingerprints)
        checkpoint.put_aside_newer(parent, folder)
        facts = checkpoint.load(folder, self.model, self.optimizer)
        self.step, self.tokens = facts["step"], facts["tokens"]
        self.window, self.validation = facts["window"], facts["validation"]
        self.notes.append(f"resumed from {folder}")

    def fit(self, run: Path) -> Result:
        """Train up to ``train.steps``."""
        steps = self.config.train.steps
        storage.remove_leftovers(run)
        storage.remove_leftovers(run / "checkpoints")
        with Monitor(run, self.step, steps) as monitor, StopSignals() as signals:
            self._describe(monitor)
            saved = self.step
            while self.step < steps:
                self._update(monitor)
                due = self.step == steps
                if due or self.step % self.config.eval.interval == 0:
                    self._evaluate(monitor)
                if due or signals.received or self.step % self.config.checkpoint.interval == 0:
                    self._save(run, monitor)
                    saved = self.step
                if signals.received:
                    monitor.note(f"stopped at step {saved}; go on with: gla resume {run}")
                    signals.leave()
        return Result(run, self.step, self.validation)

    def _update(self, monitor: Monitor) -> None:
        """One optimizer step on one global batch, and its line of metrics if due."""
        began = time.perf_counter()
        config = self.config
        loss, gradient_norm, tokens, size = self._backward()
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            first = self.step * config.train.global_batch_size
            raise NumericsError(
                f"train: got loss {loss} and gradient norm {gradient_norm} in step "
                f"{self.step + 1} (samples {first} to {first + config.train.global_batch_size - 1})"
                ", expected finite numbers; the update was not made; fix with a lower optim.lr, a "
                "longer schedule.warmup_steps or train.precision fp32"
            )
        lr = config.optim.lr * lr_factor(config.schedule, config.train.steps, self.step)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        redraw_features(self.model, self.step)
        self.tokens += tokens
        window = self.window
        window["loss"] += loss * tokens
        window["tokens"] += tokens
        window["bytes"] += size
        window["seconds"] += time.perf_counter() - began
        monitor.advance(self.step)
        if self.step % config.metrics.interval == 0 or self.step == config.train.steps:
            monitor.record(self.step, self._metrics(lr, gradient_norm))
            self.window = dict.fromkeys(window, 0)

    def _backward(self) -> tuple[float, float, int, int]:
        """Accumulate the gradient of the mean loss over all targets of the global batch.

        Each micro-batch counts by its number of targets, so that the gradient does not depend on
        how the batch is cut.

        Returns:
            Mean loss in nats, norm of the gradient before clipping, targets, and their bytes.
        """
        train, device = self.config.train, self.device
        batches = self._micro_batches()
        counts = [count_targets(b.targets, self.inputs.tokenizer.piece_bytes) for b in batches]
        tokens, size = (sum(column) for column in zip(*counts, strict=True))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in batches:
            with autocast(device, self.precision):
                loss = self.model.loss(
                    batch.tokens.to(device),
                    batch.targets.to(device),
                    cu_seqlens=batch.cu_seqlens.to(device),
                    reduction="sum",
                )
            mean = loss / max(tokens, 1)
            mean.backward()
            total += mean.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.max_norm)
        loss_value, norm_value = torch.stack([total, norm.to(total)]).tolist()
        return loss_value, norm_value, tokens, size

    def _micro_batches(self) -> list[Batch]:
        train = self.config.train
        first = self.step * train.global_batch_size
        return [
            self.loader.batch(first + offset, train.rows)
            for offset in range(0, train.global_batch_size, train.rows)
        ]

    def _metrics(self, lr: float, gradient_norm: float) -> dict[str, float | int]:
        window = self.window
        return {
            "tokens": self.tokens,
            "loss": window["loss"] / max(window["tokens"], 1),
            "bpb": window["loss"] / math.log(2) / max(window["bytes"], 1),
            "lr": lr,
            "grad_norm": gradient_norm,
            "tokens_per_s": window["tokens"] / max(window["seconds"], 1e-9),
            "memory_gib": peak_memory(self.device) / 2**30,
        }

    def _evaluate(self, monitor: Monitor) -> None:
        config = self.config
        seq_len = config.eval.seq_len or config.train.seq_len
        self.validation = evaluate(
            self.model,
            self.inputs.val,
            self.inputs.tokenizer.piece_bytes,
            seq_len=seq_len,
            batch_size=max(1, config.train.rows * config.train.seq_len // seq_len),
            batches=0 if self.step == config.train.steps else config.eval.batches,
            precision=self.precision,
        )
        monitor.record(
            self.step, {"val_loss": self.validation["loss"], "val_bpb": self.validation["bpb"]}
        )
        with evaluating(self.model), autocast(self.device, self.precision):
            batch = self.loader.batch(0, 1)
            tokens, ends = batch.tokens.to(self.device), batch.cu_seqlens.to(self.device)
            monitor.histograms(self.step, gate_decays(self.model, tokens, ends))
            if self.sampler is not None:
                monitor.sample(self.step, self.sampler(self.model, self.inputs.tokenizer))

    def _save(self, run: Path, monitor: Monitor) -> None:
        monitor.sync()
        facts = {
            "step": self.step,
            "tokens": self.tokens,
            "window": self.window,
            "validation": self.validation,
            "data": self.inputs.fingerprints,
        }
        folder = checkpoint.folder_of(run, self.step)
        checkpoint.save(folder, self.model, self.optimizer, facts, self.config.to_toml())
        checkpoint.prune(folder.parent, self.config.checkpoint.keep)

    def _describe(self, monitor: Monitor) -> None:
        """Say once what was resolved."""
        config = self.config
        for note in self.notes:
            monitor.note(note)
        train, inputs = config.train, self.inputs
        monitor.note(
            f"{self.model.num_parameters():,} parameters on {self.device}, {self.precision}; "
            f"{train.global_batch_size * train.seq_len:,} tokens a step, "
            f"{train.steps:,} steps; {inputs.train.num_tokens:,} training tokens, "
            f"{inputs.val.num_tokens:,} for validation"
        )
        if (warmup := warmup_steps(config.schedule, train.steps)) != config.schedule.warmup_steps:
            monitor.note(
                f"schedule.warmup_steps: {config.schedule.warmup_steps} is longer than the run of "
                f"{train.steps} steps; cut to {warmup}"
            )


class StopSignals:
    """Notes SIGINT and SIGTERM instead of dying of the first; a second one kills at once."""

    def __init__(self) -> None:
        self.received = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread, where Python delivers signals: nothing to note
            pass
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def leave(self) -> None:
        """End as the signal noted would have."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

    def _handle(self, number: int, _: object) -> None:
        if self.received:
            self.received = number
            self.leave()
        self.received = number
