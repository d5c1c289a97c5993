"""Wrong input: one line that names the tensor, what came and what was expected."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import gla
from gla.errors import ConfigError
from gla.testing import make_inputs
from tests import oracle
from tests.ops.agreement import IMPLS, call, named

B, T, H, K, V = 2, 5, 4, 8, 6


def _zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def _good(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": _zeros(B, T, H, K),
        "k": _zeros(B, T, H, K),
        "v": _zeros(B, T, H, V),
        "log_decay": _zeros(B, T, H, K),
    }
    return arguments | changes


def _state(*shape: int, z: tuple[int, ...] | None = None, **options: Any) -> gla.LinearState:
    return gla.LinearState(_zeros(*shape, **options), None if z is None else _zeros(*z))


def _packed(offsets: list[int], **changes: Any) -> dict[str, Any]:
    arguments = {name: x[:1] for name, x in _good().items()}
    return arguments | {"cu_seqlens": torch.tensor(offsets)} | changes


# (what the message names, what it says came, the arguments)
CASES = {
    "q rank": ("q", "[5, 4, 8]", _good(q=_zeros(T, H, K))),
    "k rank": ("k", "[2, 5, 4]", _good(k=_zeros(B, T, H))),
    "v rank": ("v", "[2, 5, 4, 6, 1]", _good(v=_zeros(B, T, H, V, 1))),
    "k tokens": ("k", "[2, 6, 4, 8]", _good(k=_zeros(B, T + 1, H, K))),
    "v tokens": ("v", "[2, 4, 4, 6]", _good(v=_zeros(B, T - 1, H, V))),
    "k rows": ("k", "[1, 5, 4, 8]", _good(k=_zeros(1, T, H, K))),
    "v rows": ("v", "[3, 5, 4, 6]", _good(v=_zeros(3, T, H, V))),
    "k width": ("k", "[2, 5, 4, 7]", _good(k=_zeros(B, T, H, K - 1))),
    "k heads": ("k", "3 heads", _good(k=_zeros(B, T, 3, K))),
    "k more heads": ("k", "8 heads", _good(k=_zeros(B, T, 8, K))),
    "k no heads": ("k", "0 heads", _good(k=_zeros(B, T, 0, K), v=_zeros(B, T, 0, V))),
    "v heads": ("v", "3 heads", _good(v=_zeros(B, T, 3, V))),
    "no width": ("q", "0", _good(q=_zeros(B, T, H, 0), k=_zeros(B, T, H, 0))),
    "gate rank 2": ("log_decay", "[2, 5]", _good(log_decay=_zeros(B, T))),
    "gate rank 5": ("log_decay", "[2, 5, 4, 8, 1]", _good(log_decay=_zeros(B, T, H, K, 1))),
    "gate per value": ("log_decay", "[2, 5, 4, 6]", _good(log_decay=_zeros(B, T, H, V))),
    "gate tokens": ("log_decay", "[2, 6, 4]", _good(log_decay=_zeros(B, T + 1, H))),
    "gate rows": ("log_decay", "[1, 5, 4]", _good(log_decay=_zeros(1, T, H))),
    "gate heads": ("log_decay", "3", _good(log_decay=_zeros(3))),
    "gate scalar": ("log_decay", "[]", _good(log_decay=torch.tensor(-1.0))),
    "gate head first": ("log_decay", "[2, 4, 5]", _good(log_decay=_zeros(B, H, T))),
    "q integer": ("q", "int64", _good(q=_zeros(B, T, H, K, dtype=torch.int64))),
    "q complex": ("q", "complex64", _good(q=_zeros(B, T, H, K, dtype=torch.complex64))),
    "q float8": ("q", "float8", _good(q=_zeros(B, T, H, K).to(torch.float8_e4m3fn))),
    "k dtype": ("k", "bfloat16", _good(k=_zeros(B, T, H, K, dtype=torch.bfloat16))),
    "v dtype": ("v", "float64", _good(v=_zeros(B, T, H, V, dtype=torch.float64))),
    "gate integer": ("log_decay", "int32", _good(log_decay=_zeros(B, T, H, dtype=torch.int32))),
    "gate bool": ("log_decay", "bool", _good(log_decay=_zeros(B, T, H, dtype=torch.bool))),
    "k device": ("k", "meta", _good(k=_zeros(B, T, H, K, device="meta"))),
    "v device": ("v", "meta", _good(v=_zeros(B, T, H, V, device="meta"))),
    "gate device": ("log_decay", "meta", _good(log_decay=_zeros(B, T, H, device="meta"))),
    "state device": (
        "initial_state",
        "meta",
        _good(initial_state=_state(B, H, K, V, device="meta")),
    ),
    "state rows": ("initial_state", "[3, 4, 8, 6]", _good(initial_state=_state(3, H, K, V))),
    "state heads": ("initial_state", "[2, 2, 8, 6]", _good(initial_state=_state(B, 2, K, V))),
    "state transposed": ("initial_state", "[2, 4, 6, 8]", _good(initial_state=_state(B, H, V, K))),
    "state rank": ("initial_state", "[4, 8, 6]", _good(initial_state=_state(H, K, V))),
    "state bf16": (
        "initial_state",
        "bfloat16",
        _good(initial_state=_state(B, H, K, V, dtype=torch.bfloat16)),
    ),
    "state fp64": (
        "initial_state",
        "float64",
        _good(initial_state=_state(B, H, K, V, dtype=torch.float64)),
    ),
    "state a tensor": ("initial_state", "Tensor", _good(initial_state=_zeros(B, H, K, V))),
    "state without z": (
        "initial_state",
        "None",
        _good(initial_state=_state(B, H, K, V), normalize=True),
    ),
    "z shape": (
        "initial_state",
        "[2, 4, 6]",
        _good(initial_state=_state(B, H, K, V, z=(B, H, V)), normalize=True),
    ),
    "pack of two rows": ("cu_seqlens", "2", _good(cu_seqlens=torch.tensor([0, T]))),
    "pack start": ("cu_seqlens", "1", _packed([1, 3, T])),
    "pack end early": ("cu_seqlens", "4", _packed([0, 3, T - 1])),
    "pack end late": ("cu_seqlens", "6", _packed([0, 3, T + 1])),
    "pack unsorted": ("cu_seqlens", "4, 2", _packed([0, 4, 2, T])),
    "pack negative": ("cu_seqlens", "-1", _packed([0, -1, T])),
    "pack float": ("cu_seqlens", "float32", _packed([], cu_seqlens=torch.tensor([0.0, T]))),
    "pack int16": (
        "cu_seqlens",
        "int16",
        _packed([], cu_seqlens=torch.tensor([0, T], dtype=torch.int16)),
    ),
    "pack rank": ("cu_seqlens", "[1, 2]", _packed([], cu_seqlens=torch.tensor([[0, T]]))),
    "pack empty": ("cu_seqlens", "[0]", _packed([])),
    "pack a list": ("cu_seqlens", "list", _packed([], cu_seqlens=[0, T])),
    "pack device": (
        "cu_seqlens",
        "meta",
        _packed([], cu_seqlens=torch.zeros(2, dtype=torch.int64, device="meta")),
    ),
    "pack states": (
        "initial_state",
        "[1, 4, 8, 6]",
        _packed([0, 3, T], initial_state=_state(1, H, K, V)),
    ),
    "scale": ("scale", "'x'", _good(scale="x")),
    "gates without causality": ("log_decay", "causal=False", _good(causal=False)),
}


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
@pytest.mark.parametrize("case", CASES)
def test_the_message_names_what_is_wrong(impl: str, case: str) -> None:
    name, came, arguments = CASES[case]
    with pytest.raises(ValueError) as raised:
        gla.gated_linear_attention(**arguments, impl=impl)
    message = str(raised.value)
    assert "\n" not in message
    assert re.match(rf"{name}\b", message), message
    assert "got" in message and came in message, message
    assert "expected" in message, message


@pytest.mark.parametrize("impl", IMPLS)
def test_good_arguments_are_accepted(impl: str) -> None:
    """The cases above fail for their one change alone."""
    state = _state(B, H, K, V, z=(B, H, K))
    calls: list[tuple[dict[str, Any], int]] = [
        (_good(), B),
        (_packed([0, 3, T]), 2),
        (_good(initial_state=state) | {"normalize": True}, B),
    ]
    for arguments, sequences in calls:
        o, after = gla.gated_linear_attention(**arguments, impl=impl)
        assert o.shape == arguments["v"].shape
        assert after.S.shape == (sequences, H, K, V)


# --- the choice of form -----------------------------------------------------------------------


def test_unknown_impl_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"^impl: got 'flash', expected") as raised:
        gla.gated_linear_attention(**_good(), impl="flash")
    for known in ("auto", "recurrent", "torch", "triton"):
        assert known in str(raised.value)


@pytest.mark.parametrize("option", [{"impl": impl} for impl in IMPLS] + [{"chunk_size": 32}])
def test_options_of_the_forms_are_refused_where_there_is_one_way(option: dict[str, Any]) -> None:
    """causal=False is two products for every form; a named one would be ignored."""
    arguments = {**_good(causal=False), "log_decay": None}
    gla.gated_linear_attention(**arguments)
    (name,) = option
    with pytest.raises(ValueError, match=rf"^{name}: got .*, expected .* causal=False"):
        gla.gated_linear_attention(**arguments, **option)


def test_a_named_form_is_refused_with_its_reason() -> None:
    """Tensors on the CPU: the Triton form cannot take them and is not replaced in silence."""
    with pytest.raises(ConfigError, match=r"^impl: got 'triton', expected .*"):
        gla.gated_linear_attention(**_good(), impl="triton")


@pytest.mark.parametrize("chunk_size", [0, -16, 8, 17, 512])
def test_wrong_chunk_size(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^chunk_size: got {chunk_size}, expected"):
        gla.gated_linear_attention(**_good(), impl="torch", chunk_size=chunk_size)


def test_the_recurrent_form_has_no_chunks() -> None:
    with pytest.raises(ValueError, match=r"^chunk_size: got 16, expected"):
        gla.gated_linear_attention(**_good(), impl="recurrent", chunk_size=16)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(513, 4), (4, 600), (700, 520)])
@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_wider_than_promised_is_right_or_refused(impl: str, key_dim: int, value_dim: int) -> None:
    inputs = make_inputs(1, 3, 1, key_dim, value_dim, dtype=torch.float64, state=False)
    try:
        out = gla.gated_linear_attention(*inputs[:4], impl=impl)
    except ValueError as refused:
        assert re.match("[qkv]: got .*expected", str(refused)), refused
        return
    torch.testing.assert_close(out.o, oracle.recurrence(*inputs[:4]).o, rtol=0, atol=1e-10)


def test_auto_says_nothing_false() -> None:
    """ "auto" on the CPU gives what one of the forms gives."""
    inputs = make_inputs(2, 70, 2, 8, 6)
    auto = call(named(inputs), "auto").o
    assert any(torch.equal(auto, call(named(inputs), impl).o) for impl in IMPLS)


# --- checked mode -----------------------------------------------------------------------------


def _bad_values() -> dict[str, tuple[str, dict[str, Any]]]:
    def put(name: str, value: float) -> dict[str, Any]:
        x = _good()[name].clone()
        x[1, 3, 2, 5] = value
        return _good(**{name: x})

    nan_state = _state(B, H, K, V)
    nan_state.S[1, 2, 3, 4] = math.nan
    return {
        "q NaN": ("q", put("q", math.nan)),
        "k NaN": ("k", put("k", math.nan)),
        "v NaN": ("v", put("v", math.nan)),
        "gate NaN": ("log_decay", put("log_decay", math.nan)),
        "gate above 0": ("log_decay", put("log_decay", 1e-6)),
        "gate inf": ("log_decay", put("log_decay", math.inf)),
        "gate in linear space": ("log_decay", _good(log_decay=torch.full((H,), 0.97))),
        "gate bf16 above 0": (
            "log_decay",
            _good(log_decay=torch.full((B, T, H), 1e-3, dtype=torch.bfloat16)),
        ),
        "state NaN": ("initial_state", _good(initial_state=nan_state)),
    }


BAD_VALUES = _bad_values()


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
@pytest.mark.parametrize("case", BAD_VALUES)
def test_checked_mode_refuses(impl: str, case: str) -> None:
    name, arguments = BAD_VALUES[case]
    with gla.checks(True), pytest.raises(ValueError) as raised:
        gla.gated_linear_attention(**arguments, impl=impl)
    message = str(raised.value)
    assert re.match(rf"{name}\b", message) and "got" in message and "expected" in message, message
    gla.gated_linear_attention(**arguments, impl=impl)  # unchecked: values are not looked at


@pytest.mark.parametrize("impl", IMPLS)
def test_checked_mode_accepts_every_valid_gate(impl: str) -> None:
    inputs = make_inputs(2, 20, 2, 8, 6, level=-math.inf, pattern="half")
    plain = gla.gated_linear_attention(*inputs[:4], impl=impl)
    leaves = [x.requires_grad_() for x in inputs[:4] if x is not None]
    with gla.checks(True):
        checked = gla.gated_linear_attention(*inputs[:4], impl=impl)
    assert torch.equal(plain.o, checked.o)
    grads = torch.autograd.grad(checked.o.sum(), leaves)
    again = torch.autograd.grad(gla.gated_linear_attention(*inputs[:4], impl=impl).o.sum(), leaves)
    assert all(map(torch.equal, grads, again))
    with gla.checks(True):
        for empty in (make_inputs(2, 0, 2, 8, 6), make_inputs(0, 2, 2, 8, 6)):
            gla.gated_linear_attention(*empty[:4], initial_state=empty.initial_state, impl=impl)


def test_checks_nest_and_end() -> None:
    _, bad = BAD_VALUES["gate above 0"]
    with gla.checks(True):
        with gla.checks(False):
            gla.gated_linear_attention(**bad)
        with pytest.raises(ValueError):
            gla.gated_linear_attention(**bad)
    gla.gated_linear_attention(**bad)


@pytest.mark.parametrize("value", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_checks_by_environment(value: str) -> None:
    program = (
        "import torch, gla\n"
        "x = torch.zeros(1, 2, 1, 3)\n"
        "try:\n    gla.gated_linear_attention(x, x, x, x + 0.5); print('accepted')\n"
        "except ValueError as error:\n    print('refused', error)\n"
    )
    environment = os.environ | {"GLA_CHECK": value}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("refused log_decay" if value == "1" else "accepted"), run.stdout
