"""A checkpoint: everything that the next update depends on, in a folder that verifies.

    checkpoints/step-00001000/
        model.safetensors       weights, under the names of ``model.state_dict()``; a tensor that
                                several names share is stored once, under the first of them
        optimizer.safetensors   AdamW's moments and step counts, "<parameter>.<moment>"
        trainer.json            step, tokens, position in the data, random states, running sums
        config.toml             the recipe of the run
        manifest.json           sizes and SHA-256, see ``gla.storage``

The position in the data is one integer, so nothing is read again to find it.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gla import storage
from gla.errors import CheckpointError
from gla.train.config import RunConfig, build, read_toml

FORMAT = 1
_LISTED = 10  # faults of a kind that a message names

# What a run keeps for good: moments belong to an optimizer, and a place in the data to how its
# samples are cut, ordered and counted.
_FIXED = (
    ("optim", "kind"),
    ("train", "seq_len"),
    ("train", "global_batch_size"),
    ("train", "seed"),
)


def folder_of(run: Path, step: int) -> Path:
    """Return where the checkpoint of a step stands."""
    return run / "checkpoints" / f"step-{step:08d}"


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: Mapping[str, Any],
    config_toml: str,
) -> None:
    """Write a checkpoint, atomically. An older, damaged one of the same step is replaced.

    Args:
        folder: The final place.
        model: Its state dict is stored.
        optimizer: Its state is stored by parameter name.
        trainer: Anything that JSON holds; "rng" and "format" are added.
        config_toml: The recipe.

    Raises:
        CheckpointError: The disk refuses. Nothing half-written remains.
    """

    def write(temporary: Path) -> None:
        try:
            save_file(_named_once(model.state_dict()), temporary / "model.safetensors")
            save_file(_optimizer_tensors(model, optimizer), temporary / "optimizer.safetensors")
        except SafetensorError as reason:
            raise CheckpointError(f"{folder}: got {reason} while writing") from reason
        facts = {**trainer, "rng": random_states(), "format": FORMAT}
        (temporary / "trainer.json").write_text(json.dumps(facts, indent=1, allow_nan=False))
        (temporary / "config.toml").write_text(config_toml, encoding="utf-8")

    storage.write_folder(folder, write, replace=True)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a verified checkpoint into a model and an optimizer, and set the random states.

    Returns:
        What ``save`` was given as ``trainer``.

    Raises:
        CheckpointError: Another format, or tensors that do not fit the model.
    """
    facts = read_facts(folder)
    weights = _read(folder / "model.safetensors")
    check_tensors(folder / "model.safetensors", weights, _named_once(model.state_dict()))
    moments = _read(folder / "optimizer.safetensors")
    _restore_optimizer(folder / "optimizer.safetensors", moments, model, optimizer)
    # strict=False: further names of a shared tensor are not in the file; the check above was exact.
    model.load_state_dict(weights, strict=False)
    set_random_states(facts["rng"])
    return facts


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what ``save`` was given as ``trainer``, with "rng" and "format".

    Raises:
        CheckpointError: The checkpoint has a newer format.
    """
    facts = json.loads((folder / "trainer.json").read_text())
    if facts["format"] > FORMAT:
        raise CheckpointError(
            f"{folder}: got format {facts['format']}, expected at most {FORMAT}; "
            "fix by updating gla"
        )
    return facts


def put_aside_newer(parent: Path, folder: Path) -> None:
    """Rename the (damaged) checkpoints newer than ``folder``, so that pruning cannot count them."""
    for other in parent.glob("step-*"):
        if (len(other.name), other.name) > (len(folder.name), folder.name):
            aside = parent / f"damaged-{other.name}"
            storage.remove(aside)
            other.rename(aside)


def prune(parent: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints. A kill midway leaves the newest whole."""
    folders = sorted(parent.glob("step-*"), key=lambda p: (len(p.name), p.name))
    for folder in folders[:-keep]:
        doomed = parent / f"{storage.TEMPORARY}{folder.name}-pruned"
        storage.remove(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)


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
        raise CheckpointError(f"{file}: {'; '.join(sorted(faults)[:_LISTED])}{more}")


def random_states() -> dict[str, str]:
    """Return torch's random states, of the CPU and of each GPU, as base64."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return {k: base64.b64encode(s.numpy().tobytes()).decode() for k, s in states.items()}


def set_random_states(states: Mapping[str, str]) -> None:
    """Undo ``random_states``. The state of a GPU that this machine lacks is left out."""
    for device, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif int(device.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def _named_once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out further names of a tensor that has been named (a tied head)."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.contiguous()
    return kept


def check_same(folder: Path, config: RunConfig, fingerprints: Mapping[str, str]) -> None:
    """Refuse to go on from a checkpoint of another architecture, order of the data or text.

    Args:
        folder: The checkpoint.
        config: What training is to go on with.
        fingerprints: Of the data and the tokenizer at hand.

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
    if saved.model != config.model:
        before, after = saved.model.model_dump(), config.model.model_dump()
        changed = [
            f"model.{key}: got {after[key]!r}, expected {before[key]!r}"
            for key in before
            if before[key] != after.get(key)
        ]
        raise CheckpointError(
            f"{folder}: belongs to another architecture; {'; '.join(changed)}; "
            "fix the recipe or start a new run"
        )
    for name, expected in read_facts(folder)["data"].items():
        if fingerprints[name] != expected:
            raise CheckpointError(
                f"data.path ({name}): got fingerprint {fingerprints[name][:12]}…, expected "
                f"{expected[:12]}…, which this run was trained on; fix by restoring the data "
                "or starting a new run"
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
    parameters = dict(model.named_parameters())
    for full_name, value in moments.items():
        name, _, key = full_name.rpartition(".")
        parameter = parameters.get(name)
        if parameter is None or (value.ndim > 0 and value.shape != parameter.shape):
            raise CheckpointError(f"{file}: {full_name} does not fit the model")
        optimizer.state[parameter][key] = value.to(parameter.device)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as reason:
        raise CheckpointError(f"{file}: got {reason}, expected a safetensors file") from reason
