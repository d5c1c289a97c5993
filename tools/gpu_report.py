"""Everything that only a GPU can show, in one command.

    python tools/gpu_report.py [--quick] [--out benchmarks] [--dry-run]

1. Parity: o, the final state and every gradient against the loop in float64, for each dtype, gate
   and gate level, one pass and segmented forced in turn, T from 1 to 65,537 (long ones against the
   torch form in fp64), and an offset past 2**31.
2. Times: forward and forward + backward against SDPA (flash) and, where installed,
   flash-linear-attention, over the six published shapes, K = V of 64 and 128, and few heads; with
   the roofline of the bytes that must move and the device's measured copy bandwidth.
3. Decode steps at batch 1 to 256, the first call's compile time, peak memory.
4. Parity and times, beside torch's, of norm and gate, short convolution and loss.

Writes a dated JSON and a Markdown table, with hardware and versions, to the folder. Without a GPU
it says so and does nothing; ``--dry-run`` goes through every part in Triton's interpreter at tiny
sizes, where times mean nothing. Sizes: B rows, T tokens, H heads, K, V key and value dimension.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

# Triton looks at this when it is imported.
DRY = "--dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cpu" if DRY else "cuda"

PUBLISHED = (
    (1, 8192, 96, 128),
    (2, 16384, 16, 128),
    (4, 2048, 16, 128),
    (4, 4096, 64, 128),
    (8, 1024, 8, 64),
    (8, 2048, 32, 256),
)
FEW_HEADS = tuple((2, T, 4, 64) for T in (2048, 4096, 8192, 16384))
SHORT = tuple((8, T, 16, D) for T in (512, 1024, 2048) for D in (64, 128))
LEVELS = (None, 0.0, -1.0, -6.0, -20.0, -88.0, -1e4, -math.inf)
LENGTHS = (1, 2, 16, 17, 63, 64, 65, 127, 129, 1000)
LONG = (4095, 4096, 65535, 65536, 65537)


def parity_cases(quick: bool) -> Iterator[dict[str, Any]]:
    """Keywords of ``make_inputs``, and how to cut the sequence."""
    if DRY:
        small = dict(dtype=torch.bfloat16, heads=1, key_dim=16, value_dim=16)
        yield small | dict(tokens=130, segment=64)
        yield small | dict(offsets=[0, 3, 3, 70], tokens=70)
        return
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes[1:2] if quick else dtypes:
        for gate in ("none", "fixed", "head", "channel"):
            for level in LEVELS if gate != "none" else (None,):
                for pattern in (
                    ("constant", "half", "spikes") if level is not None else ("constant",)
                ):
                    for segment in (None, 64):
                        yield dict(
                            dtype=dtype, gate=gate, level=level, pattern=pattern, segment=segment
                        )
        for K, V in ((16, 32), (64, 64), (100, 80), (128, 128), (256, 64), (256, 256)):
            yield dict(dtype=dtype, key_dim=K, value_dim=V)
        for T in LENGTHS:
            yield dict(dtype=dtype, tokens=T)
        yield dict(dtype=dtype, heads=4, kv_heads=2)
        yield dict(dtype=dtype, offsets=[0, 3, 3, 70, 150], tokens=150, segment=64)


def parity(case: dict[str, Any]) -> dict[str, float]:
    """Error over limit of each result of one case."""
    from gla_kernels.ops import chunkwise
    from oracle import recurrence

    from gla.testing import error, limit, make_inputs

    case = dict(case)
    segment, offsets = case.pop("segment", None), case.pop("offsets", None)
    sizes = dict(batch=1, tokens=150, heads=2, key_dim=64, value_dim=64) | case
    rows = None if offsets is None else len(offsets) - 1
    inputs = make_inputs(**sizes, sequences=rows, device=DEVICE)
    assert inputs.initial_state is not None
    tensors = dict(q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.log_decay, S=inputs.initial_state.S)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items() if x is not None}
    wide = {n: x.detach().double().cpu().requires_grad_() for n, x in leaves.items()}
    cu = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    names = ("q", "k", "v", "g", "S")
    o, S, _ = chunkwise(*(leaves.get(n) for n in names), cu, 0.3, segment)  # type: ignore[arg-type]
    expected = recurrence(
        *(wide.get(n) for n in names),  # type: ignore[arg-type]
        scale=0.3,
        cu_seqlens=None if cu is None else cu.cpu(),
    )
    do, dS = torch.randn_like(o), torch.randn_like(S)
    grads = torch.autograd.grad([o, S], list(leaves.values()), [do, dS])
    wanted = torch.autograd.grad(
        [expected.o, expected.S], list(wide.values()), [do.double().cpu(), dS.double().cpu()]
    )
    dtype = inputs.q.dtype
    errors = {"o": error(o, expected.o) / limit(dtype), "S_T": error(S, expected.S) / limit(dtype)}
    for name, grad, reference in zip(leaves, grads, wanted, strict=True):
        errors["d" + name] = error(grad, reference) / limit(dtype, gradient=True)
    return errors


def long_parity(T: int, segment: int | None) -> dict[str, float]:
    """bf16 at length T against the torch form in fp64."""
    from gla_kernels.ops import chunkwise

    import gla
    from gla.testing import error, limit, make_inputs

    D = 16 if DRY else 64
    inputs = make_inputs(1, T, 2, D, D, dtype=torch.bfloat16, state=False, device=DEVICE)
    leaves = [x.requires_grad_() for x in inputs[:4] if x is not None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    o, S, _ = chunkwise(*leaves, None, None, 0.125, segment)
    expected = gla.gated_linear_attention(*wide, scale=0.125, impl="torch")
    do, dS = torch.randn_like(o), torch.randn_like(S)
    grads = torch.autograd.grad([o, S], leaves, [do, dS])
    wanted = torch.autograd.grad(
        [expected.o, expected.final_state.S], wide, [do.double(), dS.double()]
    )
    errors = {"o": error(o, expected.o) / limit(torch.bfloat16)}
    for name, grad, reference in zip("qkvg", grads, wanted, strict=True):
        errors["d" + name] = error(grad, reference) / limit(torch.bfloat16, gradient=True)
    return errors


def far_offset() -> dict[str, float]:
    """The last head of tensors with more than 2**31 elements against that head alone."""
    from gla_kernels.ops import chunkwise

    from gla.testing import error, limit

    B, T, H, D = (1, 70, 2, 16) if DRY else (1, 65600, 256, 128)
    q, k, v, g = (torch.randn(B, T, H, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    g = F.logsigmoid(g) / 16
    o, S, _ = chunkwise(q, k, v, g, None, None, 0.1)
    last = (x[:, :, -1:].contiguous() for x in (q, k, v, g))
    alone, S_alone, _ = chunkwise(*last, None, None, 0.1)
    allowed = limit(torch.bfloat16)
    return {"o": error(o[:, :, -1:], alone) / allowed, "S_T": error(S[:, -1:], S_alone) / allowed}


def beside(report: dict[str, Any]) -> None:
    """Add parity and times of what lies beside the op: norm and gate, convolution, loss; bf16."""
    from tools.beside import parts

    report["beside ms"] = {}
    for name, part in parts(DEVICE, DRY).items():
        report["parity"][name] = part.errors()
        report["beside ms"][name] = {
            way: milliseconds(lambda p=part, f=fused: p.both(f))
            for way, fused in (("kernel", True), ("torch", False))
        }


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call, with the L2 cache flushed before each."""
    if DRY:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy."""
    x = torch.empty(1 << (20 if DRY else 30), dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.numel() / (milliseconds(lambda: y.copy_(x)) / 1e3)


def contenders() -> dict[str, Callable[..., torch.Tensor]]:
    """name -> function of (q, k, v, g) [B, T, H, D] that returns o."""
    from gla_kernels.ops import chunkwise

    def flash(q, k, v, _):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = {
        "ours": lambda q, k, v, g: chunkwise(q, k, v, g, None, None, 0.1)[0],
        "flash SDPA": flash,
    }
    try:
        from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]
    except ImportError:
        print("flash-linear-attention: not installed, left out")
    else:
        found["fla"] = lambda q, k, v, g: chunk_gla(q, k, v, g)[0]
    return found


def times(shape: tuple[int, int, int, int], bandwidth: float) -> dict[str, Any]:
    """Times of all contenders at one shape in bf16, the roofline, and peak memory."""
    B, T, H, D = shape
    q, k, v, g = (torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v, F.logsigmoid(g).detach() / 16)]
    do = torch.randn_like(v)
    must_move = 2 * D * B * T * H * (5 + 9)
    row: dict[str, Any] = {"shape": shape, "roofline ms": must_move / bandwidth * 1e3}
    for name, run in contenders().items():
        # Attention has no gate, and its output has heads before tokens.
        gated = name != "flash SDPA"
        inputs, upstream = (leaves, do) if gated else (leaves[:3], do.transpose(1, 2))

        def both(run=run, inputs=inputs, upstream=upstream):
            return torch.autograd.grad(run(*leaves), inputs, upstream)

        try:
            if not DRY:
                torch.cuda.reset_peak_memory_stats()
            with torch.no_grad():
                forward = milliseconds(lambda run=run: run(*leaves))
            row[name] = {"forward ms": forward, "both ms": milliseconds(both)}
            if not DRY:
                row[name]["peak MB"] = torch.cuda.max_memory_allocated() / 1e6
        except RuntimeError as e:  # a contender may not take the shape
            row[name] = {"refused": str(e).splitlines()[0]}
    return row


def decode(batch: int) -> float:
    """Milliseconds of one token's step at H 16, K = V = 128."""
    from gla_kernels.ops import chunkwise

    H = 1 if DRY else 16
    q, k, v, g = (
        torch.randn(batch, 1, H, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)
    )
    state = torch.randn(batch, H, 128, 128, device=DEVICE)
    with torch.no_grad():
        return milliseconds(lambda: chunkwise(q, k, v, -g.abs(), state, None, 0.1))


