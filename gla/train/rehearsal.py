"""One batch before step 1: does it fit into memory, and if not, what would?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gla.errors import ConfigError
from gla.train.optim import moment_bytes


def rehearse(
    run: Callable[[int], object],
    rows: int,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Compute a gradient, with room for the optimizer's moments. Nothing is learned.

    Args:
        run: Computes and drops the gradient of a batch of so many rows.
        rows: Of a micro-batch.
        optimizer: Its moments are made by the first update.
        device: Where the model is.

    Raises:
        ConfigError: Memory does not suffice; names the largest micro-batch that fits.
    """
    if _fits(run, rows, optimizer, device):
        return
    smaller = [r for r in range(rows - 1, 0, -1) if rows % r == 0]
    fitting = next((r for r in smaller if _fits(run, r, optimizer, device)), None)
    if fitting is None:
        raise ConfigError(
            f"train.micro_batch_size: got {rows}, and not even a single row fits into the memory "
            f"of {device}; fix with a smaller model or train.seq_len, or with "
            "--train.activation_checkpointing true"
        )
    raise ConfigError(
        f"train.micro_batch_size: got {rows}, for which the memory of {device} does not suffice, "
        f"expected at most {fitting}; fix with --train.micro_batch_size {fitting}, which gives the "
        "same updates"
    )


def _fits(
    run: Callable[[int], object], rows: int, optimizer: torch.optim.Optimizer, device: torch.device
) -> bool:
    missing = 0 if optimizer.state else moment_bytes(optimizer)
    try:
        room = torch.empty(missing, dtype=torch.uint8, device=device)
        run(rows)
        del room
    except (torch.OutOfMemoryError, MemoryError):
        fits = False
    except RuntimeError as reason:
        if "not enough memory" not in str(reason):  # what the CPU's allocator says
            raise
        fits = False
    else:
        fits = True
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return fits
