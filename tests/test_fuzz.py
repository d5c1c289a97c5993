"""Mutated files of every kind: our errors or a result, never a signal, never another exception.

Two hundred mutants of each kind every day, two thousand with ``-m slow``. Every second mutant of a
folder gets a manifest that fits it, so that what stands behind the hashes is reached too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import gla
from gla import state as states
from gla import storage
from gla.data.corpus import Document
from gla.data.loader import Loader
from gla.data.prepare import prepare
from gla.data.shards import TokenDataset
from gla.data.tokenizer import Tokenizer
from gla.errors import GlaError
from gla.models.language_model import LanguageModel
from gla.train import checkpoint
from gla.train.config import build, load_recipe

COUNTS = [200, pytest.param(2000, marks=pytest.mark.slow)]
ODD = ["nan", "-1", "1e999", "[[", "'''", '"', "\x00", "\ud7ff", "9" * 400, "{}", "=", "\n", "a.b"]
VALUES = [None, True, -1, 0, 2**70, 1e308, float("nan"), "", "x", [], {}, [[1]], {"a": 1}, "1e-3"]
Attempt = Callable[[random.Random], object]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a few places of some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(out) + 1)
        stop = min(len(out), at + rng.choice([1, 1, 4, 30, 1000]))
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at:stop] = rng.randbytes(stop - at)
            case 2:
                del out[at:stop]
            case 3:
                out[at:at] = out[at:stop]
            case 4:
                del out[at:]
            case _:
                out[at:at] = rng.choice(ODD).encode("utf-8", "surrogatepass")
    return bytes(out)


def attempt_all(attempt: Attempt, count: int) -> None:
    """Attempt each seed in a process of its own kind: a signal would end only that."""
    log_read, log_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(log_read)
        code, seed = 0, -1
        try:
            for seed in range(count):
                try:
                    attempt(random.Random(seed))
                except GlaError as reason:
                    assert str(reason)
        except BaseException:
            code = 1
            os.write(log_write, f"seed {seed}\n{traceback.format_exc()}".encode()[-8000:])
        os._exit(code)
    os.close(log_write)
    with os.fdopen(log_read) as log:
        said = log.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, said or f"signal {-code}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, prepared data, a checkpoint and a state, all small."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("fuzz")
    rng = random.Random(0)
    texts = [" ".join(rng.choices("the state reads each key once".split(), k=9)) for _ in range(40)]
    Tokenizer.train(iter([Document(str(i), t) for i, t in enumerate(texts)]), 280, place / "tok")
    (place / "text").mkdir()
    for i, text in enumerate(texts):
        (place / "text" / f"{i}.txt").write_text(f"{i} {text}")
    prepare(place / "text", place / "tok", place / "data", 0.2)
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(20)[None]
    model.loss(tokens, tokens).backward()
    optimizer.step()
    facts = checkpoint.TrainerFacts(
        step=1,
        tokens=20,
        window={"loss": 1.0},
        validation={"loss": 2.0},
        best=(1, 2.0),
        updater={"scale": 1.0, "spikes": [1.0, 1.0, 1.0]},
        clock={"seconds": 1.0},
        data={"train": "x"},
    )
    copy = checkpoint.snapshot(model, optimizer, facts, recipe_text())
    checkpoint.write(place / "step-00000001", copy)
    with torch.no_grad():
        _, state = model.prefill(tokens)
    states.save(state, place / "x.state", {"a": 1})
    return place


def small_model() -> LanguageModel:
    return LanguageModel(gla.ModelConfig(d_model=8, vocab_size=280, layers=["gla", "window"]))


def recipe_text() -> str:
    return build(
        {
            "model": {"d_model": 8, "vocab_size": 280, "layers": ["gla", "window"]},
            "data": {"path": "data", "sources": ["a", "b"], "weights": [1.0, 2.0]},
            "train": {"steps": 5, "micro_batch_size": 2},
            "optim": {"groups": [{"pattern": "gate", "lr_factor": 0.5}]},
        }
    ).to_toml()


def mutated_tables(rng: random.Random) -> bytes:
    """A recipe with another value, key or table somewhere."""
    tables: dict[str, Any] = tomllib.loads(recipe_text())
    for _ in range(rng.choice([1, 1, 2])):
        table: Any = tables
        while True:
            key = rng.choice(list(table)) if table else "x"
            if isinstance(table.get(key), dict) and table[key] and rng.random() < 0.8:
                table = table[key]
                continue
            break
        match rng.randrange(3):
            case 0:
                table.pop(key, None)
            case 1:
                table[rng.choice(["x", "lr", "layers", ""]) + key[:2]] = rng.choice(VALUES[1:])
            case _:
                table[key] = rng.choice(VALUES[1:])
    try:
        return tomli_w.dumps(tables).encode()
    except (TypeError, ValueError):
        return b"x"


def mutate_folder(source: Path, target: Path, rng: random.Random, spared: tuple[str, ...]) -> None:
    """Copy a folder with one mutated file; every second time its manifest fits."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    reseal = rng.random() < 0.5
    spared = (*spared, storage.MANIFEST) if reseal else ()
    files = sorted(p for p in target.iterdir() if p.name not in spared)
    file = rng.choice(files)
    if file.suffix == ".json" and rng.random() < 0.5:
        tables = json.loads(file.read_text())
        tables[rng.choice(list(tables))] = rng.choice(VALUES)
        file.write_text(json.dumps(tables))
    else:
        file.write_bytes(mutate(file.read_bytes(), rng))
    if reseal:
        storage.write_manifest(target)


