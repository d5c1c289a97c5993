"""``gla generate RUN``: continue a prompt, streamed as it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gla.cli.arguments import Run, call
from gla.errors import DataError


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(generate, "gla generate", argv)


def generate(
    run: Run,
    /,
    *,
    prompt: str = "",
    prompt_file: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    seed: int | None = None,
    device: str = "auto",
) -> int:
    """Continue a prompt with a run's model.

    The prompt may be of any length: the model reads it into a state of constant size.

    Args:
        run: Folder of the run, or of one of its checkpoints.
        prompt: Text to continue.
        prompt_file: UTF-8 file whose text comes before the prompt; "-" reads standard input.
        max_new_tokens: Stop after this many tokens, or at the end of a document.
        temperature: Below 1 sharpens, above 1 flattens; 0 always takes the likeliest token.
        top_p: Sample from the fewest likeliest tokens that have this probability together.
        top_k: Sample from this many likeliest tokens.
        seed: The same seed gives the same text; by default it differs from call to call.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    from gla.generate.session import Session
    from gla.train.device import resolve_device

    text = (read_text(prompt_file) if prompt_file else "") + prompt
    session = Session.open(run, device=str(resolve_device(device)))
    session.read(text)
    print(text if prompt_file is None else prompt, end="", flush=True)
    pieces = session.generate(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    return 0


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, or of standard input for "-".

    Raises:
        DataError: The bytes are not UTF-8.
    """
    try:
        return Path("/dev/stdin" if str(path) == "-" else path).read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        raise DataError(
            f"{path}: got a byte that is not UTF-8 at offset {reason.start}, expected UTF-8 text"
        ) from reason
