"""Several processes that train one model: each computes a share of every batch, all add up.

Started by ``torchrun -m gla train …``, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. Every process holds all weights; gradients are sums over targets, so that the result
does not depend on the number of processes beyond rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import gla.errors
from gla.errors import DistributedError

_BUCKET_NUMBERS = 1 << 23  # gradients added up at a time: 32 MiB in fp32
_ANSWER_SECONDS = 2  # given to the other processes to say that they are alive
_DETAIL = 600  # characters of torch's own message


def is_main() -> bool:
    """Return whether this process is the one that writes files and results."""
    return os.environ.get("RANK", "0") == "0"


class Ranks:
    """The processes of a run, as one of them sees them. One alone is ``Ranks()``.

    Attributes:
        rank: Of this process, from 0. Rank 0 writes files.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self._device = device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up a few numbers over all processes, in fp64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        with self._named():
            dist.all_reduce(total)
        return total.tolist()

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors of one dtype over all processes, in place."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        for tensor in tensors:
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET_NUMBERS:
                self._sum_bucket(bucket)
                bucket = []
            bucket.append(tensor)
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([t.reshape(-1) for t in bucket])
        with self._named():
            dist.all_reduce(flat)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def gather(self, tensor: Tensor) -> Tensor:
        """Put the tensors of all processes together along their first dimension, by rank."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._named():
            dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def first(self, action: Callable[[], object]) -> None:
        """Let rank 0 do something, however long it takes, while the others wait."""
        if self.size == 1:
            action()
            return
        store = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            action()
            store.set("gla/first", "done")
            return
        with self._named():
            store.wait(["gla/first"], timedelta(days=7))

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Make sure that all processes agree, for example on their recipe.

        Raises:
            DistributedError: Names what differs, and a process that differs from rank 0.
        """
        if self.size == 1:
            return
        digests = b"".join(hashlib.sha256(text.encode()).digest() for text in facts.values())
        ours = torch.frombuffer(bytearray(digests), dtype=torch.uint8).clone()
        all_digests = self.gather(ours.to(self._device)).cpu().view(self.size, len(facts), -1)
        for i, name in enumerate(facts):
            for rank in range(self.size):
                if not torch.equal(all_digests[rank, i], all_digests[0, i]):
                    raise DistributedError(
                        f"{name}: got another one on rank {rank} than on rank 0, expected the "
                        "same on all; fix by starting all processes from the same files"
                    )

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an error of the process group into ours, with the ranks that do not answer."""
        try:
            yield
        except RuntimeError as reason:
            lost = self._lost()
            what = f"no answer from rank {', '.join(map(str, lost))}" if lost else "an error"
            detail = " ".join(str(reason).split())[:_DETAIL]
            raise DistributedError(
                f"process group: got {what} while adding up results ({detail}), expected all "
                f"{self.size} processes; fix the one that failed first and go on with gla resume"
            ) from reason

    def _lost(self) -> list[int]:
        """Return the ranks that do not say within two seconds that they had an error too."""
        store = dist.distributed_c10d._get_default_store()
        silent = set(range(self.size)) - {self.rank}

        def ask() -> None:
            store.set(f"gla/alive/{self.rank}", "yes")
            for rank in sorted(silent):
                with contextlib.suppress(dist.DistStoreError):
                    store.wait([f"gla/alive/{rank}"], timedelta(seconds=_ANSWER_SECONDS))
                    silent.discard(rank)

        def ask_or_fail() -> None:
            with contextlib.suppress(RuntimeError):
                ask()

        # Where the process that keeps the store hangs, so does the question.
        thread = threading.Thread(target=ask_or_fail, daemon=True)
        thread.start()
        thread.join(2 * _ANSWER_SECONDS + self.size)
        return [0] if thread.is_alive() and self.rank else sorted(silent)


@contextlib.contextmanager
def started(device: torch.device, timeout_s: int) -> Iterator[Ranks]:
    """Join the processes that torchrun started, or stand alone where it did not.

    Args:
        device: Of this process: gloo connects CPUs, nccl GPUs.
        timeout_s: Seconds after which a process that does not answer is lost.

    Raises:
        DistributedError: The environment is incomplete or wrong, or the port is taken.
    """
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    size, rank = _integer("WORLD_SIZE", 1, 1 << 20), _integer("RANK", 0, 1 << 20)
    if rank >= size:
        raise DistributedError(
            f"RANK: got {rank}, expected below WORLD_SIZE = {size}; fix by starting with torchrun"
        )
    if size == 1:
        yield Ranks()
        return
    port = _integer("MASTER_PORT", 1, 65535)
    address = os.environ.get("MASTER_ADDR", "")
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as reason:
        raise DistributedError(
            f"MASTER_ADDR, MASTER_PORT: got {address or 'nothing'}, {port}, where no process group "
            f"could start ({' '.join(str(reason).split())}), expected a free port of the first "
            "machine; fix by starting with torchrun, which chooses one"
        ) from reason
    # After an error this may hang, and the process ends anyway.
    try:
        yield Ranks(rank, size, device)
    except DistributedError:
        raise
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def local_device(name: str) -> str:
    """Return the device of this process: with torchrun, "cuda" or "auto" is its own GPU."""
    if "LOCAL_RANK" in os.environ and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{_integer('LOCAL_RANK', 0, 1 << 20)}"
    return name


def code_digest() -> str:
    """Return a digest of the source of gla and of the version of torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = Path(gla.errors.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _integer(name: str, low: int, high: int) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal() or not low <= int(text) <= high:
        raise DistributedError(
            f"{name}: got {text or 'nothing'!r} in the environment, expected a number from {low} "
            f"to {high}; fix by starting with torchrun"
        )
    return int(text)
