"""From a checkpoint on the disk to the weights of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gla import storage
from gla.errors import CheckpointError, ConfigError, NumericsError
from gla.ops.memory import empty
from gla.tables import read_toml

logger = logging.getLogger("gla")

CONFIG = "config.toml"  # of a run, and of a checkpoint
WEIGHTS = "model.safetensors"
AVERAGE = "average.safetensors"  # the running average of the weights, where a run keeps one
_ALIGNMENT = 64  # bytes, of a tensor's start: a line of the cache
_LISTED = 10  # faults that a message names
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80")  # of what torch.save writes: a zip, or a bare pickle


def require_run(path: Path) -> None:
    """Raise a ConfigError if a folder does not hold a run."""
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path}: got no {CONFIG} there, expected the folder of a run; "
            "fix the path, or start one with 'gla train RECIPE --run …'"
        )


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a run folder, or a checkpoint folder, stands for.

    Raises:
        ConfigError: It is neither.
        CheckpointError: None verifies, or the path is a file, such as a pickle, which is not read.
    """
    if path.is_file():
        with open(path, "rb") as file:
            pickled = file.read(4).startswith(_PICKLE_STARTS)
        what = "a pickle, which can run any code and is not opened" if pickled else "a file"
        raise CheckpointError(
            f"{path}: got {what}, expected the folder of a run or of a checkpoint; fix the path"
        )
    if (path / storage.MANIFEST).exists():
        storage.verify_folder(path)
        return path
    if not (path / "checkpoints").is_dir():
        require_run(path)
    checkpoint, skipped = storage.newest_verified(path / "checkpoints")
    for reason in skipped:
        logger.warning("skipped a checkpoint: %s", reason)
    if checkpoint is None:
        raise CheckpointError(
            f"{path}: got no checkpoint that verifies, expected one in {path / 'checkpoints'}; "
            f"fix by training: gla resume {path}"
        )
    return checkpoint


def recipe_of(checkpoint: Path, *, encoder: bool = False) -> Path:
    """Return the recipe of a checkpoint: its own, or that of its run.

    Args:
        checkpoint: The folder.
        encoder: Whether an encoder is wanted, not a language model.

    Raises:
        ConfigError: It is missing or no TOML, or its [objective] is that of the other kind.
    """
    recipe = checkpoint / CONFIG
    recipe = recipe if recipe.exists() else checkpoint.parent.parent / CONFIG
    objective = read_toml(recipe).get("objective", {})
    kind = objective.get("kind") if isinstance(objective, dict) else None
    if kind is not None and (kind == "next_token") == encoder:
        wanted, other = ("an encoder", "gla.LanguageModel")
        if not encoder:
            wanted, other = ("a language model", "gla.Encoder, gla eval or gla inspect")
        raise ConfigError(
            f"{recipe}: got objective.kind = {kind!r}, expected the run of {wanted}; fix the path, "
            f"or use {other}"
        )
    return recipe


def load_weights(model: nn.Module, folder: Path, *, allow_nonfinite: bool = False) -> None:
    """Put a verified checkpoint's weights, or their average where it has one, into a model.

    Raises:
        CheckpointError: They cannot be read, or belong to another model.
        NumericsError: A weight is NaN or infinite, and that is not allowed.
    """
    named = storage.verify_folder(folder, contents=False)
    for file in (folder / WEIGHTS, folder / AVERAGE):
        if file.name == AVERAGE and AVERAGE not in named:
            continue
        try:
            tensors = load_file(file)
            left = model.load_state_dict(tensors, strict=False)
        except (OSError, SafetensorError, RuntimeError) as reason:
            raise _misfit(file, " ".join(str(reason).split())) from reason
        if left.unexpected_keys:
            raise _misfit(file, f"the further tensors {left.unexpected_keys[:_LISTED]}")
        if file.name == WEIGHTS:
            # A tensor that several names share stands in the file under the first of them.
            missing = [n for n in named_once(model.state_dict()) if n not in tensors]
            if missing:
                raise _misfit(file, f"no tensors {missing[:_LISTED]}")
        if not allow_nonfinite:
            check_finite(file, tensors)


def named_once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out further names of a tensor that has been named (a tied head)."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise a NumericsError that names up to ten tensors with a NaN or an infinity."""
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        more = f" and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
        raise NumericsError(
            f"{file}: got NaN or infinity in {', '.join(sorted(bad)[:_LISTED])}{more}, expected "
            "finite weights; fix by taking an older checkpoint, or with --allow-nonfinite"
        )


def gather(model: nn.Module) -> None:
    """Move the weights that are on the CPU into one block of memory, on huge pages where possible.

    A decoded token reads every weight once, and finding 4 KB pages takes a quarter of that time.
    Names, values and identities of parameters stay; what else holds their old memory keeps it.
    """
    weights = [x for x in [*model.parameters(), *model.buffers()] if x.device.type == "cpu"]
    starts = [0]
    for x in weights:
        starts.append(starts[-1] + -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT)
    block = empty((starts[-1],), torch.uint8, torch.device("cpu"))
    bytes_ = block.numpy()
    for x, start in zip(weights, starts, strict=False):
        # Through NumPy, so that each is a storage of its own: views of one could not be saved.
        part = torch.from_numpy(bytes_[start : start + x.nbytes]).view(x.dtype).view(x.shape)
        x.data = part.copy_(x.data)


def _misfit(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: got {what}, expected the weights of the model that config.toml describes; "
        "fix by loading the run that wrote them"
    )
