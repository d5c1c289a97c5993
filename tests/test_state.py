"""States: selection, size, and files that are read back equal or not at all."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gla import state as states
from gla.errors import StateError
from gla.state import LinearState, ModelState


class Inner(NamedTuple):
    conv: Tensor | None
    recurrent: LinearState


def example(rows: int = 3, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = (
        Inner(torch.randn(rows, 3, 8).bfloat16(), LinearState(torch.randn(rows, 2, 4, 5))),
        Inner(None, LinearState(torch.randn(rows, 2, 4, 5), torch.randn(rows, 2, 4))),
        Inner(torch.randn(rows, 0, 8), LinearState(torch.randn(rows, 1, 3, 2).double())),
    )
    return ModelState(layers, torch.arange(rows))


def assert_equal(a, b):
    tensors = dict(states.named_tensors(b))
    assert list(tensors) == [name for name, _ in states.named_tensors(a)]
    for name, x in states.named_tensors(a):
        assert x.dtype == tensors[name].dtype and torch.equal(x, tensors[name]), name


def test_names_say_where_a_tensor_is():
    names = [name for name, _ in states.named_tensors(example())]
    assert names[:2] == ["layers.0.conv", "layers.0.recurrent.S"]
    assert names[-1] == "position" and "layers.1.recurrent.z" in names
    assert "layers.1.conv" not in names


def test_map_keeps_the_types():
    doubled: Any = states.map_tensors(example(), lambda x: x * 2)
    types = [type(x) for x in (doubled, doubled.layers[0], doubled.layers[0].recurrent)]
    assert types == [ModelState, Inner, LinearState]
    assert doubled.layers[1].conv is None
    assert torch.equal(doubled.position, torch.tensor([0, 2, 4]))


def test_select_copies_rows_in_order():
    state = example()
    picked = states.select(state, [2, 0, 2])
    assert picked.position.tolist() == [2, 0, 2]
    S = picked.layers[0].recurrent.S
    assert torch.equal(S[0], S[2]) and torch.equal(S[1], state.layers[0].recurrent.S[0])
    S.zero_()
    assert state.layers[0].recurrent.S.abs().sum() > 0
    assert_equal(states.select(state, torch.tensor([1])), states.select(state, [1]))


def test_nbytes_counts_every_tensor():
    state = LinearState(torch.zeros(2, 3), torch.zeros(5, dtype=torch.float64))
    assert states.nbytes(state) == 2 * 3 * 4 + 5 * 8


def test_a_saved_state_reads_back_equal_with_any_number_of_rows(tmp_path):
    path = tmp_path / "book.state"
    for rows in (1, 4):
        state = example(rows)
        states.save(state, path, {"model": "abc", "note": [1, "ü"]})
        loaded, metadata = states.load(path, like=example(2))
        assert_equal(loaded, state)
        assert isinstance(loaded.layers[0], Inner)
        assert metadata == {"model": "abc", "note": [1, "ü"]}


def test_views_that_share_memory_can_be_saved(tmp_path):
    shared = torch.randn(1, 2, 4, 6)
    state = LinearState(shared[..., :-1], shared[..., -1])
    states.save(state, tmp_path / "s")
    assert_equal(states.load(tmp_path / "s", like=state)[0], state)


def test_a_changed_bit_anywhere_is_noticed(tmp_path):
    path = tmp_path / "s"
    state = ModelState((LinearState(torch.randn(1, 2, 3, 4)),), torch.tensor([7]))
    states.save(state, path, {"model": "abc"})
    good = path.read_bytes()
    for i in range(len(good)):
        for bit in (0, 5):
            damaged = bytearray(good)
            damaged[i] ^= 1 << bit
            path.write_bytes(bytes(damaged))
            with pytest.raises(StateError):
                states.load(path, like=state)


def test_a_file_cut_short_or_missing_is_noticed(tmp_path):
    path = tmp_path / "s"
    states.save(example(), path)
    data = path.read_bytes()
    for length in (0, 4, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(StateError, match="got an unreadable file"):
            states.load(path, like=example())
    with pytest.raises(StateError, match="got no file"):
        states.load(tmp_path / "nowhere", like=example())


def test_a_state_of_another_model_is_refused(tmp_path):
    path = tmp_path / "s"
    state = LinearState(torch.randn(2, 2, 4, 5))
    states.save(state, path)
    for other, message in (
        (LinearState(torch.zeros(2, 2, 4, 6)), r"got S \[2, 2, 4, 5\] .*expected \[2, 2, 4, 6\]"),
        (LinearState(torch.zeros(2, 2, 4, 5), torch.zeros(2, 2, 4)), "got no tensor z"),
        (LinearState(torch.zeros(2, 2, 4, 5).long()), "int64"),
        (LinearState(torch.zeros(2, 2, 4)), "got S"),
    ):
        with pytest.raises(StateError, match=message):
            states.load(path, like=other)
    states.load(path, like=LinearState(torch.zeros(1, 2, 0, 5)))  # 0 stands for any size


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "s"
    states.save(example(), path)
    with pytest.raises(TypeError):
        states.save(example(seed=1), path, {"not json": object()})
    assert_equal(states.load(path, like=example())[0], example())
