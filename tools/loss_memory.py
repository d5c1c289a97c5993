"""Peak memory of loss and backward pass over a large vocabulary, against the way of full logits.

    python tools/loss_memory.py                # 8,192 tokens, 50,000 pieces, width 512

Each way runs in a process of its own; what counts is how far its peak rises above what it held
before. Prints both, their ratio, and the largest difference of loss and gradients.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from gla.models.loss import linear_cross_entropy


def measure(way: str, tokens: int, vocab: int, width: int, out: Path) -> int:
    """Run one way in a forked process; return the bytes by which its peak memory rose."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        h = torch.randn(tokens, width, requires_grad=True)
        weight = (0.02 * torch.randn(vocab, width)).requires_grad_()
        targets = torch.randint(vocab, (tokens,))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if way == "full":
            loss = F.cross_entropy(h @ weight.T, targets, reduction="sum")
        else:
            loss = linear_cross_entropy(h, weight, targets, -100)
        (loss / tokens).backward()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert h.grad is not None and weight.grad is not None
        tensors = {"loss": loss.detach() / tokens, "h": h.grad, "weight": weight.grad}
        save_file(tensors, out / f"{way}.safetensors")
        os.write(writer, str((after - before) * 1024).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        size = int(pipe.read())
    os.waitpid(pid, 0)
    return size


def main() -> int:
    """Measure both ways and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        sizes = {
            way: measure(way, options.tokens, options.vocab, options.width, out)
            for way in ("chunks", "full")
        }
        ours, theirs = (load_file(out / f"{way}.safetensors") for way in ("chunks", "full"))
    for way, size in sizes.items():
        print(f"{way:<8}{size / 2**20:10,.0f} MiB")
    print(f"ratio   {sizes['full'] / sizes['chunks']:10.1f}")
    for key, tensor in theirs.items():
        difference = float((ours[key] - tensor).abs().max() / tensor.abs().max())
        print(f"{key:<8}differs by {difference:.1e} of its largest value")
    return 0


if __name__ == "__main__":
    sys.exit(main())
