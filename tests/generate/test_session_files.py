"""Sessions from run folders, and their state files: exact, or refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import gla.generate.writer as writer_module
from gla.data.corpus import Document
from gla.data.tokenizer import Tokenizer
from gla.errors import ConfigError, DataError, StateError
from gla.generate.decoder import Decoder
from gla.generate.session import Session

from .conftest import make_model, training_text


@pytest.fixture
def run(make_run, model):
    return make_run(model)


@pytest.fixture
def saved(run, tmp_path):
    """A session in the middle of a word, and its file."""
    session = Session.open(run)
    session.read("abc de (fgh")
    path = tmp_path / "book.state"
    session.save(path)
    return session, path


def test_open_takes_a_run_or_a_checkpoint(run, model, tokenizer):
    want = list(Session(model, tokenizer).generate(10, seed=0))
    assert list(Session.open(run).generate(10, seed=0)) == want
    assert list(Session.open(run / "checkpoints" / "step-00000001").generate(10, seed=0)) == want
    assert list(Session.open(str(run), device="cpu").generate(10, seed=0)) == want


def test_a_loaded_session_goes_on_exactly(saved, run):
    session, path = saved
    loaded = Session.load(path, run=run)
    assert loaded.position == session.position
    for twin in (session, loaded):
        twin.read("ab cd")  # "fgh" goes on as "fghab"
    assert loaded.position == session.position
    assert list(loaded.generate(30, seed=1)) == list(session.generate(30, seed=1))
    assert torch.equal(loaded._state.logits, session._state.logits)


def test_saving_changes_nothing_and_a_loaded_session_saves_the_same(saved, run, tmp_path):
    session, path = saved
    twin = session.fork()
    Session.load(path, run).save(tmp_path / "again.state")
    again = Session.load(tmp_path / "again.state", run)
    texts = [list(each.generate(10, seed=0)) for each in (session, twin, again)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("words", [0, 100, 900])
def test_a_state_that_has_grown_is_loaded_whatever_this_session_has_read(run, tmp_path, words):
    session, other = Session.open(run), Session.open(run)
    session.read("abc de fgh " * 40)
    session.save(tmp_path / "long.state")
    other.read("abc " * words)  # its cache is smaller, or larger
    other.restore(tmp_path / "long.state")
    assert list(other.generate(9, seed=0)) == list(session.generate(9, seed=0))


def test_an_unfinished_character_is_kept(run, tokenizer, tmp_path, monkeypatch):
    ids = iter([tokenizer._byte_ids[byte] for byte in "😀".encode()])
    monkeypatch.setattr(writer_module, "sample", lambda *_: torch.tensor([next(ids)]))
    session = Session.open(run)
    assert list(session.generate(3)) == []
    session.save(tmp_path / "s")
    assert list(Session.load(tmp_path / "s", run).generate(1)) == ["😀"]


def test_every_flipped_byte_is_noticed(saved, run, tmp_path):
    _, path = saved
    data = path.read_bytes()
    broken = tmp_path / "broken.state"
    header = int.from_bytes(data[:8], "little")
    places = [*range(0, 8 + header, 97), *range(8 + header, len(data), len(data) // 15)]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1
        broken.write_bytes(flipped)
        with pytest.raises(StateError, match=r"broken\.state: got"):
            Session.load(broken, run)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_a_file_cut_short_is_noticed(saved, run, keep):
    _, path = saved
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(StateError, match=r"book\.state: got"):
        Session.load(path, run)


def test_a_place_that_cannot_be_written_is_a_state_error(saved, tmp_path):
    for place in (tmp_path / "nowhere" / "x", tmp_path):
        with pytest.raises(StateError, match=f"^{place}: got .* while writing, expected"):
            saved[0].save(place)


def test_a_missing_file_is_a_state_error(run, tmp_path):
    with pytest.raises(StateError, match=r"nowhere: got no"):
        Session.load(tmp_path / "nowhere", run)


def test_other_weights_are_refused(saved, make_run):
    with pytest.raises(StateError, match=r"got the state of model .*, expected .*; fix"):
        Session.load(saved[1], make_run(make_model(seed=1), "other"))


def test_another_architecture_is_refused(saved, make_run):
    config = """
[model]
d_model = 32
vocab_size = 320
layers = ["gla"]
"""
    with pytest.raises(StateError, match=r"book\.state: got"):
        Session.load(saved[1], make_run(make_model(config=config), "other", config))


def test_a_change_of_config_with_the_same_weights_is_refused(saved, run):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("window = 5", "window = 5\n") + "\n")
    Session.load(saved[1], run)  # the same config, spelled otherwise
    (run / "config.toml").write_text(text.replace("[model]\n", "[model]\nnorm_eps = 1e-3\n"))
    with pytest.raises(StateError, match="got the state of model"):
        Session.load(saved[1], run)


def test_a_state_goes_on_in_another_form(saved, run):
    session, path = saved
    loaded = Session.load(path, run, impl="recurrent")
    assert list(loaded.generate(9, temperature=0)) == list(session.generate(9, temperature=0))


def test_another_tokenizer_is_refused(saved, run):
    shutil.rmtree(run / "tokenizer")
    text = training_text().replace("a", "z")
    Tokenizer.train(iter([Document("text", text)]), 320, run / "tokenizer")
    with pytest.raises(StateError, match="got the state of tokenizer"):
        Session.load(saved[1], run)


def test_another_dtype_is_refused(run, model, tokenizer, tmp_path, monkeypatch):
    Session(make_model().to(torch.float64), tokenizer).save(tmp_path / "wide")
    monkeypatch.setattr(Decoder, "fingerprint", lambda self: "equal")
    with pytest.raises(StateError, match="got the state of"):
        Session.load(tmp_path / "wide", run)


def test_another_width_of_weights_is_named(saved, run, tmp_path):
    with pytest.raises(StateError, match="got the state of weights fp32, expected int8; fix"):
        Session.load(saved[1], run, weights="int8")
    for weights, other in (("int8", "bf16"), ("bf16", "fp32")):
        session = Session.open(run, weights=weights)
        session.save(tmp_path / "narrow.state")
        Session.load(tmp_path / "narrow.state", run, weights=weights)
        with pytest.raises(StateError, match=f"weights {weights}, expected {other}; fix"):
            Session.load(tmp_path / "narrow.state", run, weights=other)


def test_a_state_that_does_not_name_its_width_is_told_by_the_model(saved, run):
    from gla import state

    session, path = saved
    _, metadata = state.load(path, session._state)
    del metadata["weights"]
    state.save(session._state, path, metadata)
    assert Session.load(path, run).position == session.position
    with pytest.raises(StateError, match="got the state of model"):
        Session.load(path, run, weights="int8")


def test_a_state_that_no_session_wrote_is_refused(run, model, tmp_path):
    from gla import state

    state.save(model.init_state(1), tmp_path / "bare", json.loads("{}"))
    with pytest.raises(StateError, match="bare: got"):
        Session.load(tmp_path / "bare", run)


def test_what_is_missing_from_a_run_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match="nowhere: got no config"):
        Session.open(tmp_path / "nowhere")
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(DataError, match="tokenizer"):
        Session.open(run)
