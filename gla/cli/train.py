"""``gla train RECIPE``: train a model from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gla.cli import recipes
from gla.cli.arguments import Recipe, print_json, read_with_overrides


@dataclass(frozen=True)
class Options:
    """Train a model from a recipe, into a new folder.

    Every key of the recipe can be overridden: --train.steps 1000 --optim.lr 2e-3
    """

    recipe: Recipe
    """A TOML file, or the name of a recipe that ships with gla."""
    run: Path | None = None
    """Folder of the run, which must not hold one yet; runs/RECIPE by default."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dry_run: bool = False
    """Print parameters, tokens per step, memory and data sources; train nothing."""
    json: bool = False
    """With --dry-run: print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    options, overrides = read_with_overrides(Options, "gla train", argv)

    from gla.train.config import load_recipe

    path = recipes.find(options.recipe)
    config = load_recipe(path, overrides)
    if options.dry_run:
        from gla.train.plan import describe, plan

        figures = plan(config, options.device)
        print_json(figures) if options.json else print("\n".join(describe(figures)))
        return 0

    from gla.cli.sample import sampler
    from gla.train.distributed import is_main
    from gla.train.loop import train

    folder = options.run or Path("runs") / path.stem
    result = train(config, folder, device=options.device, sampler=sampler)
    if is_main():
        generate = f", or gla generate {folder}" if config.objective.kind == "next_token" else ""
        print(f"trained to step {result.step}; next: gla eval {folder}{generate}")
    return 0
