"""``gla eval RUN``: how well a run's model predicts its validation split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gla.cli.arguments import Run, call, print_json
from gla.errors import DataError


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(evaluate, "gla eval", argv)


def evaluate(
    run: Run,
    /,
    *,
    data: Path | None = None,
    batches: int = 0,
    best: bool = False,
    allow_tokenizer_change: bool = False,
    allow_nonfinite: bool = False,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Measure loss, perplexity and bits per byte of a run's newest checkpoint that verifies.

    Args:
        run: Folder of the run.
        data: Prepared data whose validation split is read; those of the run by default. They must
            have been prepared with the run's tokenizer.
        batches: Read only so many batches; 0 reads the whole split.
        best: Take the checkpoint with the lowest validation loss, which checkpoint.keep_best keeps.
        allow_tokenizer_change: Go on although the tokenizer is not the checkpoint's.
        allow_nonfinite: Load weights that are NaN or infinite.
        device: auto, cpu, cuda, cuda:N or mps.
        json: Print one JSON object.
    """
    figures = measure(
        run,
        data,
        batches,
        device,
        best=best,
        allow_tokenizer_change=allow_tokenizer_change,
        allow_nonfinite=allow_nonfinite,
    )
    if json:
        print_json(figures)
        return 0
    print(f"loss        {figures['loss']:.4f} nats per token")
    print(f"perplexity  {figures['ppl']:.2f} per token")
    print(f"bits/byte   {figures['bpb']:.4f}")
    print(f"read        {figures['tokens']:,} tokens, {figures['bytes']:,} bytes of text")
    return 0


def measure(
    run: Path,
    data: Path | None = None,
    batches: int = 0,
    device: str = "auto",
    *,
    best: bool = False,
    allow_tokenizer_change: bool = False,
    allow_nonfinite: bool = False,
) -> dict[str, float | int]:
    """Return ``loss``, ``ppl``, ``bpb``, ``tokens`` and ``bytes``; see ``gla eval --help``.

    Raises:
        ConfigError: No run there, or no such device.
        DataError: The data are missing, damaged, or made with another tokenizer.
        CheckpointError: No checkpoint verifies, or it was trained with another tokenizer.
        NumericsError: The weights are not finite.
    """
    from gla.data.loader import TokenDataset
    from gla.data.tokenizer import Tokenizer
    from gla.models.language_model import LanguageModel
    from gla.models.weights import find_checkpoint
    from gla.train.checkpoint import check_tokenizer
    from gla.train.config import load_recipe
    from gla.train.device import resolve_device, resolve_precision
    from gla.train.evaluate import evaluate
    from gla.train.writer import BEST

    place = resolve_device(device)
    config = load_recipe(run / "config.toml")
    tokenizer = Tokenizer.load(run / "tokenizer")
    folder = (data or Path(config.data.path)) / "val"
    dataset = TokenDataset.open(folder)
    if dataset.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{folder}: got tokens of tokenizer {dataset.tokenizer_fingerprint[:12]}…, expected "
            f"those of {run / 'tokenizer'} ({tokenizer.fingerprint[:12]}…); "
            f"fix with gla data prepare … --tokenizer {run / 'tokenizer'}"
        )
    checkpoint = find_checkpoint(run / "checkpoints" / BEST if best else run)
    if not allow_tokenizer_change:
        check_tokenizer(checkpoint, tokenizer.fingerprint)
    seq_len = config.eval.seq_len or config.train.seq_len
    return evaluate(
        LanguageModel.load(checkpoint, device=str(place), allow_nonfinite=allow_nonfinite),
        dataset,
        tokenizer.piece_bytes,
        seq_len=seq_len,
        batch_size=max(1, config.train.rows * config.train.seq_len // seq_len),
        batches=batches,
        precision=resolve_precision(config.train.precision, place),
    )
