"""``gla eval RUN``: how well a run's model does on its validation split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gla.cli.arguments import Run, call, print_json, require
from gla.errors import CheckpointError, ConfigError, DataError


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
    references: bool = False,
    allow_tokenizer_change: bool = False,
    allow_nonfinite: bool = False,
    device: str = "auto",
    impl: str | None = None,
    json: bool = False,
) -> int:
    """Measure a run's newest checkpoint that verifies, by what it was trained for.

    A language model: loss, perplexity and bits per byte. An encoder: loss and accuracy on masked
    tokens, or accuracy and macro-F1 on the classes of chunks.

    Args:
        run: Folder of the run.
        data: Prepared data whose validation split is read; those of the run by default. They must
            have been prepared with the run's tokenizer.
        batches: Read only so many batches; 0 reads the whole split.
        best: Take the checkpoint with the lowest validation loss, which checkpoint.keep_best keeps.
        references: Of a language model, also print the bits per byte that simple models of tokens
            and xz -9e reach on the whole split, xz alone and given the (last 64 MiB of the)
            training text first: about a minute for each 20 MB of it, 1.4 GB of memory.
        allow_tokenizer_change: Go on although the tokenizer is not the checkpoint's.
        allow_nonfinite: Load weights that are NaN or infinite.
        device: auto, cpu, cuda, cuda:N or mps.
        impl: Form of the op in every mixer on it; as trained by default.
        json: Print one JSON object.
    """
    require("batches", batches, 0)
    if references and batches:
        raise ConfigError(
            f"--references: got --batches {batches} beside it, expected the whole split, which is "
            "what the references are measured on; fix by leaving one of them out"
        )
    figures = measure(
        run,
        data,
        batches,
        device,
        best=best,
        impl=impl,
        allow_tokenizer_change=allow_tokenizer_change,
        allow_nonfinite=allow_nonfinite,
    )
    rows = reference_rows(run, data, figures) if references else {}
    if json:
        print_json({**figures, **({"references": rows} if rows else {})})
        return 0
    lines = [f"{name:<19} {row['bpb']:.4f} bits/byte" for name, row in rows.items()]
    print("\n".join([*describe(figures), *_unread(figures, batches), *lines]))
    return 0


def reference_rows(
    run: Path, data: Path | None, figures: Mapping[str, float | int]
) -> dict[str, dict[str, float]]:
    """Return what ``gla.compare.references`` measures on the data of a run, or on ``data``.

    Raises:
        ConfigError: The run's model has no bits per byte.
    """
    from gla.compare.references import references
    from gla.train.config import load_recipe

    if "bpb" not in figures:
        raise ConfigError(
            f"--references: got {run}, an encoder, expected a language model; fix by leaving it out"
        )
    return references(data or load_recipe(run / "config.toml").data.path, xz_after_train=True)


def describe(figures: Mapping[str, float | int]) -> list[str]:
    """Return the figures of ``measure`` as lines for a reader."""
    unit = (
        "chunk" if "chunks" in figures else "token asked for" if "targets" in figures else "token"
    )
    lines = [f"loss        {figures['loss']:.4f} nats per {unit}"]
    if "ppl" in figures:
        lines.append(f"perplexity  {figures['ppl']:.2f} per {unit}")
    if "bpb" in figures:
        lines.append(f"bits/byte   {figures['bpb']:.4f}")
    if "accuracy" in figures:
        lines.append(f"accuracy    {figures['accuracy']:.2%}")
    if "macro_f1" in figures:
        lines.append(f"macro-F1    {figures['macro_f1']:.4f}")
        lines.append(f"majority    {figures['majority']:.2%} right by the most frequent class")
    names = {"chunks": "chunks", "targets": "tokens asked for", "tokens": "tokens"}
    counts = [f"{figures[key]:,} {name}" for key, name in names.items() if key in figures]
    if "bytes" in figures:
        counts.append(f"{figures['bytes']:,} bytes of text")
    return [*lines, f"read        {', '.join(counts)}"]


def _unread(figures: Mapping[str, float | int], batches: int) -> list[str]:
    """Say why an encoder, or so many batches, did not read all of the split."""
    why = [f"--batches {batches}"] if batches else []
    why += ["only documents of a class are read"] if "chunks" in figures else []
    if not why or figures["tokens"] >= figures["split_tokens"]:
        return []
    return [f"            of {figures['split_tokens']:,} in the split: {', '.join(why)}"]


def measure(
    run: Path,
    data: Path | None = None,
    batches: int = 0,
    device: str = "auto",
    *,
    best: bool = False,
    impl: str | None = None,
    allow_tokenizer_change: bool = False,
    allow_nonfinite: bool = False,
) -> dict[str, float | int]:
    """Return ``loss``, what else ``gla eval --help`` names, and ``split_tokens``, of all the split.

    Raises:
        ConfigError: No run there, or no such device.
        DataError: The data are missing, damaged, or made with another tokenizer.
        CheckpointError: No checkpoint verifies, or it was trained with another tokenizer.
        NumericsError: The weights are not finite.
    """
    from gla.data.loader import TokenDataset
    from gla.data.tokenizer import Tokenizer
    from gla.models.language_model import LanguageModel
    from gla.models.weights import find_checkpoint, require_run
    from gla.train.checkpoint import check_tokenizer
    from gla.train.config import load_recipe
    from gla.train.device import resolve_device, resolve_precision
    from gla.train.evaluate import evaluate
    from gla.train.kept import BEST

    place = resolve_device(device)
    require_run(run)
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
    kept = run / "checkpoints" / BEST
    if best and not kept.exists():
        raise CheckpointError(
            f"{kept}: got none, expected the checkpoint with the lowest validation loss; fix by "
            "training with checkpoint.keep_best = true, or leave out --best"
        )
    checkpoint = find_checkpoint(kept if best else run)
    if not allow_tokenizer_change:
        check_tokenizer(checkpoint, tokenizer.fingerprint)
    precision = resolve_precision(config.train.precision, place)
    options: dict[str, Any] = {"impl": impl, "allow_nonfinite": allow_nonfinite}
    if config.objective.kind == "next_token":
        seq_len = config.eval.seq_len or config.train.seq_len
        figures = evaluate(
            LanguageModel.load(checkpoint, str(place), **options),
            dataset,
            tokenizer.piece_bytes,
            seq_len=seq_len,
            batch_size=max(1, config.train.rows * config.train.seq_len // seq_len),
            batches=batches,
            precision=precision,
        )
    else:
        from gla.models.encoder import Encoder
        from gla.train.encoder_objective import evaluate_encoder

        encoder = Encoder.load(checkpoint, str(place), **options)
        figures = evaluate_encoder(
            encoder, config, dataset, tokenizer, batches=batches, precision=precision
        )
    return {**figures, "split_tokens": dataset.num_tokens}
