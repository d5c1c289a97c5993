"""The loop over updates: one trainer knows steps, processes and files, and no kind of data."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla import storage
from gla.errors import CheckpointError, ConfigError, NumericsError
from gla.layers.feature_maps import redraw_features
from gla.train import checkpoint, kept
from gla.train.config import RunConfig
from gla.train.device import peak_memory, prepare_blocks
from gla.train.distributed import Ranks
from gla.train.monitor import Monitor, Silent, scalars_of
from gla.train.objective import Objective
from gla.train.optim import unmatched_groups
from gla.train.rehearsal import rehearse
from gla.train.run_folder import dump_batches
from gla.train.schedule import lr_factor, warmup_steps
from gla.train.signals import StopSignals
from gla.train.update import Norms, Updater
from gla.train.writer import CheckpointWriter

# Of an evaluation: always the same, or said by others.
_NOT_RECORDED = ("tokens", "bytes", "targets", "chunks", "majority", "ppl")
MOST_SKIPS = 20  # updates left out in a row before it is an error
_SEED_OF_STEP = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # odd: no collisions


class Trainer:
    """An objective, its updates, and the sums since the last line of metrics.

    Args:
        config: The recipe, with all that is settled.
        objective: What is learned.
        device: Where its model is.
        precision: Resolved.
        ranks: The processes that train together.

    Raises:
        ConfigError: A group of parameters matches nothing, or blocks cannot be compiled.
    """

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        device: torch.device,
        precision: str,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.objective, self.device = config, objective, device
        self.ranks = ranks or Ranks()
        self.model = objective.model
        if unmatched := unmatched_groups(self.model, config.optim):
            raise ConfigError(
                f"optim.groups: got the pattern {unmatched[0]!r}, expected one that is found in a "
                f"parameter's name, such as {next(iter(self.model.state_dict()))!r}; fix it"
            )
        prepare_blocks(
            self.model,
            device,
            compiled=config.train.compile,
            checkpointing=config.train.activation_checkpointing,
        )
        self.updater = Updater(self.model, config, precision, self.ranks)
        self.step = 0
        self.tokens = 0  # learned from so far
        self.window = {"loss": 0.0, "targets": 0.0, "tokens": 0.0, "bytes": 0.0, "spikes": 0.0}
        self.clock = {"seconds": 0.0, "waited": 0.0, "all_seconds": 0.0, "all_tokens": 0.0}
        self.validation: dict[str, float | int] = {}
        self.best: tuple[int, float] | None = None
        self._signals = StopSignals()
        self.notes: list[str] = []  # said before the log is open

    def restore(
        self,
        run: Path,
        changes: frozenset[str] = frozenset(),
        allow_nonfinite: bool = False,
        step: int | None = None,
    ) -> None:
        """Continue from a checkpoint of a run; newer ones are put aside.

        Args:
            run: The run's folder.
            changes: See ``checkpoint.check_same``.
            allow_nonfinite: Whether weights may be NaN or infinite.
            step: Which one; None: the newest that verifies.

        Raises:
            CheckpointError: None verifies, or that one does not, or it does not fit.
            NumericsError: Its weights are not finite.
            ConfigError: It is of a later step than the last one of the recipe.
        """
        parent = run / "checkpoints"
        if step is None:
            folder, skipped = storage.newest_verified(parent)
        else:
            folder, skipped = kept.verified(run, step), []
        self.notes += [f"skipped a damaged checkpoint: {reason}" for reason in skipped]
        if folder is None:
            if skipped:
                raise CheckpointError(
                    f"{parent}: got no valid checkpoint ({'; '.join(skipped)}), expected one; fix "
                    "by restoring the folder from a copy, or start a new run"
                )
            self.notes.append("no checkpoint was written yet: starting at step 0")
            return
        checkpoint.check_same(folder, self.config, self.objective.fingerprints, changes)
        done, steps = checkpoint.read_facts(folder).step, self.config.train.steps
        if steps < done:
            raise ConfigError(
                f"train.steps: got {steps}, expected at least {done}, the step of {folder}; fix "
                "train.steps or start a new run"
            )
        restored = checkpoint.load(
            folder, self.model, self.updater.optimizer, allow_nonfinite=allow_nonfinite
        )
        self.objective.restore(restored.carried)
        facts = restored.facts
        self.step, self.tokens = facts.step, facts.tokens
        self.window, self.clock = dict(facts.window), dict(facts.clock)
        self.validation, self.best = dict(facts.validation), facts.best
        self.updater.restore(facts.updater, restored.average)
        if self.best and not kept.folder_of(run, self.best[0]).is_dir():
            self.best = None  # a better one took its place later, and that is put aside now
        if self.ranks.rank == 0:
            prefix = "damaged-" if step is None else "aside-"
            names = kept.put_aside_newer(parent, folder, prefix)
            if step is not None:
                if names:
                    self.notes.append(f"put aside in {parent}: {', '.join(names)}")
                kept.point_to_best(run, self.best and self.best[0])
        self.notes.append(f"resumed from {folder}")

    def rehearse(self) -> None:
        """Try a batch, before anything is written.

        Raises:
            ConfigError: It does not fit into memory.
        """
        if self.step < self.config.train.steps:
            rehearse(self._rehearse, self.objective.rows, self.updater.optimizer, self.device)

    def fit(self, run: Path) -> tuple[int, dict[str, float | int]]:
        """Train up to ``train.steps``; return the last step and the last evaluation."""
        config = self.config
        main = self.ranks.rank == 0
        if main:
            storage.remove_leftovers(run)
            storage.remove_leftovers(run / "checkpoints")
        writer = CheckpointWriter(run / "checkpoints", config.checkpoint.keep)
        with (
            Monitor(run, self.step, config.train.steps) if main else Silent() as monitor,
            writer,
            self._signals as signals,
        ):
            self._begin(monitor)
            saved = self.step
            while self.step < config.train.steps:
                writer.check()
                stop = self._update(run, monitor)
                done = self.step == config.train.steps
                better = False
                if done or self.step % config.eval.interval == 0:
                    better = self._evaluate(monitor)
                if done:
                    monitor.finish(config.model_dump(mode="json"), self.validation)
                if done or stop or better or self.step % config.checkpoint.interval == 0:
                    self._save(run, monitor, writer)
                    saved = self.step
                if stop:
                    writer.wait()
                    monitor.note(f"stopped at step {saved}; go on with: gla resume {run}")
                    signals.leave(stop)
            writer.wait()
        return self.step, self.validation

    def _begin(self, monitor: Monitor | Silent) -> None:
        """Say once what was resolved."""
        config = self.config
        for note in self.notes:
            monitor.note(note)
        monitor.note(self.objective.describe())
        steps, base = config.train.steps, config.schedule.warmup_steps
        warmups = {"schedule": base} | {
            f"optim.groups[{index}]": group.warmup_steps
            for index, group in enumerate(config.optim.groups)
            if group.warmup_steps is not None
        }
        for section, wanted in warmups.items():
            if (warmup := warmup_steps(wanted, steps, base)) != wanted:
                monitor.note(
                    f"{section}.warmup_steps: {wanted} is longer than the run of {steps} steps; "
                    f"cut to {warmup}"
                )

    def _rehearse(self, rows: int) -> None:
        try:
            self._seed()
            self.updater.backward(self.objective.rehearsal(self.step, rows))
        finally:
            self.updater.optimizer.zero_grad(set_to_none=True)
            self.objective.settle(False)

    def _seed(self) -> None:
        """Draw the random numbers of an update from the seed, the step and the process."""
        numbers = (self.config.train.seed, self.step, self.ranks.rank)
        mixed = sum(n * odd for n, odd in zip(numbers, _SEED_OF_STEP, strict=True))
        torch.manual_seed(mixed & (2**63 - 1))

    def _update(self, run: Path, monitor: Monitor | Silent) -> int:
        """One optimizer step on one global batch, and its line of metrics if due.

        Returns:
            The signal that any process has received, or 0.
        """
        began = time.perf_counter()
        config = self.config
        self._seed()
        redraw_features(self.model, self.step)
        batches = self.objective.batches(self.step)
        self.clock["waited"] += time.perf_counter() - began
        loss, targets, tokens, size, stop = self.backward(batches)
        norms = self.updater.norms()
        finite = math.isfinite(loss) and math.isfinite(norms.total)
        if finite:
            self.updater.take(self.step, norms.total)
            self.tokens += tokens
            self.window["loss"] += loss * targets
            self.window["targets"] += targets
            self.window["tokens"] += tokens
            self.window["bytes"] += size
            if self.updater.spikes.flags(loss):
                self.window["spikes"] += 1
                monitor.note(f"step {self.step + 1}: a loss of {loss:.4f} is a spike")
        else:
            self._leave_out(run, monitor, batches, loss, norms)
        self.objective.settle(finite)
        self.step += 1
        seconds = time.perf_counter() - began
        self.clock["seconds"] += seconds
        self.clock["all_seconds"] += seconds
        self.clock["all_tokens"] += tokens
        monitor.advance(self.step)
        if self.step % config.metrics.interval == 0 or self.step == config.train.steps:
            monitor.record(self.step, self._metrics(norms))
            self.window = dict.fromkeys(self.window, 0.0)
            self.clock |= {"seconds": 0.0, "waited": 0.0}
        return stop

    def backward(self, batches: Sequence[Any]) -> tuple[float, int, int, int, int]:
        """Accumulate the gradient of the mean loss over all targets of the global batch.

        Each micro-batch counts by its number of targets, so that the gradient does not depend on
        how the batch is cut.

        Returns:
            Mean loss in nats, targets, tokens, bytes, and the largest signal of any process.
        """
        counts = [self.objective.count(batch) for batch in batches]
        totals = self.ranks.sum([sum(column) for column in zip(*counts, strict=True)])
        targets, tokens, size = map(int, totals)
        means: list[Tensor] = []
        for index, batch in enumerate(batches):
            mean = self.objective.loss(batch, index) / max(targets, 1)
            self.updater.backward(mean)
            means.append(mean.detach())
        received = self._signals.received
        loss, terminated, interrupted = self.ranks.sum(
            [
                sum(torch.stack(means).tolist()),
                received == signal.SIGTERM,
                received == signal.SIGINT,
            ]
        )
        stop = signal.SIGTERM if terminated else signal.SIGINT if interrupted else 0
        return loss, targets, tokens, size, stop

    def _leave_out(
        self,
        run: Path,
        monitor: Monitor | Silent,
        batches: Sequence[Any],
        loss: float,
        norms: Norms,
    ) -> None:
        """Skip an update that is not finite, or stop.

        Raises:
            NumericsError: ``train.on_nonfinite`` says so, or it is one of too many in a row.
        """
        train, step = self.config.train, self.step + 1
        scaled = math.isfinite(loss) and self.updater.can_scale_down
        self.updater.skip()
        what = f"loss {loss} and gradient norm {norms.total} in step {step}"
        too_many = self.updater.in_a_row >= MOST_SKIPS
        if scaled and not too_many:
            monitor.note(f"left out step {step}: the loss is now scaled by {self.updater.scale:g}")
            return
        first = self.step * train.global_batch_size
        last = first + train.global_batch_size - 1
        facts = {"step": step, "first_sample": first, "last_sample": last, "loss": str(loss)}
        where = dump_batches(run, step, self.ranks.rank, batches, facts)
        if train.on_nonfinite == "skip" and not too_many:
            monitor.note(f"left out step {step}: {what}; its batch is {where}")
            return
        row = f", the {self.updater.in_a_row}th in a row," if too_many else ""
        raise NumericsError(
            f"train: got {what}{row} (samples {first} to {last}, {where}), expected "
            "finite numbers; the update was not made; fix with a lower optim.lr, a longer "
            "schedule.warmup_steps, train.precision fp32 or train.on_nonfinite skip"
        )

    def _metrics(self, norms: Norms) -> dict[str, float | int]:
        window, clock, config = self.window, self.clock, self.config
        targets = window["targets"] or math.nan  # no update was made: there is no loss
        bits = window["loss"] / math.log(2) / (window["bytes"] or math.nan)
        knows_bytes = window["bytes"] > 0 or window["targets"] == 0  # not so for encoders
        factor = lr_factor(config.schedule, config.train.steps, self.step - 1)
        rate = window["tokens"] / max(clock["seconds"], 1e-9)
        return {
            "tokens": self.tokens,
            "loss": window["loss"] / targets,
            **({"bpb": bits} if knows_bytes else {}),
            "lr": config.optim.lr * factor,
            "grad_norm": norms.total,
            "tokens_per_s": rate,
            "tokens_per_s_overall": clock["all_tokens"] / max(clock["all_seconds"], 1e-9),
            "data_wait": clock["waited"] / max(clock["seconds"], 1e-9),
            "memory_gib": peak_memory(self.device) / 2**30,
            **self.objective.utilization(rate / self.ranks.size),
            "skipped": self.updater.skipped,
            "spikes": int(window["spikes"]),
            **{f"grad_norm/{part}": norm for part, norm in norms.parts.items()},
        }

    def _evaluate(self, monitor: Monitor | Silent) -> bool:
        """Measure the model, or its running average.

        Returns:
            Whether the best one is to be kept and this is it so far. All are compared on the same
            text, ``eval.batches``: the last step too, whose own figures are of the whole split.
        """
        config, last = self.config, self.step == self.config.train.steps
        keep_best = config.checkpoint.keep_best
        with self.updater.averaged():
            self.validation = compared = self.objective.evaluate(last)
            if keep_best and last and config.eval.batches:
                compared = self.objective.evaluate(False)
            histograms, sample = self.objective.watch() if self.ranks.rank == 0 else ({}, None)
        shown = {n: v for n, v in self.validation.items() if n not in _NOT_RECORDED}
        figures = {f"val_{name}": value for name, value in shown.items()}
        monitor.record(self.step, figures | scalars_of(histograms))
        monitor.histograms(self.step, histograms)
        if sample is not None:
            monitor.sample(self.step, sample)
        loss = float(compared["loss"])
        better = keep_best and math.isfinite(loss) and (self.best is None or loss < self.best[1])
        if better:
            self.best = (self.step, loss)
        return better

    def _save(self, run: Path, monitor: Monitor | Silent, writer: CheckpointWriter) -> None:
        carried = self.objective.tensors()
        if self.ranks.rank:
            return
        monitor.sync()
        facts = checkpoint.TrainerFacts(
            step=self.step,
            tokens=self.tokens,
            window=self.window,
            validation={n: float(v) for n, v in self.validation.items() if math.isfinite(v)},
            best=self.best,
            updater=self.updater.facts(),
            clock=self.clock,
            data=self.objective.fingerprints,
        )
        copy = checkpoint.snapshot(
            self.model,
            self.updater.optimizer,
            facts,
            self.config.to_toml(),
            self.updater.average,
            carried,
        )
        keep_best = self.config.checkpoint.keep_best and self.best is not None
        best = self.best[0] if keep_best and self.best else None
        writer.save(kept.folder_of(run, self.step), copy, best)
