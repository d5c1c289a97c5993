"""``gla resume RUN``: go on with a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gla.cli.arguments import Run, read_with_overrides


@dataclass(frozen=True)
class Options:
    """Go on with a run from its newest checkpoint that verifies, or from step 0 if it has none.

    Keys of its recipe can be overridden, and stay so: --train.steps 2000
    """

    run: Run
    """Folder of the run."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    options, overrides = read_with_overrides(Options, "gla resume", argv)

    from gla.cli.sample import sampler
    from gla.train.loop import resume

    result = resume(options.run, overrides=overrides, device=options.device, sampler=sampler)
    print(f"trained to step {result.step}; next: gla eval {options.run}")
    return 0
