"""Pretraining: from a recipe to a run folder, and on from any kill.

An update depends on the recipe, the checkpoint and the step number, and on nothing else: the data
are addressed by the step, the learning rate is a function of it, random numbers are drawn from it.
So k steps, a kill and N - k steps give bit for bit what N steps give (on one machine with one
number of threads).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gla import storage
from gla.models.weights import require_run
from gla.train import run_folder
from gla.train.config import RunConfig, apply_overrides, build, load_recipe, read_toml
from gla.train.device import resolve_device, resolve_precision
from gla.train.distributed import Ranks, code_digest, local_device, started
from gla.train.encoder_objective import OBJECTIVES, start_from_pretrained, with_classes
from gla.train.inputs import make_ready, open_inputs, with_vocab_size
from gla.train.monitor import say
from gla.train.objective import LanguageModeling, Objective, Sampler
from gla.train.trainer import Trainer


class Result(NamedTuple):
    """What a finished run gives: its folder, its last step, and the last evaluation."""

    run: Path
    step: int
    validation: dict[str, float | int]


class Allow(NamedTuple):
    """What a resumed run may differ in, or hold, all the same."""

    tokenizer: bool = False
    data: bool = False
    nonfinite: bool = False

    @property
    def changes(self) -> frozenset[str]:
        """As ``checkpoint.check_same`` takes it."""
        return frozenset(n for n in ("tokenizer", "data") if getattr(self, n))


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
    ends it at once. Under ``torchrun`` all its processes train one model.

    Args:
        config: A recipe: checked, as tables, or as the path of a TOML file.
        run: The folder to write.
        device: "auto", "cpu", "cuda", "cuda:N", "mps".
        sampler: Writes text at each evaluation.

    Raises:
        ConfigError: The recipe is wrong, ``run`` holds a run already (nothing is touched), or a
            batch does not fit into memory.
        DataError: The data are missing or damaged.
        NumericsError: The loss or the gradient is not finite; the update was not made.
        DistributedError: The processes cannot meet, or one was lost.
        KeyboardInterrupt, SystemExit: After SIGINT; with code 143 after SIGTERM.
    """
    recipe = config if isinstance(config, RunConfig) else _read(config)
    run, place = Path(run), resolve_device(local_device(device))
    precision = resolve_precision(recipe.train.precision, place)
    with started(place, recipe.train.timeout_s) as ranks:
        if ranks.rank == 0:
            run_folder.refuse_existing(run)
        ranks.first(lambda: make_ready(recipe.data, say))
        objective, config = open_objective(recipe, place, precision, ranks, sampler)
        facts = {"seed": config.train.seed, "device": str(place), "precision": precision}
        facts |= {"processes": ranks.size, "data": objective.fingerprints}
        with contextlib.closing(objective), _held(run, ranks):
            if ranks.rank == 0:
                run_folder.refuse_existing(run)  # again: another process may have begun meanwhile
            start_from_pretrained(objective.model, config)
            trainer = Trainer(config, objective, place, precision, ranks)
            trainer.rehearse()
            if ranks.rank == 0:
                tokenizer = Path(config.data.path) / "tokenizer"
                run_folder.create(run, config.to_toml(), tokenizer, facts)
            return Result(run, *trainer.fit(run))


def resume(
    run: str | Path,
    *,
    overrides: Iterable[tuple[str, str]] = (),
    device: str = "auto",
    sampler: Sampler | None = None,
    allow: Allow | None = None,
    step: int | None = None,
) -> Result:
    """Go on with a run from its newest checkpoint that verifies, or from step 0 if it has none.

    Or go back to an older one, and on from there, for example with another learning rate after a
    spike of the loss: newer checkpoints are put aside, and metrics, curves and samples of later
    steps are dropped.

    Args:
        run: The run's folder.
        overrides: Changes of the recipe, such as ("train.steps", "2000"); they are kept.
        device: As in ``train``.
        sampler: As in ``train``.
        allow: What may have changed, or be wrong with the checkpoint, all the same.
        step: Of the checkpoint to go back to; None: the newest.

    Raises:
        ConfigError: No run there, or an override is wrong.
        CheckpointError: Checkpoints are there but none verifies (each reason is given), there is
            none of ``step`` (it names those that are), or it belongs to another architecture, other
            data or another tokenizer.
        NumericsError: The checkpoint holds weights that are not finite.
    """
    run, place, allow = Path(run), resolve_device(local_device(device)), allow or Allow()
    require_run(run)
    recipe = build(apply_overrides(read_toml(run / run_folder.CONFIG), overrides))
    with started(place, recipe.train.timeout_s) as ranks, _held(run, ranks):
        precision = resolve_precision(recipe.train.precision, place)
        ranks.first(lambda: make_ready(recipe.data, say))
        objective, config = open_objective(recipe, place, precision, ranks, sampler)
        with contextlib.closing(objective):
            if not any((run / "checkpoints").glob("step-*")):  # it begins again, as ``train`` did
                start_from_pretrained(objective.model, config)
            trainer = Trainer(config, objective, place, precision, ranks)
            trainer.restore(run, allow.changes, allow.nonfinite, step)
            trainer.rehearse()  # overrides that do not fit into memory are not kept
            if ranks.rank == 0:
                storage.write_bytes_atomic(run / run_folder.CONFIG, config.to_toml().encode())
            return Result(run, *trainer.fit(run))


def open_objective(
    config: RunConfig,
    device: torch.device,
    precision: str,
    ranks: Ranks,
    sampler: Sampler | None,
) -> tuple[Objective, RunConfig]:
    """Open the data and build the model; return also the recipe with what they settle.

    Raises:
        ConfigError, DataError, DistributedError: They do not fit, or differ between processes.
    """
    inputs = open_inputs(config.data)
    config = with_classes(with_vocab_size(config, inputs.tokenizer.vocab_size), inputs.train)
    settled = {
        "path": str(Path(config.data.path).resolve()),
        "vocab_size": inputs.tokenizer.vocab_size,
    }
    config = config.model_copy(update={"data": config.data.model_copy(update=settled)})
    ranks.check_same(
        {
            "recipe": config.to_toml(),
            "source code": code_digest() if ranks.size > 1 else "",
            "data": str(inputs.fingerprints),
            "precision": precision,
        }
    )
    torch.manual_seed(config.train.seed)
    if config.objective.kind in OBJECTIVES:
        encoder = OBJECTIVES[config.objective.kind]
        return encoder(config, inputs, device, precision, ranks), config
    return LanguageModeling(config, inputs, device, precision, ranks, sampler), config


def _read(recipe: Mapping[str, Any] | str | Path) -> RunConfig:
    return load_recipe(recipe) if isinstance(recipe, str | Path) else build(recipe)


@contextlib.contextmanager
def _held(run: Path, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder in rank 0."""
    if ranks.rank:
        yield
        return
    with run_folder.locked(run):
        yield
