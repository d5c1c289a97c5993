"""What a model carries from one token to the next: typed, explicit, passed and returned.

A state is a NamedTuple of tensors, None and further states. Every tensor has the sequences in its
first dimension. A state is never changed by the call that reads it: the same state may be read
twice, kept, and continued in two ways.

Sizes: N sequences, H heads, K key dimension, V value dimension.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, Union, cast

import safetensors
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from gla import storage
from gla.errors import StateError

FORMAT = 1


class LinearState(NamedTuple):
    """State of the recurrence, fp32 (fp64 for fp64 inputs).

    Attributes:
        S: [N, H, K, V] the matrix state.
        z: [N, H, K] the decayed sum of keys when normalizing, else None.
    """

    S: Tensor
    z: Tensor | None = None


# What a mixer carries: any NamedTuple built from these.
LayerState: TypeAlias = tuple[Union[Tensor, "LayerState", None], ...]


class ModelState(NamedTuple):
    """State of a language model.

    Attributes:
        layers: one state a block, as its mixer defines it.
        position: [N] int64, tokens read so far by each sequence.
    """

    layers: tuple[LayerState, ...]
    position: Tensor


State = TypeVar("State", bound=tuple)


def map_tensors(state: State, fn: Callable[[Tensor], Tensor]) -> State:
    """Return the state with ``fn`` applied to every tensor, for example ``torch.Tensor.detach``."""
    return cast(State, _map(state, "", lambda name, x: fn(x)))


def select(state: State, rows: Tensor | Sequence[int]) -> State:
    """Return the state of the given sequences, copied, in the given order; repeats are allowed.

    Args:
        state: state of N sequences.
        rows: [M] integers from 0 to N - 1.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    return map_tensors(state, lambda x: x.index_select(0, index.to(x.device)))


def concatenate(states: Sequence[State]) -> State:
    """Return one state of all sequences of the given ones, copied, in their order.

    Where caches differ in capacity, the smaller ones get room at the end.

    Args:
        states: at least one, all of the same model.
    """
    columns = zip(*(tensors(state) for state in states), strict=True)
    joined = (torch.cat(_equal_sizes(column)) for column in columns)
    return map_tensors(states[0], lambda x: next(joined))


def _equal_sizes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pad tensors with zeros at the end, in all dimensions but the first, to the largest size."""
    largest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in tensors), strict=True)]
    padded = []
    for x in tensors:
        pad = [n for size, have in zip(largest, x.shape[1:], strict=True) for n in (size - have, 0)]
        padded.append(torch.nn.functional.pad(x, pad[::-1]) if any(pad) else x)
    return padded


def nbytes(state: tuple) -> int:
    """Bytes that the tensors of a state take."""
    return sum(x.numel() * x.element_size() for x in tensors(state))


def tensors(state: tuple) -> list[Tensor]:
    """Every tensor of a state, in the order in which ``map_tensors`` meets them."""
    return [x for _, x in named_tensors(state)]


def named_tensors(state: tuple) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its place, for example ("layers.0.recurrent.S", S)."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, x: Tensor) -> Tensor:
        found.append((name, x))
        return x

    _map(state, "", note)
    return iter(found)


def save(state: tuple, path: str | Path, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a state as one safetensors file: whole, or not at all.

    Args:
        state: any state; its dtypes are kept.
        path: the file, replaced if it exists.
        metadata: whatever JSON can hold; returned by ``load``.

    Raises:
        StateError: the file cannot be written; an older one is untouched.
    """
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in named_tensors(state)}
    header = json.dumps(metadata or {}, sort_keys=True)
    description = {
        "format": str(FORMAT),
        "metadata": header,
        "sha256": _digest(tensors, header),
    }
    with storage.refused_writes(Path(path), StateError):
        storage.write_bytes_atomic(path, to_bytes(tensors, description))


def load(
    path: str | Path, like: State, device: str | torch.device = "cpu"
) -> tuple[State, dict[str, Any]]:
    """Read a state written by ``save``.

    Args:
        path: the file.
        like: a state of the same build, for example ``model.init_state(1)``. The number of
            sequences may differ, and a size of 0 in it stands for any size.
        device: where the tensors go.

    Returns:
        The state and the metadata given to ``save``.

    Raises:
        StateError: no such file, a file cut short or changed by a single bit, or one that does not
            have the tensors and shapes of ``like``.
    """
    tensors, description = _read(path)
    header = description.get("metadata", "")
    if description.get("format") != str(FORMAT):
        found = description.get("format")
        raise StateError(f"{path}: got format {found}, expected {FORMAT}; fix by saving it again")
    if description.get("sha256") != _digest(tensors, header):
        raise StateError(
            f"{path}: got contents that differ from their SHA-256, expected the file as saved; "
            "fix by restoring it from a copy"
        )
    _check_fit(path, tensors, dict(named_tensors(like)))
    state = _map(like, "", lambda name, x: tensors[name].to(device))
    return cast(State, state), json.loads(header)


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            description = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, description
    except FileNotFoundError:
        raise StateError(f"{path}: got no file, expected a saved state; fix the path") from None
    except (OSError, ValueError, safetensors.SafetensorError) as reason:
        raise StateError(
            f"{path}: got an unreadable file ({reason}), expected a saved state; "
            "fix by restoring it from a copy"
        ) from reason


def _check_fit(path: str | Path, got: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    fix = "fix by loading it with the model that wrote it"
    if got.keys() != like.keys():
        name = min(got.keys() ^ like.keys())
        which = "an extra" if name in got else "no"
        raise StateError(f"{path}: got {which} tensor {name}, expected {len(like)} others; {fix}")
    rows = {x.shape[0] for x in got.values() if x.dim()}
    if len(rows) > 1:
        raise StateError(f"{path}: got tensors of {sorted(rows)} sequences, expected one; {fix}")
    for name, x in got.items():
        wanted = like[name].shape
        fits = x.dim() == len(wanted) and all(
            b in (0, a) for a, b in zip(x.shape[1:], wanted[1:], strict=True)
        )
        if not fits or x.dtype.is_floating_point != like[name].dtype.is_floating_point:
            raise StateError(
                f"{path}: got {name} {list(x.shape)} {x.dtype}, expected {list(wanted)} "
                f"{like[name].dtype}; {fix}"
            )


def _digest(tensors: Mapping[str, Tensor], header: str) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"\n{name} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _map(state: Any, name: str, fn: Callable[[str, Tensor], Tensor]) -> Any:
    if state is None:
        return None
    if isinstance(state, Tensor):
        return fn(name, state)
    prefix = f"{name}." if name else ""
    fields = getattr(state, "_fields", range(len(state)))
    parts = [_map(part, f"{prefix}{field}", fn) for field, part in zip(fields, state, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
