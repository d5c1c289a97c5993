"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch

import gla
from gla.cli import recipes
from gla.cli.main import COMMANDS

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def block(language: str, containing: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    (text,) = [b for b in found if containing in b]
    return text


def run(code: str, names: dict[str, object]) -> None:
    # Without this module's own "from __future__ import annotations".
    exec(compile(code, "README.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own text


def test_the_mixer_of_the_readme_is_a_whole_mixer() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    run(block("python", "register_mixer"), names)
    model = names["model"]
    assert isinstance(model, gla.LanguageModel)
    tokens = torch.randint(256, (1, 40))
    whole = model(tokens)
    first = model(tokens[:, :17])
    second = model(tokens[:, 17:], state=first.state)
    split = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(split, whole.logits, rtol=1e-4, atol=1e-4)
    packed = model(torch.cat([tokens, tokens[:, :9]], 1), cu_seqlens=torch.tensor([0, 40, 49]))
    torch.testing.assert_close(packed.logits[:, 40:], whole.logits[:, :9], rtol=1e-4, atol=1e-4)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_op_of_the_readme_runs() -> None:
    names: dict[str, object] = {}
    run(block("python", "log_decay"), names)
    assert isinstance(names["o_next"], torch.Tensor)
    assert names["o_next"].shape == (1, 1024, 4, 128)


def test_the_model_of_the_readme_runs() -> None:
    names: dict[str, object] = {}
    run(
        block("python", "gla.ModelConfig(d_model=256").split("model = gla.LanguageModel.load")[0],
        names,
    )
    assert isinstance(names["loss"], torch.Tensor)
    assert 7 < names["loss"].item() < 10


def test_the_model_table_of_the_readme_builds() -> None:
    table = tomllib.loads(block("toml", "[model]"))["model"]
    model = gla.LanguageModel(gla.ModelConfig(**table, vocab_size=300))
    assert len(model.blocks) == 8


def test_every_command_and_recipe_named_in_the_readme_exists() -> None:
    shell = "\n".join(re.findall(r"```\n(.*?)```", README, flags=re.DOTALL))
    commands = set(re.findall(r"^\s*(?:\.venv/bin/)?gla (\w+)", shell, flags=re.MULTILINE))
    assert commands and commands <= set(COMMANDS)
    listed = re.findall(r"^\| `([\w-]+)` \|", README, flags=re.MULTILINE)
    assert set(listed) == set(recipes.shipped())