def first_call() -> float:
    """Seconds of a first forward and backward in this process."""
    from gla_kernels.ops import chunkwise

    T, D = (64, 16) if DRY else (512, 128)
    leaves = [torch.randn(1, T, 2, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    leaves = [x.requires_grad_() for x in (*leaves[:3], -leaves[3].abs())]
    start = time.perf_counter()
    chunkwise(*leaves, None, None, 0.1)[0].sum().backward()
    if not DRY:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def markdown(report: dict[str, Any]) -> str:
    lines = [f"# {report['device']}, {report['date']}", "", ", ".join(report["versions"]), ""]
    worst = max((max(e.values()) for e in report["parity"].values()), default=0.0)
    lines += [f"Parity: {len(report['parity'])} cases, worst error over limit {worst:.3f}", ""]
    lines += [
        "| shape | roofline | ours fwd | ours both | flash both | fla both |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["times"]:
        cells = ["×".join(map(str, row["shape"])), f"{row['roofline ms']:.3f}"]
        for name, which in (
            ("ours", "forward ms"),
            ("ours", "both ms"),
            ("flash SDPA", "both ms"),
            ("fla", "both ms"),
        ):
            value = row.get(name, {}).get(which)
            cells.append("–" if value is None else f"{value:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| batch | decode step, ms |", "|---|---|"]
    lines += [f"| {batch} | {ms:.3f} |" for batch, ms in report["decode"].items()]
    lines += ["", "| forward + backward | kernel, ms | torch, ms |", "|---|---|---|"]
    lines += [
        f"| {name} | {ms['kernel']:.3f} | {ms['torch']:.3f} |"
        for name, ms in report["beside ms"].items()
    ]
    return "\n".join([*lines, "", f"First call: {report['first call s']:.1f} s", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="bf16 parity and the published shapes only"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--dry-run", action="store_true", help="interpreted, at tiny sizes")
    options = parser.parse_args()
    if DRY:
        from tools import interpreter

        interpreter.fix_bf16()
    elif not torch.cuda.is_available():
        print("no GPU here: nothing to report", file=sys.stderr)
        return 1
    import triton

    report: dict[str, Any] = {
        "device": "Triton's interpreter" if DRY else torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": [f"torch {torch.__version__}", f"Triton {triton.__version__}"],
        "first call s": first_call(),
    }
    report["parity"] = {str(case): parity(case) for case in parity_cases(options.quick)}
    lengths = (130,) if DRY else (LONG[:2] if options.quick else LONG)
    for T in lengths:
        for segment in (None, 64 if DRY else 256):
            report["parity"][f"T {T}, segment {segment}"] = long_parity(T, segment)
    if not options.quick:
        report["parity"]["offsets past 2**31"] = far_offset()
    beside(report)
    report["copy bandwidth"] = copy_bandwidth()
    shapes = PUBLISHED if options.quick else PUBLISHED + FEW_HEADS + SHORT
    shapes = ((1, 70, 1, 16),) if DRY else shapes
    report["times"] = [times(shape, report["copy bandwidth"]) for shape in shapes]
    report["decode"] = {batch: decode(batch) for batch in ((1,) if DRY else (1, 4, 16, 64, 256))}
    options.out.mkdir(exist_ok=True)
    stem = (
        options.out
        / f"{report['date']}-{report['device'].lower().replace(' ', '-').replace(chr(39), '')}"
    )
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1))
    stem.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    wrong = {case: e for case, e in report["parity"].items() if not max(e.values()) <= 1}
    print("\n".join(f"wrong: {case}: {e}" for case, e in wrong.items()), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
