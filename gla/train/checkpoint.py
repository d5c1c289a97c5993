"""A checkpoint: everything that the next update depends on, in a folder that verifies.

    checkpoints/step-00001000/
        model.safetensors       weights, under the names of ``model.state_dict()``; a tensor that
                                several names share is stored once, under the first of them
        average.safetensors     their running average, where ``train.ema_decay`` asks for one
        optimizer.safetensors   moments and step counts, "<parameter>.<moment>"
        carried.safetensors     states of the rows, where ``train.carry_state`` carries them
        trainer.json            step, tokens, scale of the loss, running sums, fingerprints
        config.toml             the recipe of the run
        manifest.json           sizes and SHA-256, see ``gla.storage``

The position in the data is the step, and random numbers are drawn anew from the seed and the step:
nothing is read or drawn again to find a place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gla import storage
from gla.errors import CheckpointError
from gla.models.weights import AVERAGE, WEIGHTS, check_finite, named_once
from gla.tables import describe_faults
from gla.train.config import RunConfig, build, read_toml

FORMAT = 2
_MOMENTS = ({"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})  # of AdamW, of Muon
_LISTED = 10  # faults of a kind that a message names

# What a run keeps for good: moments belong to an optimizer, and a place in the data to how its
# samples are cut, ordered and counted.
_FIXED = (
    ("objective", "kind"),
    ("optim", "kind"),
    ("train", "seq_len"),
    ("train", "global_batch_size"),
    ("train", "seed"),
    ("train", "carry_state"),
    ("train", "isolate_documents"),
    ("objective", "mask_fraction"),
)


class TrainerFacts(BaseModel):
    """``trainer.json``.

    Attributes:
        format: Of the checkpoint.
        step: Updates so far, those left out included.
        tokens: Targets learned from so far.
        window: Sums since the last line of metrics.
        validation: The last evaluation.
        best: Step and loss of the best evaluation, or None.
        updater: See ``Updater.facts``.
        clock: Seconds of work and of waiting: not part of what is learned.
        data: Fingerprints.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = FORMAT
    step: int
    tokens: int
    window: dict[str, float]
    validation: dict[str, float]
    best: tuple[int, float] | None
    updater: dict[str, float | list[float]]
    clock: dict[str, float]
    data: dict[str, str]


class Snapshot(NamedTuple):
    """A copy of all that a checkpoint holds, on the CPU.

    Attributes:
        tensors: {file name: {name: tensor}}.
        facts: ``trainer.json``.
        config_toml: The recipe.
    """

    tensors: dict[str, dict[str, Tensor]]
    facts: TrainerFacts
    config_toml: str


class Restored(NamedTuple):
    """What ``load`` gives back beside what it put into the model and the optimizer.

    Attributes:
        facts: ``trainer.json``.
        average: The running average by name; empty where there is none.
        carried: States of the rows by name; empty where none are carried.
    """

    facts: TrainerFacts
    average: dict[str, Tensor]
    carried: dict[str, Tensor]


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: TrainerFacts,
    config_toml: str,
    average: Mapping[str, Tensor] | None = None,
    carried: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Copy everything: what happens to the model afterwards does not reach the copy.

    Args:
        model: Its state dict is stored.
        optimizer: Its state is stored by parameter name.
        facts: See ``TrainerFacts``.
        config_toml: The recipe.
        average: See ``Restored``.
        carried: See ``Restored``.
    """
    tables = {
        WEIGHTS: named_once(model.state_dict()),
        "optimizer.safetensors": _optimizer_tensors(model, optimizer),
        AVERAGE: dict(average or {}),
        "carried.safetensors": dict(carried or {}),
    }
    copies = {
        file: {name: _copy(tensor) for name, tensor in tensors.items()}
        for file, tensors in tables.items()
        if tensors or file in (WEIGHTS, "optimizer.safetensors")
    }
    return Snapshot(copies, facts, config_toml)


def write(folder: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint, atomically. An older, damaged one of the same step is replaced.

    Raises:
        CheckpointError: The disk refuses. Nothing half-written remains.
    """

    def fill(temporary: Path) -> None:
        try:
            for file, tensors in snapshot.tensors.items():
                save_file(tensors, temporary / file)
        except SafetensorError as reason:
            raise CheckpointError(
                f"{folder}: got {reason} while writing, expected a writable disk with free space; "
                "fix by freeing space"
            ) from reason
        text = json.dumps(snapshot.facts.model_dump(), indent=1, allow_nan=False)
        (temporary / "trainer.json").write_text(text)
        (temporary / "config.toml").write_text(snapshot.config_toml, encoding="utf-8")

    storage.write_folder(folder, fill, replace=True)


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    allow_nonfinite: bool = False,
) -> Restored:
    """Put a verified checkpoint into a model and an optimizer.

    Raises:
        CheckpointError: Another format, or tensors that do not fit the model.
        NumericsError: A weight is NaN or infinite, and that is not allowed.
    """
    facts = read_facts(folder)
    weights = _read(folder / WEIGHTS)
    check_tensors(folder / WEIGHTS, weights, named_once(model.state_dict()))
    if not allow_nonfinite:
        check_finite(folder / WEIGHTS, weights)
    average = _read_optional(folder / AVERAGE)
    if average:
        names = {name for name, _ in model.named_parameters()}
        expected = {n: t for n, t in weights.items() if n in names}
        check_tensors(folder / AVERAGE, average, expected)
    carried = _read_optional(folder / "carried.safetensors")
    moments = _read(folder / "optimizer.safetensors")
    _restore_optimizer(folder / "optimizer.safetensors", moments, model, optimizer)
    # strict=False: further names of a shared tensor are not in the file; the check above was exact.
    model.load_state_dict(weights, strict=False)
    return Restored(facts, average, carried)