@pytest.mark.parametrize("count", COUNTS)
def test_recipes(place: Path, tmp_path: Path, count: int) -> None:
    def attempt(rng: random.Random) -> None:
        whole = recipe_text().encode()
        data = mutate(whole, rng) if rng.random() < 0.5 else mutated_tables(rng)
        (tmp_path / "r.toml").write_bytes(data)
        config = load_recipe(tmp_path / "r.toml")
        (tmp_path / "again.toml").write_text(config.to_toml())
        assert load_recipe(tmp_path / "again.toml") == config

    attempt_all(attempt, count)


@pytest.mark.parametrize("count", COUNTS)
def test_tokenizers(place: Path, tmp_path: Path, count: int) -> None:
    def attempt(rng: random.Random) -> None:
        name = rng.choice(["tokenizer.model", "tokenizer.json"])
        for file in (place / "tok").iterdir():
            data = file.read_bytes()
            (tmp_path / file.name).write_bytes(mutate(data, rng) if file.name == name else data)
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.decode(tokenizer.encode("each key \x00 é")) == "each key \x00 é"

    attempt_all(attempt, count)


@pytest.mark.parametrize("count", COUNTS)
def test_shards(place: Path, tmp_path: Path, count: int) -> None:
    def attempt(rng: random.Random) -> None:
        mutate_folder(place / "data/train", tmp_path / "x", rng, ())
        loader = Loader(TokenDataset.open(tmp_path / "x"), 16)
        for position in range(loader.num_samples):
            batch = loader.batch(position, 1)
            assert (
                0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < loader.dataset.vocab_size
            )

    attempt_all(attempt, count)


@pytest.mark.parametrize("count", COUNTS)
def test_checkpoints(place: Path, tmp_path: Path, count: int) -> None:
    model = small_model()

    def attempt(rng: random.Random) -> None:
        mutate_folder(place / "step-00000001", tmp_path / "x", rng, ("config.toml",))
        storage.verify_folder(tmp_path / "x")
        checkpoint.load(tmp_path / "x", model, torch.optim.AdamW(model.parameters()))
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        if rng.random() < 0.2:
            LanguageModel.load(tmp_path / "x")

    attempt_all(attempt, count)


@pytest.mark.parametrize("count", COUNTS)
def test_states(place: Path, tmp_path: Path, count: int) -> None:
    like = small_model().init_state(1)
    saved, facts = states.load(place / "x.state", like)

    def attempt(rng: random.Random) -> None:
        (tmp_path / "x").write_bytes(mutate((place / "x.state").read_bytes(), rng))
        loaded, said = states.load(tmp_path / "x", like)
        pairs = zip(states.tensors(loaded), states.tensors(saved), strict=True)
        assert said == facts and all(torch.equal(a, b) for a, b in pairs)

    attempt_all(attempt, count)


def test_two_hundred_of_two_hundred_flipped_bits_are_noticed(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "step-00000001", tmp_path / "x")
    rng = random.Random(0)
    files = [p for p in sorted((tmp_path / "x").iterdir()) if p.name != storage.MANIFEST]
    files += [tmp_path / "x" / storage.MANIFEST]
    noticed = 0
    for _ in range(200):
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            storage.verify_folder(tmp_path / "x")
        except GlaError:
            noticed += 1
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
    storage.verify_folder(tmp_path / "x")
    assert noticed == 200


def test_the_fuzzer_finds_what_it_looks_for() -> None:
    def raises(_: random.Random) -> None:
        raise KeyError("x")

    def dies(_: random.Random) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match="KeyError"):
        attempt_all(raises, 1)
    with pytest.raises(AssertionError, match="signal 9"):
        attempt_all(dies, 1)
