"""What every mixer promises, in fp64: split, prefix, pack, batch, gradients, states left alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from gla.layers.mixer import Mixer
from gla.state import map_tensors, named_tensors, select

T = 21
LENGTHS = [1, 2, 3, 0, 9, 1, 0, 5]
TOLERANCE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def warm_state(mixer: Mixer, rows: int, tokens: int = 7) -> Any:
    """State of rows that have read different numbers of tokens, from 0 to ``tokens``."""
    lengths = [i % (tokens + 1) for i in range(rows)]
    x = inputs(1, sum(lengths), 16, seed=2)
    return mixer(x, cu_seqlens=offsets(lengths))[1]


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5, 8, 15, 16, T - 1, T])
def test_split_anywhere_changes_nothing(mixer, cut, assert_same_state):
    x = inputs(2, T, 16)
    whole, end = mixer(x)
    first, state = mixer(x[:, :cut])
    second, state = mixer(x[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **TOLERANCE)
    assert_same_state(state, end)


def test_many_pieces_and_single_steps_change_nothing(mixer, assert_same_state):
    x = inputs(2, T, 16)
    whole, end = mixer(x)
    state, outputs = mixer.init_state(2), []
    for a, b in pairwise([0, 1, 4, 6, 13, 15]):
        y, state = mixer(x[:, a:b], state)
        outputs.append(y)
    for t in range(15, T):
        y, state = mixer.step(x[:, t], state)
        outputs.append(y.unsqueeze(1))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, **TOLERANCE)
    assert_same_state(state, end)


def test_later_tokens_change_nothing_and_the_own_token_counts(mixer):
    x = inputs(1, T, 16)
    y, _ = mixer(x)
    for p in range(T):
        changed = torch.cat([x[:, :p], 3 * inputs(1, T - p, 16, seed=3 + p)], 1)
        z, _ = mixer(changed)
        assert (z - y)[:, :p].abs().max() <= 1e-12 if p else True
        assert (z - y)[:, p].abs().max() > 1e-3


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_documents_equal_separate_ones(mixer, warm, dtype, assert_same_state):
    N = len(LENGTHS)
    x = inputs(1, sum(LENGTHS), 16).requires_grad_()
    state: Any = warm_state(mixer, N) if warm else None
    y, end = mixer(x, state, cu_seqlens=offsets(LENGTHS, dtype))
    weights = inputs(*y.shape, seed=5)
    variables = [x, *mixer.parameters()]  # gradients go through the warm state too
    packed = torch.autograd.grad((y * weights).sum(), variables, retain_graph=True)

    pieces, ends = [], []
    for n, document in enumerate(x.split(LENGTHS, 1)):
        before = select(state, [n]) if warm else mixer.init_state(1)
        z, after = mixer(document, before)
        pieces.append(z)
        ends.append(after)
    separate = torch.cat(pieces, 1)
    torch.testing.assert_close(y, separate, **TOLERANCE)
    for n, after in enumerate(ends):
        assert_same_state(select(end, [n]), after)
    alone = torch.autograd.grad((separate * weights).sum(), variables)
    for a, b in zip(packed, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_rows_do_not_meet_and_states_can_be_reordered(mixer, assert_same_state):
    x = inputs(3, T, 16)
    whole, end = mixer(x[:, :9])
    for row in range(3):
        alone, state = mixer(x[row : row + 1, :9])
        torch.testing.assert_close(whole[row : row + 1], alone, **TOLERANCE)
        assert_same_state(select(end, [row]), state)
    order = [2, 0, 0]
    y, _ = mixer(x[order, 9:], select(end, order))
    z, _ = mixer(x[:, 9:], end)
    torch.testing.assert_close(y, z[order], **TOLERANCE)


@torch.no_grad()
def test_a_state_is_left_as_it_was(mixer):
    """Reading on twice from one state, in two ways, gives what each would give alone."""
    x = inputs(2, 90, 16)
    state = mixer.init_state(2)
    for t in range(66):  # far enough for a full cache to have grown once and have room
        _, state = mixer.step(x[:, t], state)
    kept = map_tensors(state, torch.clone)
    wanted = [mixer(u, map_tensors(kept, torch.clone)) for u in (x[:, 66:80], x[:, 80:])]
    branches = [mixer.step(x[:, 66], state), mixer.step(x[:, 80], state)]
    for i, (start, (y, _)) in enumerate(zip((66, 80), wanted, strict=True)):
        out, branch = branches[i]
        outputs = [out]
        for t in range(start + 1, start + y.shape[1]):
            out, branch = mixer.step(x[:, t], branch)
            outputs.append(out)
            branches[i] = (out, branch)
        torch.testing.assert_close(torch.stack(outputs, 1), y, **TOLERANCE)
    again, _ = mixer(x[:, 66:80], state)
    torch.testing.assert_close(again, wanted[0][0], **TOLERANCE)
    for name, x in named_tensors(state):
        if not name.startswith("filled") and not (name in "kv" and hasattr(state, "filled")):
            assert torch.equal(x, dict(named_tensors(kept))[name]), name


def test_gradients_of_input_and_state_are_right(mixer):
    x = inputs(1, 4, 16).requires_grad_()
    start = map_tensors(warm_state(mixer, 4), torch.clone)
    start = select(start, [3])
    names = [n for n, v in named_tensors(start) if v.is_floating_point() and v.numel()]
    tensors = [dict(named_tensors(start))[n].detach().requires_grad_() for n in names]

    def run(x, *tensors):
        given = iter(tensors)
        state = map_tensors(
            start, lambda v: next(given) if v.is_floating_point() and v.numel() else v.clone()
        )
        y, end = mixer(x, state)
        return y, *(v for _, v in named_tensors(end) if v.is_floating_point() and v.numel())

    assert torch.autograd.gradcheck(run, (x, *tensors), fast_mode=True)


def test_no_tokens_give_no_output_and_the_same_state(mixer, assert_same_state):
    _, state = mixer(inputs(2, 6, 16))
    y, after = mixer(inputs(2, 0, 16), state)
    assert y.shape == (2, 0, 16)
    assert_same_state(after, state)


def test_the_state_is_made_only_when_asked_for(mixer):
    x = inputs(2, T, 16)
    y, state = mixer(x, need_state=False)
    assert state is None
    torch.testing.assert_close(y, mixer(x)[0], **TOLERANCE)
    _, warm = mixer(x)
    y, state = mixer(x, warm, need_state=False)
    assert state is None
    torch.testing.assert_close(y, mixer(x, warm)[0], **TOLERANCE)


def test_train_and_eval_take_the_same_path(mixer):
    x = inputs(2, T, 16)
    assert torch.equal(mixer.train()(x)[0], mixer.eval()(x)[0])


def test_half_precision_leaves_state_and_gates_wide(mixer):
    x = inputs(2, T, 16).float()
    wanted = mixer.float()(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
        z, _ = mixer(x[:, :1], state)
    if not hasattr(mixer, "hash"):  # a rounded key may fall into another bucket
        assert (y.float() - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert y.isfinite().all()
    assert z.isfinite().all()
    if hasattr(state, "recurrent"):
        assert state.recurrent.S.dtype == torch.float32
    mixer.bfloat16()
    y, state = mixer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    for name, p in mixer.named_parameters():
        wide = name.startswith(("gate.", "slots."))
        assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
    if hasattr(state, "recurrent"):
        assert state.recurrent.S.dtype == torch.float32
