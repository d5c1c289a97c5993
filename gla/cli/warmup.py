"""``gla warmup RECIPE``: compile ahead what the first step of a recipe would compile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gla.cli import recipes
from gla.cli.arguments import Recipe, call
from gla.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from gla.train.config import RunConfig


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(warmup, "gla warmup", argv)


def warmup(recipe: Recipe, /) -> int:
    """Compile ahead what a recipe's first step would compile on this GPU; Triton keeps it.

    Args:
        recipe: A TOML file, or the name of a recipe that ships with gla.

    Raises:
        ConfigError: No GPU here, or no such recipe.
    """
    from gla.train.config import load_recipe
    from gla.train.device import resolve_device

    config = load_recipe(recipes.find(recipe))
    if config.objective.kind != "next_token":
        raise ConfigError(
            f"objective.kind: got {config.objective.kind!r}, expected 'next_token': encoders run "
            "no Triton kernels; fix with a recipe of a language model"
        )
    device = resolve_device("auto")
    if device.type != "cuda":
        raise ConfigError(
            "device: got no GPU, expected one: nothing compiles ahead on a CPU; fix by running it "
            "on the machine whose GPU will train"
        )
    start = time.perf_counter()
    pass_once(config, device)
    print(f"compiled in {time.perf_counter() - start:.1f} s")
    return 0


def pass_once(config: RunConfig, device: torch.device) -> float:
    """Return the loss of one micro-batch of random tokens, after a forward and a backward pass.

    Shapes and precision are those of the recipe's training steps.
    """
    import torch

    from gla.models.language_model import LanguageModel
    from gla.train.device import autocast, resolve_precision
    from gla.train.inputs import with_vocab_size

    vocab_size = config.model.vocab_size or config.data.new_vocab_size
    config = with_vocab_size(config, vocab_size)
    train = config.train
    model = LanguageModel(config.model).to(device)
    shape = (train.micro_batch_size or train.global_batch_size, train.seq_len)
    tokens = torch.randint(vocab_size, shape, device=device)
    with autocast(device, resolve_precision(train.precision, device)):
        loss = model.loss(tokens, tokens)
    loss.backward()
    return loss.item()
