"""Compile the kernels for GPUs that are not here; fail on a spill or on too much shared memory.

    python tools/compile_kernels.py [--targets 80,90,100,120,gfx942] [--cases TEXT] [--json FILE]

The launchers of ``gla_kernels`` run against a pretended GPU, so that what is compiled is exactly
what a call would use; nothing is executed. Registers and spills are those ptxas reports.
Instruction counts are of the PTX: places in the code, not executions; serial: ptxas says that the
kernel's wgmma wait for each other. Spills count as a failure at K = V of 64 and 128 on sm_80, sm_90
and sm_100; needs no GPU and no driver.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))

import triton
from gla_kernels import launch
from gla_kernels.convolution import short_convolution
from gla_kernels.cross_entropy import cross_entropy
from gla_kernels.norm_gate import norm_gate
from gla_kernels.ops import chunkwise
from gla_kernels.support import Device
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

DEVICES = {
    "80": Device("A100", (8, 0), 166912, 108),
    "90": Device("H100", (9, 0), 232448, 132),
    "100": Device("B200", (10, 0), 232448, 148),
    "120": Device("a 99 KB consumer card", (12, 0), 101376, 84),
    "gfx942": Device("MI300X", (0, 0), 65536, 304),
}
NO_SPILLS = ("80", "90", "100")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COUNTS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync|v_mfma",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]",
    "ex2": r"ex2\.approx|v_exp_f32",
}


class PretendedDriver:
    """The part of Triton's driver that compiling asks for."""

    def __init__(self, target: str) -> None:
        amd = target.startswith("gfx")
        self.name = target
        self.target = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return list(DEVICES).index(self.name)  # kernels are kept by the number of their device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    @staticmethod
    def is_active() -> bool:
        return True


@contextlib.contextmanager
def pretending(target: str) -> Iterator[list[dict[str, Any]]]:
    """Within the block every launch is compiled for ``target`` and recorded, none executed."""
    rows: list[dict[str, Any]] = []
    run, device_of = JITFunction.run, launch.device_of
    active = triton.runtime.driver._active

    def compile_only(self, *args, grid, warmup, **options):
        log, start = io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        if log.getvalue() or target.startswith("gfx"):
            seconds = time.perf_counter() - start
            rows.append(_row(self.__name__, target, kernel, log.getvalue(), seconds))

    triton.runtime.driver.set_active(PretendedDriver(target))
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    JITFunction.run = compile_only
    launch.device_of = lambda _: DEVICES[target]
    try:
        yield rows
    finally:
        JITFunction.run, launch.device_of = run, device_of
        triton.runtime.driver._active = active


def _row(name: str, target: str, kernel: Any, log: str, seconds: float) -> dict[str, Any]:
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]

    def total(pattern: str, where: str) -> int:
        return sum(int(n) for n in re.findall(pattern, where))

    if target.startswith("gfx"):
        registers = total(r"\.vgpr_count:\s+(\d+)", text)
        spills = 4 * total(r"\.vgpr_spill_count:\s+(\d+)", text)
    else:
        registers = total(r"Used (\d+) registers", log)
        spills = total(r"(\d+) bytes spill (?:stores|loads)", log)
    row = {"kernel": name, "target": target, "registers": registers, "spills": spills}
    row |= {
        "shared": kernel.metadata.shared,
        "fits": kernel.metadata.shared <= DEVICES[target].shared,
    }
    row |= {what: len(re.findall(pattern, text)) for what, pattern in COUNTS.items()}
    row["serial"] = log.count("(C7515)")  # wgmma that ptxas makes wait for each other
    row["warps"], row["seconds"] = kernel.metadata.num_warps, round(seconds, 2)
    return row


@dataclass(frozen=True)
class Case:
    """One way to call the op; gates: none, fixed, head or channel."""

    K: int
    V: int
    gate: str = "channel"
    dtype: str = "bf16"
    packed: bool = False
    normalized: bool = False  # one more value channel, and values in fp32
    gate_dtype: str = ""  # where it is not that of the call

    def __str__(self) -> str:
        more = " packed" * self.packed + " normalizer" * self.normalized
        more += self.gate_dtype and f" gates {self.gate_dtype}"
        return f"{self.K}x{self.V} {self.gate} {self.dtype}{more}"


# Those of the budget first.
CASES = (
    *(Case(D, D, gate) for D in (128, 64) for gate in ("none", "fixed", "head", "channel")),
    Case(128, 128, packed=True),
    Case(64, 128),
    Case(256, 256),
    *(
        Case(D, D, gate, **more)
        for D in (64, 128)
        for gate in ("channel", "head", "none")
        for more in ({"normalized": True}, {"dtype": "fp16"}, {"dtype": "fp32"})
    ),
    *(Case(D, D, gate, gate_dtype="fp32") for D in (64, 128) for gate in ("channel", "head")),
)


def _norm_and_gate(dtype: torch.dtype, V: int) -> None:
    x, z, weight = (torch.empty(*shape, V, dtype=dtype) for shape in ((64, 2), (64, 2), ()))
    y = norm_gate(x.requires_grad_(), z, weight.float(), 1e-5)
    y.backward(z)


