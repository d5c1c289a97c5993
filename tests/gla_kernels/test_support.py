"""What the kernels take, refuse and choose, by rule: no Triton, no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from gla_kernels import support
from gla_kernels.support import Device, config_for, refusal, segment_length

T4 = Device("Tesla T4", (7, 5), 65536, 40)
CONSUMER = Device("a 99 KB consumer card", (12, 0), 101376, 84)
A100 = Device("A100", (8, 0), 166912, 108)
H100 = Device("H100", (9, 0), 232448, 132)
GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    def use(device: Device) -> None:
        monkeypatch.setattr(support, "device_of", lambda _: device)

    return use


@pytest.mark.parametrize(
    ("device", "dtype", "K", "V", "said"),
    [
        (A100, torch.float64, 64, 64, "fp32, bf16 or fp16 in place of torch.float64"),
        (A100, BF16, 257, 64, "a key dimension of at most 256 in place of 257"),
        (A100, BF16, 64, 300, "a value dimension of at most 256 in place of 300"),
        (T4, BF16, 64, 64, "bf16, sm_80 or later, in place of Tesla T4 (sm_75)"),
    ],
)
def test_refusals_say_what_is_expected_and_what_came(
    pretend, device: Device, dtype: torch.dtype, K: int, V: int, said: str
) -> None:
    pretend(device)
    reason = refusal(GPU, dtype, dtype, K, V)
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize("device", [CONSUMER, A100, H100])
def test_supported_calls_are_not_refused(pretend, device: Device) -> None:
    pretend(device)
    for dtype in support.DTYPES:
        assert refusal(GPU, dtype, dtype, 256, 256) is None


def test_the_cpu_is_taken_by_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "a GPU, or TRITON_INTERPRET=1" in str(refusal(torch.device("cpu"), BF16, BF16, 64, 64))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert refusal(torch.device("cpu"), BF16, BF16, 64, 64) is None


@pytest.mark.parametrize("device", [CONSUMER, A100, H100])
@pytest.mark.parametrize("K", [1, 16, 48, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("V", [1, 64, 129, 256])
def test_tiles_cover_every_size(device: Device, K: int, V: int) -> None:
    for dtype, gated in itertools.product(support.DTYPES, (False, True)):
        config = config_for(device, K, V, dtype, K if gated else 0, dtype)
        assert config.BK >= K
        assert config.grad_BV >= (min(V, 64) if dtype == torch.float32 else V)
        assert config.BK % config.KS == 0
        for block in (
            config.C, config.BK, config.KS, config.BV,
            config.grad_BK, config.grad_BV, config.grad_VB,
        ):  # fmt: skip
            assert block >= 16
            assert block & (block - 1) == 0


@pytest.mark.parametrize(
    ("B", "T", "H", "cut"),
    [
        (8, 4096, 16, False),
        (1, 8192, 96, False),
        (2, 4096, 4, True),
        (2, 512, 4, False),
        (1, 64, 1, False),
    ],
)
def test_sequences_are_cut_only_where_heads_leave_the_gpu_idle(
    B: int, T: int, H: int, cut: bool
) -> None:
    config = config_for(H100, 64, 64, BF16, 64, BF16)
    L = segment_length(H100, config, B, T, H)
    assert L % config.C == 0
    assert (L < T) == cut
    if cut:
        assert B * H * -(-T // L) <= 2 * H100.processors
