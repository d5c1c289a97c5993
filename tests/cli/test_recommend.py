"""``gla doctor --recommend``: advice for every length and task, with what it rests on."""

from __future__ import annotations

import json

import pytest

from gla.cli.main import main
from gla.cli.recommend import TASKS, Task, recommend
from gla.models.config import ModelConfig
from gla.models.encoder import Encoder, EncoderConfig
from gla.models.language_model import LanguageModel

LENGTHS = [1, 512, 2048, 2049, 8192, 8193, 1_000_000]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_the_pattern_builds_and_all_advice_has_a_basis(task: Task, seq_len: int) -> None:
    figures = recommend(seq_len, task)
    options = {"d_model": 64, "vocab_size": 8, "layers": figures["layers"]}
    if task == "classify":
        Encoder(EncoderConfig(**options))
    else:
        LanguageModel(ModelConfig(**options))
    for rule in figures["advice"]:
        assert rule["basis"] in ("arithmetic", "published", "rule of thumb")
        assert bool(rule["source"]) or rule["basis"] != "published"
        assert rule["evidence"] and rule["advice"]


def test_the_length_and_the_task_decide():
    text = {(t, n): json.dumps(recommend(n, t)) for t in TASKS for n in (512, 100_000)}
    assert all("8,192" in text[t, 100_000] and "8,192" not in text[t, 512] for t in TASKS)
    assert "2507.06457" in text["recall", 512] and "2507.06457" not in text["language-model", 512]
    assert "linformer_causal" in text["recall", 512]
    assert "linformer_causal" not in text["classify", 512]


def test_the_arithmetic_by_hand():
    advice = recommend(6144, "language-model")["advice"]
    # 6144 * 512 against 12 * 512^2 is one half; 2 * 6144 * 512 * 2 bytes; 512 * 32 * 4 bytes
    assert advice[0]["advice"].startswith("full softmax takes about 50%")
    assert "caches 12.0 MiB a sequence, a linear one 0.06 MiB" in advice[1]["advice"]
    assert "does 25% of softmax" in recommend(1024, "classify")["advice"][1]["advice"]


def test_the_command(capsys):
    assert main(["doctor", "--recommend", "--seq-len", "16384", "--task", "recall"]) == 0
    text = capsys.readouterr().out
    assert text.startswith('recall, 16,384 tokens: start from layers = ["(gla, softmax)*4"]')
    assert "[published, arXiv 2312.06635]" in text
    assert main(["doctor", "--recommend", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq_len"] == 2048
    assert main(["doctor", "--recommend", "--seq-len", "0"]) == 2


@pytest.mark.parametrize(
    ("option", "named"),
    [(["--seq-len", "5"], "seq_len: got 5"), (["--task", "recall"], "task: got 'recall'")],
)
def test_what_only_advice_reads_is_refused_without_it(option, named, capsys):
    assert main(["doctor", *option]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        f"gla: {named} without --recommend, expected none; fix by adding --recommend\n"
    )
