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
    step: int | None = None
    """Go back to the checkpoint of this step, for example after a spike of the loss: newer ones are
    put aside, and metrics, curves and samples of later steps are dropped."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    allow_tokenizer_change: bool = False
    """Go on although the data have another tokenizer than the checkpoint."""
    allow_data_change: bool = False
    """Go on although the data have changed."""
    allow_nonfinite: bool = False
    """Load weights that are NaN or infinite."""


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    options, overrides = read_with_overrides(Options, "gla resume", argv)

    from gla.cli.sample import sampler
    from gla.train.distributed import is_main
    from gla.train.loop import Allow, resume

    result = resume(
        options.run,
        overrides=overrides,
        device=options.device,
        sampler=sampler,
        allow=Allow(
            options.allow_tokenizer_change, options.allow_data_change, options.allow_nonfinite
        ),
        step=options.step,
    )
    if is_main():
        print(f"trained to step {result.step}; next: gla eval {options.run}")
    return 0
