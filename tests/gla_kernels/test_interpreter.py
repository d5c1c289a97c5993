"""The interpreter's checks catch what they are for: one planted fault each, in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]

KERNELS = """
import torch, triton, triton.language as tl
from tools import interpreter
interpreter.fix_bf16()
interpreter.add_checks()

@triton.jit
def past_the_end(x):
    tl.store(x + tl.arange(0, 16) + tl.program_id(0), 1.0)

@triton.jit
def two_writers(x):
    tl.store(x + tl.arange(0, 16), 1.0)

@triton.jit
def reads_another(x):
    i = tl.program_id(0)
    tl.store(x + i, 1.0)
    tl.store(x + 8 + i, tl.load(x + 1 - i))

@triton.jit
def masked_off(x, y):
    t = tl.arange(0, 16)
    tl.store(y + t, tl.load(x + t, mask=t < 8))

@triton.jit
def right(x):
    t = tl.arange(0, 8) + 8 * tl.program_id(0)
    value = tl.load(x + t)
    tl.store(x + t, value * value)

x, y = torch.ones(16), torch.ones(16)
"""


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    # Triton reads the source of a kernel from a file.
    file = tmp_path / "planted.py"
    file.write_text(KERNELS + code)
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, file], capture_output=True, text=True, env=variables)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("past_the_end[(2,)](x)", "out-of-bounds store of 1 elements"),
        ("two_writers[(2,)](x)", "stores to what program"),
        ("reads_another[(2,)](x)", "Violation"),
    ],
)
def test_planted_faults_are_caught(code: str, said: str, tmp_path: Path) -> None:
    done = run(code, tmp_path)
    assert done.returncode != 0
    assert "Violation" in done.stderr
    assert said in done.stderr


def test_masked_off_values_are_nan(tmp_path: Path) -> None:
    done = run("masked_off[(1,)](x, y); print(y.isnan().sum().item())", tmp_path)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_a_right_kernel_passes_and_bf16_multiplies(tmp_path: Path) -> None:
    done = run(
        "z = (x * 1.5).bfloat16(); right[(2,)](z); print(z.tolist() == [2.25] * 16)", tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
