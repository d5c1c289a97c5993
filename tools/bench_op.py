"""Speed and memory of the op's torch form, as ratios measured side by side in one process.

    python tools/bench_op.py [--json] [--threads 2] [--seconds 2.5]

Each ratio is the best of several runs over the best of several runs, in two rounds. "products" are
the op's own matrix products alone, batched as a plain loop would: four forward, ten backward
(counted as 2.5 times the four). B 1, H 8, K = V = 64, fp32 unless a row says otherwise.
mlstm_kernels and the causal product of fast-transformers are measured where they can be imported,
and named where not; where products are compared with the time that a target leaves, 1 and more
means that the target leaves no time for anything else. ``tools/profile_op.py`` has the parts of the
op's time. Takes three to five minutes on two cores; each part is printed when measured.

Large outputs are memory new from the system at every call. With

    GLIBC_TUNABLES=glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483647

in the environment a process keeps what it frees, and no row pays for that; the row of peak memory
then shows nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gla
from gla.ops.memory import empty

H, K, C = 8, 64, 64

TARGETS = {
    "forward 16k, no gate / products": (1.35, "at most"),
    "forward 16k, channel gate / products": (1.9, "at most"),
    "forward + backward 16k, no gate / products": (1.4, "at most"),
    "forward + backward 16k, channel gate / products": (1.9, "at most"),
    "forward 64k / 8k": (8.8, "at most"),
    "forward + backward 64k / 8k": (8.8, "at most"),
    "memory of forward + backward 64k / inputs": (0.5, "at most"),
    "sdpa / channel gate, forward + backward 512": (1.0, "at least"),
    "sdpa / channel gate, forward + backward 8k": (12.0, "at least"),
    "bf16 / fp32, no gate, forward + backward 8k": (0.75, "at most"),
    "bf16 / fp32, channel gate, forward + backward 8k": (0.75, "at most"),
    "strong gates, forward + backward 8k / products": (5.0, "at most"),
    "training tokens/s, gated / softmax model, T 512": (1.0, "at least"),
    "training tokens/s, gated / softmax model, T 2048": (1.5, "at least"),
    "training tokens/s, gated / softmax model, T 8192": (3.0, "at least"),
    "mlstm_kernels / head gate, forward 8k": (4.0, "at least"),
    "mlstm_kernels / head gate, forward + backward 8k": (4.0, "at least"),
    "no gate / fast-transformers, forward 8k": (1.3, "at most"),
    "no gate / fast-transformers, forward + backward 8k": (1.3, "at most"),
    "no gate / fast-transformers, forward + backward 64k": (0.85, "at most"),
}


def best(*runs: Callable[[], Any], seconds: float) -> list[float]:
    """Shortest time of each run: two rounds, each run ``seconds`` / 2 on end after a warm-up.

    On end, so that one run does not find the caches and the memory as another left them; twice, so
    that a disturbance of one round does not decide.
    """
    shortest = [math.inf] * len(runs)
    for _ in range(2):
        for i, run in enumerate(runs):
            run()
            start = time.perf_counter()
            while shortest[i] == math.inf or time.perf_counter() - start < seconds / 2:
                before = time.perf_counter()
                run()
                shortest[i] = min(shortest[i], time.perf_counter() - before)
    return shortest


def inputs(T: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """q, k, v, log_decay [1, T, 8, 64]; ordinary gates: logsigmoid of N(0, 1), over 16."""
    q, k, v, g = (torch.randn(1, T, H, K) for _ in range(4))
    g = F.logsigmoid(g) / 16
    return [x.to(dtype).requires_grad_(grad) for x in (q, k, v, g)]


def op(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> Tensor:
    return gla.gated_linear_attention(q, k, v, g, impl="torch").o


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def forward(f: Callable[..., Tensor], x: list[Tensor]) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            f(*x)

    return run


def both(f: Callable[..., Tensor], x: list[Tensor]) -> Callable[[], Any]:
    upstream = torch.ones_like(x[2])
    return lambda: torch.autograd.grad(f(*x), x, upstream)


def products(T: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    """The four products of the forward pass on T tokens, 64 tiles at a time."""
    q, k, v = (torch.randn(H * T // C, C, K).to(dtype) for _ in range(3))
    S = torch.randn(H * T // C, K, K).to(dtype)

    def run() -> None:
        for i in range(0, q.shape[0], 64):
            j = slice(i, i + 64)
            P = torch.bmm(q[j], k[j].transpose(1, 2))
            torch.bmm(P, v[j])
            torch.bmm(k[j].transpose(1, 2), v[j])
            torch.bmm(q[j], S[j])

    return run


def square() -> Callable[[], Any]:
    """One fp32 matrix product of as many multiplications as ``products(8192)``."""
    x, y = (torch.randn(1024, 1024) for _ in range(2))
    return lambda: torch.mm(x, y)


def against_products(seconds: float) -> dict[str, float]:
    x = inputs(16384, grad=True)
    q, k, v, g = (t.detach() for t in inputs(8192))
    g = torch.where(torch.rand_like(g) < 0.1, -20 - 10 * torch.rand_like(g), g)
    strong = [t.requires_grad_() for t in (q, k, v, g)]
    four, f_none, f_channel, b_none, b_channel, b_strong = best(
        products(16384),
        forward(op, x[:3]),
        forward(op, x),
        both(op, x[:3]),
        both(op, x),
        both(op, strong),
        seconds=seconds,
    )
    fourteen = 3.5 * four
    return {
        "forward 16k, no gate / products": f_none / four,
        "forward 16k, channel gate / products": f_channel / four,
        "forward + backward 16k, no gate / products": b_none / fourteen,
        "forward + backward 16k, channel gate / products": b_channel / fourteen,
        "strong gates, forward + backward 8k / products": b_strong / (fourteen / 2),
    }


def against_length_and_dtype(seconds: float) -> dict[str, float]:
    short, long = inputs(8192, grad=True), inputs(65536, grad=True)
    narrow = inputs(8192, torch.bfloat16, grad=True)
    f_short, f_long = best(forward(op, short), forward(op, long), seconds=2 * seconds)
    b_short, b_long = best(both(op, short), both(op, long), seconds=2 * seconds)
    wide, half, none_wide, none_half, f_wide, f_half, products_wide, products_half = best(
        both(op, short),
        both(op, narrow),
        both(op, short[:3]),
        both(op, narrow[:3]),
        forward(op, short),
        forward(op, narrow),
        products(8192),
        products(8192, torch.bfloat16),
        seconds=seconds,
    )
    return {
        "forward 64k / 8k": f_long / f_short,
        "forward + backward 64k / 8k": b_long / b_short,
        "bf16 / fp32, no gate, forward + backward 8k": none_half / none_wide,
        "bf16 / fp32, channel gate, forward + backward 8k": half / wide,
        "bf16 / fp32, channel gate, forward 8k": f_half / f_wide,
        "bf16 / fp32, the four forward products": products_half / products_wide,
    }


def against_softmax(seconds: float) -> dict[str, float]:
    found = {}
    for T, name in ((512, "512"), (1024, "1k"), (2048, "2k"), (8192, "8k")):
        x = inputs(T, grad=True)
        theirs, ours = best(both(sdpa, x[:3]), both(op, x), seconds=seconds)
        found[f"sdpa / channel gate, forward + backward {name}"] = theirs / ours
    return found


MEMORY = """
import re, sys, torch
sys.path.insert(0, {tools!r})
from bench_op import both, inputs, op
torch.set_num_threads({threads})
both(op, inputs(256, grad=True))()
x = inputs(65536, grad=True)
run = both(op, x)  # makes the upstream gradient
status = lambda: open("/proc/self/status").read()
resident = lambda name: int(re.search(name + r":\\s+(\\d+)", status())[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")  # Linux: the peak starts again from here
before = resident("VmRSS")
grads = run()
own = x[2].nbytes + sum(g.nbytes for g in grads)  # the output and the gradients
print((resident("VmHWM") - before - own) / sum(t.nbytes for t in x))
"""


def memory(threads: int) -> dict[str, float]:
    """Peak resident memory beyond inputs, output and gradients, over that of the inputs."""
    code = MEMORY.format(tools=str(__file__).rsplit("/", 1)[0], threads=threads)
    command = [sys.executable, "-c", code]  # a process of its own: a peak cannot be reset
    out = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return {"memory of forward + backward 64k / inputs": float(out.stdout.split()[-1])}


def training_step(kind: str, T: int) -> Callable[[], Any]:
    """A step of an 8-layer model of width 256 and 4 heads: 8,192 tokens in rows of T, fp32."""
    mixer = {"kind": kind, "num_heads": 4}
    config = gla.ModelConfig(
        d_model=256, vocab_size=4096, layers=["mixer*8"], mixers={"mixer": mixer}
    )
    model = gla.LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 4096, (8192 // T, T + 1))

    def run() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def against_softmax_model(seconds: float) -> dict[str, float]:
    found = {}
    for T in (512, 2048, 8192):
        gated, softmax = best(
            training_step("linear_attention", T),
            training_step("softmax_attention", T),
            seconds=2 * seconds,
        )
        found[f"training tokens/s, gated / softmax model, T {T}"] = softmax / gated
    return found


def against_mlstm(seconds: float) -> dict[str, float]:
    """The native chunkwise form of mlstm_kernels: per-head gates, 8,192 tokens."""
    from mlstm_kernels.torch.chunkwise.native import (  # pyright: ignore[reportMissingImports]
        mlstm_chunkwise__native_autograd,
    )

    q, k, v, g = inputs(8192, grad=True)
    gate = g.detach()[..., 0].clone().requires_grad_()
    peer = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    raw = [torch.randn(1, H, 8192).requires_grad_() for _ in range(2)]

    def theirs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        h = mlstm_chunkwise__native_autograd(q=q, k=k, v=v, i=i, f=f, chunk_size=64)
        return h if isinstance(h, Tensor) else h[0]

    args, ours = [*peer, *raw], [q, k, v, gate]
    f_theirs, f_ours, b_theirs, b_ours, four, one = best(
        forward(theirs, args),
        forward(op, ours),
        both(theirs, args),
        both(op, ours),
        products(8192),
        square(),
        seconds=seconds,
    )
    return {
        "mlstm_kernels / head gate, forward 8k": f_theirs / f_ours,
        "products / a fourth of mlstm_kernels, forward 8k": 4 * four / f_theirs,
        "one product as large / the same fourth": 4 * one / f_theirs,
        "mlstm_kernels / head gate, forward + backward 8k": b_theirs / b_ours,
    }


def against_fast_transformers(seconds: float) -> dict[str, float]:
    """The C++ recurrence of fast-transformers, [B, H, T, K], without its normalizer."""
    from fast_transformers.causal_product import (  # pyright: ignore[reportMissingImports]
        causal_dot_product,
    )

    found = {}
    for T, name in ((8192, "8k"), (65536, "64k")):
        x = inputs(T, grad=True)[:3]
        peer = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in x]
        if T == 8192:
            ours, theirs = best(
                forward(op, x), forward(causal_dot_product, peer), seconds=2 * seconds
            )
            found["no gate / fast-transformers, forward 8k"] = ours / theirs
        ours, theirs, four = best(
            both(op, x), both(causal_dot_product, peer), products(T), seconds=2 * seconds
        )
        found[f"no gate / fast-transformers, forward + backward {name}"] = ours / theirs
    found["products / 0.85 of fast-transformers, forward + backward 64k"] = (
        3.5 * four / theirs / 0.85
    )
    return found


def between_cores(when: str) -> dict[str, float]:
    """Time of reading what the other core wrote over that of reading what the same core wrote.

    Near 1 where cores share a cache; a virtual machine's may share one in this minute and not in
    the next, and all that two threads hand to each other then takes longer.
    """
    x, y, z = (torch.randn(64, 64, 64) for _ in range(3))
    times: dict[int, list[float]] = {0: [], 32: []}
    for shift, noted in times.items():
        order = torch.arange(64).roll(shift)  # by 32: each thread reads what the other wrote
        for _ in range(100):
            torch.mul(x, 2.0, out=y)
            before = time.perf_counter()
            torch.index_select(y, 0, order, out=z)
            noted.append(time.perf_counter() - before)
    other, same = statistics.median(times[32]), statistics.median(times[0])
    return {f"read from the other core / from the own, {when}": other / same}


def new_memory() -> dict[str, float]:
    """Time of making and filling 134 MB, an output of 65,536 tokens, over that of filling it again.

    Some 2 to 3. A virtual machine whose host takes free memory back waits for every page, which can
    make it 30, and every output from 32 MB waits with it.
    """
    first, again = [], []
    for _ in range(3):
        time.sleep(2.5)  # time for the host to take what was free
        before = time.perf_counter()
        x = empty((1, 65536, H, K), torch.float32, torch.device("cpu")).fill_(1.0)
        middle = time.perf_counter()
        x.fill_(2.0)
        first.append(middle - before)
        again.append(time.perf_counter() - middle)
        del x
    ratio = statistics.median(first) / statistics.median(again)
    return {"134 MB made and filled / filled again": ratio}


def describe(figure: tuple[str, float]) -> str:
    """A line for a name and its ratio."""
    name, ratio = figure
    bound, sense = TARGETS.get(name, (None, ""))
    met = bound is None or (ratio <= bound if sense == "at most" else ratio >= bound)
    aim = "" if bound is None else f"  target {sense} {bound:g}{'' if met else '  MISSED'}"
    return f"{name:52s} {ratio:7.2f}{aim}"


def main() -> None:
    parser = argparse.ArgumentParser(description=f"{str(__doc__).split(chr(10))[0]} Five minutes.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.5, help="of measuring for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found: dict[str, float] = {}
    missing: list[str] = []

    def note(figures: dict[str, float]) -> None:
        found.update(figures)
        if not options.json:
            print("\n".join(map(describe, figures.items())), flush=True)

    note(memory(options.threads))
    note(new_memory())
    note(between_cores("before"))
    parts = (against_products, against_length_and_dtype, against_softmax, against_softmax_model)
    for part in parts:
        note(part(options.seconds))
    for name, part in (
        ("mlstm_kernels", against_mlstm),
        ("fast_transformers", against_fast_transformers),
    ):
        try:
            note(part(options.seconds))
        except ImportError as reason:
            missing.append(f"{name}: {reason}")
    note(between_cores("after"))
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        print(
            json.dumps({"ratios": found, "missing": missing, "threads": options.threads} | versions)
        )
        return
    for line in missing:
        print(f"not measured, {line}")


if __name__ == "__main__":
    main()