def _convolution(dtype: torch.dtype, V: int) -> None:
    weight = torch.empty(4, 6 * V)
    for T, cu in ((1024, None), (1024, torch.tensor([0, 500, 1024])), (1, None)):
        x = torch.empty(1, T, 6 * V, dtype=dtype)
        state = torch.empty(1 if cu is None else 2, 3, 6 * V)
        leaves = x if T == 1 else x.requires_grad_()
        y, _ = short_convolution(leaves, weight, state, cu)
        if T > 1:
            y.backward(x.detach())


def _loss(dtype: torch.dtype, V: int) -> None:
    for vocabulary, gradient in ((32768, True), (32768, False), (50257, True)):
        logits = torch.empty(64, vocabulary, dtype=dtype)
        cross_entropy(logits, torch.zeros(64, dtype=torch.int64), -100, gradient)


# What lies beside the op: name -> calls for a dtype and a head's values.
BESIDE = {"norm and gate": _norm_and_gate, "convolution": _convolution, "loss": _loss}


def compile_case(target: str, case: Case) -> list[dict[str, Any]]:
    """Compile all launches of one call: forward, backward, one pass, segmented, decoding."""
    B, T, H, dtype = 1, 1024, 2, DTYPES[case.dtype]
    q, k = (torch.empty(B, T, H, case.K, dtype=dtype) for _ in range(2))
    values = torch.float32 if case.normalized else dtype
    V = case.V + case.normalized
    v, do = (torch.empty(B, T, H, V, dtype=values) for _ in range(2))
    shapes = {"none": None, "fixed": (H,), "head": (B, T, H), "channel": (B, T, H, case.K)}
    shape = shapes[case.gate]
    g = None if shape is None else torch.empty(shape, dtype=DTYPES[case.gate_dtype or case.dtype])
    cu = torch.tensor([0, 500, T]) if case.packed else None
    with pretending(target) as rows:
        for how, segment in (("one pass", T), ("segmented", 512)):
            before, call = len(rows), (q, k, v, g, None, cu, 1.0, segment)
            _, _, bounds = chunkwise(*call)
            torch.ops.gla_kernels.chunkwise_backward(*call, bounds, do, None)
            for row in rows[before:]:
                row["of"] = how
        before, one = len(rows), slice(0, 1)
        if not case.packed:
            token = g[:, one] if g is not None and g.dim() > 1 else g
            state = torch.empty(1, H, case.K, V)
            chunkwise(q[:, one], k[:, one], v[:, one], token, state, None, 1.0)
        for row in rows[before:]:
            row["of"] = "decoding"
        alone = case.gate == "none" and not case.normalized  # they change nothing here
        for name, calls in BESIDE.items() if alone else ():
            before = len(rows)
            calls(dtype, case.V)
            for row in rows[before:]:
                row["of"] = name
    return [row | {"call": str(case)} for row in rows]


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What must not be: spills, too much shared memory, products without tensor cores."""
    found = []
    for row in rows:
        where = f"{row['kernel']} ({row['call']}, {row['of']}) on {row['target']}"
        held = row["call"].startswith(("64x64 ", "128x128 "))
        if row["spills"] and row["target"] in NO_SPILLS and held:
            found.append(f"{where}: {row['spills']} bytes of spills")
        if not row["fits"]:
            found.append(f"{where}: {row['shared']} bytes of shared memory")
        multiplies = row["kernel"] in ("sweep_kernel", "gradients_kernel")
        if multiplies and not (row["wgmma"] or row["mma"] or row["tcgen05"]):
            found.append(f"{where}: no tensor-core instruction")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    names = ["call", "kernel", "of", "target", "warps", "registers", "spills", "shared"]
    names += [*COUNTS, "serial", "seconds"]
    body = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in body) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in body
    )


def first_use(rows: list[dict[str, Any]]) -> str:
    """Kernels and compile time of forward and backward, for the first call and target of rows."""
    mine = [r for r in rows if all(r[x] == rows[0][x] for x in ("call", "target"))]
    # A pass whose kernels were compiled for the one before takes them from there.
    parts = {
        how: [r["seconds"] for r in mine if r["of"] == how] for how in ("one pass", "segmented")
    }
    parts["both"] = [seconds for part in parts.values() for seconds in part]
    lines = [
        f"first use, {how}, {rows[0]['call']} on {rows[0]['target']}: {len(part)} kernels, "
        f"{sum(part):.1f} s"
        for how, part in parts.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--targets", default=",".join(DEVICES))
    names = "\n".join(str(case) for case in CASES)
    parser.add_argument(
        "--cases", default="", help=f"only cases whose name contains this, of:\n{names}"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [case for case in CASES if options.cases in str(case)]
    if not cases:
        parser.error(f"--cases: got {options.cases!r}, expected part of a name that --help lists")
    targets = options.targets.split(",")
    if unknown := set(targets) - set(DEVICES):
        parser.error(f"--targets: got {', '.join(unknown)}, expected some of {', '.join(DEVICES)}")
    rows = [row for target in targets for case in cases for row in compile_case(target, case)]
    print(table(rows))
    print(f"Triton {triton.__version__}, torch {torch.__version__}")
    print(first_use(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    found = faults(rows)
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
