"""The oracle against the equation solved by hand and against its closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gla.testing import make_inputs
from tests import oracle


def scalar(*values: float) -> torch.Tensor:
    """[1, T, 1, 1]"""
    return torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1)


def test_two_tokens_by_hand() -> None:
    q, k, v = scalar(2, 3), scalar(5, 7), scalar(11, 13)
    g = scalar(math.log(0.5), math.log(0.25))
    S, z = torch.full((1, 1, 1, 1), 100.0), torch.full((1, 1, 1), 10.0)
    result = oracle.recurrence(q, k, v, g, S, scale=10.0)
    first = 0.5 * 100 + 55
    second = 0.25 * first + 91
    assert result.o.flatten().tolist() == [10 * 2 * first, 10 * 3 * second]
    assert result.S.item() == second and result.z is None

    result = oracle.recurrence(q, k, v, g, S, z, normalize=True)
    z1 = 0.5 * 10 + 5
    assert result.z is not None
    assert result.z.item() == 0.25 * z1 + 7
    assert result.o.flatten().tolist() == pytest.approx(
        [first / z1, second / (0.25 * z1 + 7)], rel=1e-15
    )


def test_the_floor_of_the_normalizer() -> None:
    result = oracle.recurrence(scalar(1), scalar(0), scalar(3), S=scalar(5e-7), normalize=True)
    assert result.o.item() == 0.5


@pytest.mark.parametrize("gate", ["none", "fixed", "head", "channel"])
def test_closed_form(gate: str) -> None:
    """o_t = scale * sum over s <= t of (q_t . exp(g_{s+1} + ... + g_t) k_s) v_s."""
    inputs = make_inputs(2, 9, 4, 3, 5, kv_heads=2, gate=gate, state=False, dtype=torch.float64)
    q, k, v = (x.numpy() for x in inputs[:3])
    want = np.zeros((2, 9, 4, 5))
    for b, t, h in np.ndindex(2, 9, 4):
        for s in range(t + 1):
            decay = np.ones(3)
            for r in range(s + 1, t + 1):
                if inputs.log_decay is not None:
                    g = inputs.log_decay.numpy()
                    at = {"fixed": (h // 2,), "head": (b, r, h // 2), "channel": (b, r, h // 2)}
                    decay = decay * np.exp(g[at[gate]])
            want[b, t, h] += (
                3**-0.5 * (q[b, t, h] * decay * k[b, s, h // 2]).sum() * v[b, s, h // 2]
            )
    np.testing.assert_allclose(oracle.recurrence(*inputs[:4]).o.numpy(), want, rtol=1e-12)


def test_without_causality_every_token_reads_the_last_state() -> None:
    inputs = make_inputs(2, 5, 1, 3, 4, gate="none", dtype=torch.float64)
    assert inputs.initial_state is not None
    result = oracle.recurrence(*inputs[:3], S=inputs.initial_state.S, scale=1.0, causal=False)
    want = torch.einsum("bthk,bhkv->bthv", inputs.q, result.S)
    torch.testing.assert_close(result.o, want, rtol=0, atol=1e-13)


def test_documents_do_not_see_each_other() -> None:
    inputs = make_inputs(1, 5, 1, 3, 4, sequences=3, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    assert inputs.initial_state is not None and inputs.log_decay is not None
    packed = oracle.recurrence(*inputs[:4], inputs.initial_state.S, cu_seqlens=cu_seqlens)
    q, k, v, g = (x[:, 2:] for x in (*inputs[:3], inputs.log_decay))
    last = oracle.recurrence(q, k, v, g, inputs.initial_state.S[2:])
    assert torch.equal(packed.o[:, 2:], last.o) and torch.equal(packed.S[2:], last.S)
    assert torch.equal(packed.S[1], inputs.initial_state.S[1])
