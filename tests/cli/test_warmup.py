"""``gla warmup``: one line without a GPU; the pass it makes is the recipe's."""

from __future__ import annotations

import math

import pytest
import torch

from gla.cli import recipes
from gla.cli.main import main
from gla.cli.warmup import pass_once
from gla.train.config import load_recipe


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "demo"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "device: got no GPU, expected one" in said and "; fix by" in said


def test_its_help_names_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    assert "RECIPE" in capsys.readouterr().out.splitlines()[0]


def test_an_encoder_has_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "encoder-stdlib"]) == 2
    assert "objective.kind: got 'classify'" in capsys.readouterr().err


def test_the_pass_is_that_of_the_recipe() -> None:
    sizes = [("train.seq_len", "32"), ("train.micro_batch_size", "1")]
    config = load_recipe(recipes.find("demo"), sizes)
    loss = pass_once(config, torch.device("cpu"))
    assert loss == pytest.approx(math.log(config.data.new_vocab_size), rel=0.2)
