"""The benchmark of the presets, with sizes that take a second."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from gla.models.config import presets


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "bench_presets.py"
    spec = importlib.util.spec_from_file_location("bench_presets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = (
    "--d-model 32 --layers 1 --vocab-size 300 --state-lengths 64 256 --train-lengths 32 64 "
    "--seconds 0.05 --threads 1 --tokens 512 --seq-len 64 --rows 2"
).split()


def test_figures(bench, data, capsys, tmp_path):
    names = ["linear", "softmax", "window", "bigbird"]
    where = ["--data", str(data), "--runs", str(tmp_path)]
    bench.main(["--presets", *names, *where, "--json", *SMALL])
    found = json.loads(capsys.readouterr().out)
    bench.main(["--presets", "linear", *where, "--json", *SMALL])
    again = json.loads(capsys.readouterr().out)["rows"][0]["val_bits_per_byte"]
    assert again == found["rows"][0]["val_bits_per_byte"]
    assert len(list(tmp_path.iterdir())) == len(names)
    rows = {row["preset"]: row for row in found["rows"]}
    assert list(rows) == names
    for row in rows.values():
        assert 1 < row["val_bits_per_byte"] < 8
        assert all(value > 0 for key, value in row.items() if key != "preset")
    sizes = {n: (r["state_bytes_64"], r["state_bytes_256"]) for n, r in rows.items()}
    assert sizes["linear"][0] == sizes["linear"][1] and sizes["window"][0] == sizes["window"][1]
    # keys and values of 32 channels in fp32, and two positions
    assert sizes["softmax"] == (64 * 256 + 24, 256 * 256 + 24)


def test_the_state_after_many_tokens_is_as_large_as_a_real_one(bench):
    options = bench.arguments(SMALL)
    for name in bench.causal_presets(32):
        model = bench.make_model(name, options)
        tokens = bench.torch.arange(128).unsqueeze(0)
        small, large = (model(tokens[:, :length]).state for length in (32, 128))
        fake = bench.lengthen(small, 4)
        assert bench.nbytes(fake) == bench.nbytes(bench.lengthen(large, 1)), name
        assert fake.position.tolist() == [128]
        model.decode_step(tokens[:, 0], fake)


def test_a_table_for_readers_and_wrong_names(bench, capsys):
    bench.main(["--presets", "gla", *SMALL, "--tokens", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].split()[1] == "gla" and "val_bits" not in lines[0]
    with pytest.raises(SystemExit):
        bench.main(["--presets", "glaa"])
    assert "got 'glaa', expected some of linear" in capsys.readouterr().err
    assert set(bench.causal_presets(64)) <= set(presets())
