"""What lies beside the op, in kernels and in torch: norm and output gate, convolution, loss.

    python tools/beside.py

counts the bytes that each way moves for a token, forward and backward, and its launches: of the
kernels distinct bytes read and written, in Triton's interpreter; of torch, run eagerly, the bytes
of the tensors that each operation reads and writes, once each. "Asked for" counts what a program
reads again, from the nearest cache. Of the loss what lies between its matrix products. The sum over
programs of a weight's gradient, which torch does, is left out.

``tools/gpu_report.py`` takes the same parts for parity and times.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gla.layers.norms import RMSNorm  # noqa: E402
from gla.layers.short_convolution import ShortConvolution  # noqa: E402
from gla.models import loss as losses  # noqa: E402
from gla.testing import error, limit  # noqa: E402

WIDTH = 4
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Part:
    """One part in bf16, weights of layers in fp32.

    Attributes:
        run: results by the kernels, or by torch, from the leaves.
        exact: the same from leaves in fp64.
        leaves: what has a gradient.
        upstream: gradients of the results.
    """

    run: Callable[[bool], list[Tensor]]
    exact: Callable[..., list[Tensor]]
    leaves: list[Tensor]
    upstream: list[Tensor]

    def both(self, fused: bool) -> tuple[Tensor, ...]:
        """Results and gradients."""
        results = self.run(fused)
        return *results, *torch.autograd.grad(results, self.leaves, self.upstream)

    def errors(self) -> dict[str, float]:
        """Error over limit of each result and gradient of the kernels, in order."""
        wide = [x.detach().double().requires_grad_() for x in self.leaves]
        results = self.exact(*wide)
        grads = torch.autograd.grad(results, wide, [x.double() for x in self.upstream])
        wanted = (*results, *grads)
        return {
            f"{i}": error(got, want) / limit(BF16, gradient=i >= len(results))
            for i, (got, want) in enumerate(zip(self.both(True), wanted, strict=True))
        }


def parts(device: str, small: bool) -> dict[str, Part]:
    """name -> part; ``small``: for the interpreter."""
    import gla_kernels.ops  # noqa: F401

    tokens, channels = (256, 64) if small else (4096, 3072)
    norm, conv = RMSNorm(64 if small else 128), ShortConvolution(channels, WIDTH)
    norm, conv = norm.to(device), conv.to(device)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=BF16)

    heads = (tokens if small else 4 * tokens, 1 if small else 16, norm.weight.shape[0])
    x, z = draw(*heads).requires_grad_(), draw(*heads).requires_grad_()
    u = draw(1 if small else 4, tokens, channels).requires_grad_()
    h = draw(300 if small else tokens, 64 if small else 1024).requires_grad_()
    w = (draw(500 if small else 50304, h.shape[1]) / h.shape[1] ** 0.5).requires_grad_()
    targets = torch.randint(w.shape[0], h.shape[:1], device=device)

    def convolved(u: Tensor, weight: Tensor) -> list[Tensor]:
        padded = F.pad(u.transpose(1, 2), (WIDTH - 1, 0))
        y = F.conv1d(padded, weight.T.unsqueeze(1), groups=channels)
        return [F.silu(y).transpose(1, 2)]

    return {
        "norm and gate": Part(
            lambda fused: [norm.gated(x, z, fused)],
            lambda x, z, w: [F.rms_norm(x, w.shape, w, norm.eps) * F.silu(z)],
            [x, z, norm.weight],
            [draw(*heads)],
        ),
        "convolution": Part(
            lambda fused: [conv(u, None, None, fused)[0]],
            convolved,
            [u, conv.weight],
            [draw(*u.shape)],
        ),
        "loss": Part(
            lambda fused: [losses.linear_cross_entropy(h, w, targets, -100, fused)],
            lambda h, w: [F.cross_entropy(h @ w.T, targets, reduction="sum")],
            [h, w],
            [torch.ones((), device=device)],
        ),
    }


class Bytes(TorchDispatchMode):
    """Bytes that torch's operations read and write, and how many operations there are."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        results = func._schema.returns
        moved = not name.startswith(("empty", "new_empty", "detach")) and not any(
            r.alias_info is not None and not r.alias_info.is_write for r in results
        )
        if moved and func.namespace == "aten":
            outputs = out if isinstance(out, tuple) else (out,)
            inputs = args[0] if name == "cat" else args
            if name == "gather":  # reads what it returns
                inputs = [args[2], out]
            if name.startswith("scatter_add"):
                inputs, outputs = [args[2], args[3], args[3]], [args[3]]
            self.total += sum(_size(x) for x in (*inputs, *outputs))
            self.count += 1
        return out


def _size(x: object) -> int:
    """Bytes of a tensor, those that an expanded one repeats counted once."""
    if not isinstance(x, Tensor):
        return 0
    repeats = [n if s else 1 for n, s in zip(x.shape, x.stride(), strict=True)]
    return torch.Size(repeats).numel() * x.element_size()


def _count(run: Callable[[], object], size: int, what: str) -> object:
    """Print the bytes that ``run`` moves, over ``size``; return its result."""
    from tools.count_traffic import Operations, counting

    with Bytes() as moved, counting(Operations()) as launches:
        result = run()
    if launches:
        total, count = sum(x.distinct() for x in launches), len(launches)
        asked = f" ({sum(x.requested for x in launches) / size:.1f} asked for)"
    else:
        total, count, asked = moved.total, moved.count, ""
    print(f"{what:40} {total / size:6.1f} B{asked}, launches: {count}")
    return result


def main() -> int:
    """Count and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    from tools import interpreter

    interpreter.fix_bf16()
    print("bytes a token and channel, and a logit")
    for name, part in parts("cpu", True).items():
        size = part.leaves[0].numel()
        for way, fused in (("torch", False), ("kernels", True)):
            if name == "loss":
                logits, targets = torch.randn(64, 4096, dtype=BF16), torch.randint(4096, (64,))
                op = torch.ops.gla_kernels.cross_entropy if fused else losses._cross_entropy
                chunk = (logits, targets, -100, True)
                _count(lambda o=op, c=chunk: o(*c), logits.numel(), f"{name}, {way}")
                continue
            results = _count(lambda p=part, f=fused: p.run(f), size, f"{name}, {way}, forward")
            _count(
                lambda p=part, r=results: torch.autograd.grad(r, p.leaves, p.upstream),
                size,
                f"{name}, {way}, backward",
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
