"""The folder of a run: created once, held by one process at a time, left as it was on a refusal.

    runs/NAME/config.toml  env.json  log.txt  metrics.jsonl  tb/  samples/  tokenizer/  checkpoints/

``config.toml`` is written last: a folder holds a run if, and only if, it is there.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes

from gla import storage
from gla.errors import CheckpointError, ConfigError
from gla.models.weights import CONFIG

_PACKAGES = ("gla", "torch", "triton", "numpy", "safetensors", "sentencepiece", "pydantic")


def create(run: Path, config_toml: str, tokenizer: Path, facts: Mapping[str, Any]) -> None:
    """Make the folder of a new run.

    Args:
        run: May exist, but hold no run.
        config_toml: The merged recipe.
        tokenizer: The tokenizer's folder, copied into the run.
        facts: What ``env.json`` says beside the versions.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        shutil.copytree(tokenizer, run / "tokenizer", dirs_exist_ok=True)
        text = json.dumps({**environment(), **facts}, indent=1)
        storage.write_bytes_atomic(run / "env.json", text.encode())
        storage.write_bytes_atomic(run / CONFIG, config_toml.encode())
    except OSError as reason:
        raise _unwritable(run, reason) from reason


def refuse_existing(run: Path) -> None:
    """Raise a ConfigError if the folder holds a run, or is none."""
    if run.exists():
        storage.make_folder(run, "--run")
    if (run / CONFIG).exists():
        raise ConfigError(
            f"{run}: got a folder that holds a run, expected a new one; "
            f"fix with 'gla resume {run}' or another --run"
        )


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run against a second writer. The lock ends with the process, however it ends.

    Raises:
        CheckpointError: Another process (named by its id) trains in this folder.
        ConfigError: The folder cannot be written.
    """

    def busy(process: str) -> CheckpointError:
        return CheckpointError(
            f"{run}: got a run that process {process} is training, expected no other writer; "
            "fix by waiting for it or ending it"
        )

    with contextlib.ExitStack() as stack:
        storage.make_folder(run, "--run")
        try:
            stack.enter_context(storage.locked(run / ".lock", busy))
        except OSError as reason:
            raise _unwritable(run, reason) from reason
        yield


def dump_batches(
    run: Path, step: int, rank: int, batches: Sequence[Any], facts: Mapping[str, Any]
) -> str:
    """Write the batches of an update into ``nonfinite/``, to be looked at.

    Args:
        run: The run's folder.
        step: The update.
        rank: Of the process whose batches they are.
        batches: NamedTuples of tensors.
        facts: Metadata of the file, as text.

    Returns:
        Where they are, in words: a disk that refuses them is not what matters then.
    """
    tensors = {
        f"{i}.{field}": tensor.contiguous()
        for i, batch in enumerate(batches)
        for field, tensor in zip(batch._fields, batch, strict=True)
    }
    file = run / "nonfinite" / f"step-{step:08d}-rank-{rank}.safetensors"
    data = to_bytes(tensors, {name: str(value) for name, value in facts.items()})
    try:
        file.parent.mkdir(exist_ok=True)
        storage.write_bytes_atomic(file, data)
    except OSError as reason:
        return f"not written: {reason.strerror}"
    return f"written to {file}"


def environment() -> dict[str, Any]:
    """Return the versions and the machine that results depend on."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": versions,
    }


def _unwritable(run: Path, reason: OSError) -> ConfigError:
    return ConfigError(
        f"{run}: got {reason.strerror or reason}, expected a folder that can be written; "
        "fix its permissions or choose another --run"
    )
