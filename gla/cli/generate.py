"""``gla generate RUN``: read text of any length, continue it, keep the state for later."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gla.cli.arguments import Run, call, make_room
from gla.errors import ConfigError

if TYPE_CHECKING:
    from gla.generate.reading import Source
    from gla.generate.session import Session

INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(generate, "gla generate", argv)


def generate(
    run: Run,
    /,
    *,
    prompt: str = "",
    prompt_file: Path | None = None,
    stdin: bool = False,
    state_in: Path | None = None,
    state_out: Path | None = None,
    interactive: bool = False,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    stop: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = (),
    seed: int | None = None,
    device: str = "auto",
    weights: str = "fp32",
    impl: str | None = None,
    compile: bool = False,
) -> int:
    """Continue a prompt with a run's model.

    The prompt may be of any length: the model reads it into a state of constant size. What is read
    comes in this order: the saved state, the file, standard input, the prompt.

    Args:
        run: Folder of the run, or of one of its checkpoints.
        prompt: Text to continue.
        prompt_file: UTF-8 file to read first.
        stdin: Read UTF-8 text from standard input.
        state_in: Go on from a state that --state-out has written with the same run and weights.
        state_out: Write the state to this file at the end, also after Ctrl-C while text is written;
            folders that are not there are made.
        interactive: Take turns on the terminal; /help tells how.
        max_new_tokens: Stop after this many tokens, or at the end of a document.
        temperature: Below 1 sharpens, above 1 flattens; 0 always takes the likeliest token.
        top_p: Sample from the fewest likeliest tokens that have this probability together.
        top_k: Sample from this many likeliest tokens.
        min_p: Sample from tokens with at least this share of the likeliest's probability.
        repetition_penalty: Above 1 makes tokens that were written less likely.
        frequency_penalty: Above 0 does so for each time that they were written.
        stop: Strings before which the text ends.
        seed: The same seed gives the same text; by default it differs from call to call.
        device: auto, cpu, cuda, cuda:N or mps.
        weights: fp32, bf16 or int8; fewer bits are faster and less exact.
        impl: Form of the op in every mixer on it; as trained by default.
        compile: Compile the decode step; it takes half a minute and pays off in long texts.
    """
    from gla.cli.interrupt import interruptible
    from gla.generate.sampling import Sampling
    from gla.generate.session import Session
    from gla.generate.writer import Request, Writer
    from gla.train.device import resolve_device

    if interactive and stdin:
        raise ConfigError(
            "stdin: got --stdin with --interactive, which reads it too, expected one of them; fix "
            "with --prompt-file"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters that come out
        sys.stdout.reconfigure(errors="backslashreplace")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty)
    request = Request(max_new_tokens, sampling, stop, seed)
    if prompt_file is not None and not prompt_file.is_file():
        raise ConfigError(f"--prompt-file: got {prompt_file}, no file, expected one; fix the path")
    where = str(resolve_device(device))
    if state_out is not None:  # before anything is written for it
        make_room(state_out, "--state-out")
    session = Session.open(run, device=where, weights=weights, impl=impl, compiled=compile)
    Writer(request, session.tokenizer)  # refuses what does not fit before a long text is read
    if state_in is not None:
        session.restore(state_in)
    if prompt_file is not None:
        read_with_progress(session, prompt_file, prompt_file.stat().st_size, str(prompt_file))
    if stdin:
        read_with_progress(session, sys.stdin.buffer, None, "standard input")
    session.read(prompt)
    print(prompt, end="", flush=True)
    if interactive:
        from gla.cli.interactive import converse

        code = converse(session, request)
    else:
        with interruptible() as interrupted:
            try:
                for token in session.generate_tokens(request):
                    print(token.text, end="", flush=True)
                    if interrupted():
                        break
            finally:
                print(flush=True)
            code = INTERRUPTED if interrupted() else 0
    if state_out is not None:
        session.save(state_out)
    return code


def read_with_progress(session: Session, source: Source, size: int | None, name: str) -> None:
    """Read, with a bar on a terminal and a line at the end elsewhere, on stderr.

    Args:
        session: reads it.
        source: a file or a stream.
        size: bytes of it, if known.
        name: what to call it.
    """
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    began, tokens, done = time.perf_counter(), 0, 0
    columns = (
        TextColumn("reading {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )

    def speed() -> str:
        return f"{tokens:,} tokens, {tokens / (time.perf_counter() - began):,.0f}/s"

    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=size, speed="")

        def note(ids: list[int]) -> None:
            nonlocal tokens, done
            tokens += len(ids)
            done += int(session.tokenizer.piece_bytes[ids].sum())
            progress.update(task, completed=done, speed=speed())

        session.read(source, note)
    if not console.is_terminal:
        print(f"read {name}: {speed()}", file=sys.stderr)
