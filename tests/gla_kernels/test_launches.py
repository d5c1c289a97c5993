"""Host code against pretended GPUs: what is launched compiles, fits, or is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gla
from gla.layers.short_convolution import ShortConvolution

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
CASES = """
import json, sys
from tools import compile_kernels as ck
rows = ck.compile_case(sys.argv[1], ck.Case(int(sys.argv[2]), int(sys.argv[2]), sys.argv[3]))
print(json.dumps([len(rows), ck.faults(rows)]))
"""


def compiled(target: str, size: int, gate: str) -> str:
    """[launches, faults] of a forward, a backward and a decoding step on a pretended GPU."""
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", CASES, target, str(size), gate],
        capture_output=True,
        text=True,
        env=variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


# One pass: 3 launches. Segmented: 4 more, 2 scans. Decoding: 1. In one case norm and gate (2),
# convolution (2 each for rows and documents, 1 to decode) and loss (3).
# H100, a card with 99 KB, A100.
@pytest.mark.parametrize("target", ["90", "120", pytest.param("80", marks=pytest.mark.slow)])
def test_launches_fit_the_pretended_gpu(target: str) -> None:
    assert compiled(target, 64, "none") == "[21, []]"


@pytest.mark.slow
@pytest.mark.parametrize(("target", "gate"), [("90", "channel"), ("100", "head")])
def test_gated_launches_fit_the_pretended_gpu(target: str, gate: str) -> None:
    assert compiled(target, 64, gate) == "[11, []]"


def test_a_normalizer_beside_256_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, v = torch.ones(1, 20, 1, 16), torch.ones(1, 20, 1, 256)
    with pytest.raises(ValueError, match=r"^impl: .*at most 256 in place of 257, one of them"):
        gla.gated_linear_attention(q, q, v, normalize=True, impl="triton")


def test_a_convolution_that_no_kernel_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = ShortConvolution(8, 4), torch.ones(1, 5, 8)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"^impl: got 'triton', expected a GPU"):
        conv(x, fused=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"^impl: got 'triton', expected fp32, bf16 or fp16"):
        conv(x.double(), fused=True)


def test_every_part_of_the_gpu_report_runs_interpreted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "gpu_report.py", "--dry-run", "--out", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.glob("*interpreter.json"))) == 1
    assert "decode step" in next(tmp_path.glob("*interpreter.md")).read_text()
