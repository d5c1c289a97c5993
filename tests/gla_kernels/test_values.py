"""Outputs, states and every gradient of the kernels against the float64 loop, interpreted.

The interpreter is chosen when Triton is imported, so each group of cases runs in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
GROUPS = (
    "gates",
    "levels",
    "resets",
    "low precision",
    "sizes",
    "heads and strides",
    "short",
    "segments",
    "packed",
    "packed segments",
    "op",
    "norm and gate",
    "convolution",
    "packed convolution",
    "loss",
    "operators",
    "models",
)


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_agree_with_the_recurrence(group: str) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "interpreted.py", group],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) >= 2
    wrong = {
        case["case"]: {name: value for name, value in case["errors"].items() if not value <= 1}
        for case in cases
    }
    assert {label: errors for label, errors in wrong.items() if errors} == {}