def read_facts(folder: Path) -> TrainerFacts:
    """Return ``trainer.json``.

    Raises:
        CheckpointError: It cannot be read, or the checkpoint has another format.
    """
    file = folder / "trainer.json"
    try:
        tables = json.loads(file.read_bytes())
        version = tables["format"]
        if version != FORMAT:
            raise CheckpointError(
                f"{folder}: got format {version}, expected {FORMAT}; fix by updating gla, or by "
                "going on with the version that wrote it"
            )
        return TrainerFacts.model_validate_json(file.read_bytes())
    except ValidationError as faults:
        lines = describe_faults(TrainerFacts, faults).splitlines()
        raise CheckpointError(f"{file}: {lines[0]}") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as reason:
        raise CheckpointError(
            f"{file}: got {reason!r}, expected the facts of a checkpoint; fix by restoring it "
            "from a copy"
        ) from reason


def check_tensors(file: Path, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare names, shapes and dtypes.

    Raises:
        CheckpointError: Lists up to ten faults.
    """
    faults = [f"{name} is missing" for name in expected if name not in got]
    faults += [f"{name} is not in the model" for name in got if name not in expected]
    for name in expected.keys() & got.keys():
        old, new = got[name], expected[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            faults.append(
                f"{name} is {list(old.shape)} {old.dtype}, expected {list(new.shape)} {new.dtype}"
            )
    if faults:
        more = f" and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        raise CheckpointError(
            f"{file}: got other tensors than expected: {'; '.join(sorted(faults)[:_LISTED])}{more}"
            "; fix the recipe to be that of the checkpoint"
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def check_same(
    folder: Path,
    config: RunConfig,
    fingerprints: Mapping[str, str],
    changes: frozenset[str] = frozenset(),
) -> None:
    """Refuse to go on from a checkpoint of another architecture, order of the data or text.

    Args:
        folder: The checkpoint.
        config: What training is to go on with.
        fingerprints: Of the data and the tokenizer at hand.
        changes: What may differ all the same: "tokenizer", "data".

    Raises:
        CheckpointError: Names what differs.
    """
    saved = build(read_toml(folder / "config.toml"))
    for section, key in _FIXED:
        before, now = (getattr(getattr(c, section), key) for c in (saved, config))
        if before != now:
            raise CheckpointError(
                f"{section}.{key}: got {now!r}, expected {before!r} as in {folder}; fix the "
                "option or start a new run"
            )
    before, after = (c.model.with_impl("auto").model_dump() for c in (saved, config))
    if changed := _differences(before, after, "model"):
        more = f"; and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
        raise CheckpointError(
            f"{folder}: belongs to another architecture; {'; '.join(changed[:_LISTED])}{more}; "
            "fix the recipe or start a new run"
        )
    for name, expected in read_facts(folder).data.items():
        what = "tokenizer" if name == "tokenizer" else "data"
        got = fingerprints.get(name, "")
        if got != expected and what not in changes:
            raise CheckpointError(
                f"data.path ({name}): got fingerprint {got[:12]}…, expected {expected[:12]}…, "
                "which this run was trained on; fix by restoring the data, or allow it with "
                f"--allow-{what}-change"
            )


def _differences(before: Any, after: Any, name: str) -> list[str]:
    """One clause for each key in which two tables differ, those of inner tables included."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = {**before, **after}
        pairs = ((key, before.get(key), after.get(key)) for key in keys)
        return [line for k, old, new in pairs for line in _differences(old, new, f"{name}.{k}")]
    if before == after:
        return []
    old, new = ("a table" if isinstance(x, dict) else repr(x) for x in (before, after))
    return [f"{name}: got {new}, expected {old}"]


def check_tokenizer(folder: Path, fingerprint: str) -> None:
    """Raise a CheckpointError if a checkpoint was trained with another tokenizer."""
    expected = read_facts(folder).data.get("tokenizer", fingerprint)
    if fingerprint != expected:
        raise CheckpointError(
            f"{folder}: got the tokenizer {fingerprint[:12]}…, expected {expected[:12]}…, which it "
            "was trained with; fix by restoring it, or allow it with --allow-tokenizer-change"
        )


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _restore_optimizer(
    file: Path, moments: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Set the moments of each parameter; one that was never updated has none."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, value in moments.items():
        name, _, key = full_name.rpartition(".")
        wanted = parameters.get(name)
        if wanted is None:
            raise CheckpointError(f"{file}: {full_name} is not of the model; fix by restoring it")
        shape, dtype = ((), torch.float32) if key == "step" else (tuple(wanted.shape), wanted.dtype)
        if (tuple(value.shape), value.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{file}: got {list(value.shape)} {value.dtype} for {full_name}, expected "
                f"{list(shape)} {dtype}; fix by restoring the checkpoint from a copy"
            )
        states.setdefault(name, {})[key] = value.to(wanted.device)
    for name, state in states.items():
        if set(state) not in _MOMENTS:
            raise CheckpointError(
                f"{file}: got {', '.join(sorted(state))} of {name}, expected the moments of AdamW "
                "or Muon; fix by restoring the checkpoint from a copy"
            )
        optimizer.state[parameters[name]].update(state)


def _read_optional(file: Path) -> dict[str, Tensor]:
    return _read(file) if file.exists() else {}


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as reason:
        raise CheckpointError(
            f"{file}: got {reason}, expected a safetensors file; fix by restoring it from a copy"
        ) from reason
