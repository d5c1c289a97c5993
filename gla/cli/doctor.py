"""``gla doctor``: what is installed, what it can run on, and which form of the op runs where."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import gla
from gla.cli.arguments import call, print_json
from gla.cli.recommend import Task
from gla.errors import ConfigError

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "sentencepiece", "datasets")
_WHY = {
    "recurrent": "one token needs no chunks",
    "torch": "chunkwise in plain PyTorch, on every device",
    "triton": "chunkwise Triton kernels, for this GPU and dtype",
}


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(doctor, "gla doctor", argv)


def doctor(
    *,
    recommend: bool = False,
    seq_len: int | None = None,
    task: Task | None = None,
    json: bool = False,
) -> int:
    """Print versions, devices, and which form of the op runs on each device and dtype.

    Each form is run once on a small input and compared with the recurrence in fp64. Or, with
    --recommend, print which mixers suit a length and a task, with the evidence.

    Args:
        recommend: Print advice on mixers instead.
        seq_len: With --recommend: tokens of a document; 2,048 by default.
        task: With --recommend: text in general (the default), facts to be found again word by word,
            or one answer a document.
        json: Print one JSON object instead of text.

    Raises:
        ConfigError: A length or a task without --recommend, or no positive length.
    """
    if recommend:
        return _advise(2048 if seq_len is None else seq_len, task or "language-model", json)
    for name, got in (("seq_len", seq_len), ("task", task)):
        if got is not None:
            raise ConfigError(
                f"{name}: got {got!r} without --recommend, expected none; fix by adding --recommend"
            )
    from gla.train.device import find_compiler

    facts = {
        "versions": versions(),
        "devices": devices(),
        "forms": forms(),
        "no_triton": no_triton(),
        "compiler": find_compiler(),
    }
    if json:
        print_json(facts)
        return 0
    print("versions")
    for name, version in facts["versions"].items():
        print(f"  {name:<14} {version or 'not installed'}")
    print("devices")
    for name, what in facts["devices"].items():
        print(f"  {name:<14} {what}")
    print('what impl="auto" picks')
    for row in facts["forms"]:
        where = f"{row['device']} {row['dtype']}, {row['tokens']}"
        check = f"off by {row['error']:.0e}" if row["error"] is not None else row["fault"]
        print(f"  {where:<32} {row['form']:<10} {_WHY[row['form']]} ({check})")
    for device, reason in facts["no_triton"].items():
        print(f"  {f'{device}, Triton named':<32} refused: {reason}")
    print(f"C++ compiler for torch.compile on the CPU\n  {facts['compiler'] or 'none found'}")
    return 0


def _advise(seq_len: int, task: Task, json: bool) -> int:
    from gla.cli import recommend

    if seq_len < 1:
        raise ConfigError(f"seq_len: got {seq_len}, expected at least 1; fix --seq-len")
    figures = recommend.recommend(seq_len, task)
    if json:
        print_json(figures)
    else:
        print("\n".join(recommend.describe(figures)))
    return 0


def versions() -> dict[str, str | None]:
    """Return the version of Python and of each package that matters, None where it is not there."""
    found: dict[str, str | None] = {"python": platform.python_version(), "gla": gla.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> dict[str, str]:
    """Return {device: description} of what torch can use here."""
    import torch

    found = {"cpu": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = (
            f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        )
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def forms() -> list[dict[str, Any]]:
    """Return, for each device, dtype and length, the form that runs and how exact it is.

    ``error`` is the RMS of the difference to the fp64 recurrence over the RMS of that, on 96 tokens
    of unit scale; None, with a ``fault``, where the device cannot compute it.
    """
    import torch

    from gla.ops.forms import resolve

    rows = []
    for device in map(torch.device, devices()):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for tokens, what in ((1, "one token"), (96, "more tokens")):
                row = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
                row |= {"tokens": what, "form": resolve("auto", tokens, device, (dtype, dtype))}
                rows.append(row | _try(device, dtype, tokens))
    return rows


def no_triton() -> dict[str, str]:
    """Return, for each device on which the Triton kernels do not run, what a call is told."""
    import torch

    from gla.ops.forms import resolve

    reasons = {}
    for device in devices():
        try:
            resolve("triton", 96, torch.device(device))
        except ValueError as reason:
            reasons[device] = str(reason)
    return reasons


def _try(device: Any, dtype: Any, tokens: int) -> dict[str, Any]:
    """Run the op as ``impl="auto"`` does, and compare it with the recurrence in fp64."""
    import torch

    from gla.ops.gated_linear_attention import gated_linear_attention

    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, 2, 16)
    q, k, v, gate = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    decay = torch.nn.functional.logsigmoid(gate)
    exact = gated_linear_attention(
        q.double(), k.double(), v.double(), decay.double(), impl="recurrent"
    ).o
    try:
        o = gated_linear_attention(*(x.to(device) for x in (q, k, v, decay))).o
    except RuntimeError as reason:
        return {"error": None, "fault": str(reason).splitlines()[0]}
    difference = o.double().cpu() - exact
    return {"error": (difference.square().mean() / exact.square().mean()).sqrt().item()}
