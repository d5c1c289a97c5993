"""``gla serve RUN``: completions over HTTP, with named states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gla.cli.arguments import Run, call
from gla.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Run the command with its arguments."""
    return call(serve, "gla serve", argv)


def serve(
    run: Run,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    states: Path | None = None,
    max_body: int = 8 << 20,
    max_tokens: int = 4096,
    max_states: int = 256,
    concurrency: int = 16,
    queue: int = 64,
    grace: int = 10,
    device: str = "auto",
    weights: str = "fp32",
    impl: str | None = None,
    compile: bool = False,
) -> int:
    """Serve a run: an OpenAI-style /v1/completions, named states, and a page to try it at /.

    There is no authentication: whoever reaches the address may use it. Ctrl-C or SIGTERM lets
    running requests end, saves all states and leaves; a second one ends the requests at once.
    Needs aiohttp: pip install 'gla[serve]'.

    Args:
        run: Folder of the run, or of one of its checkpoints.
        host: Address to listen on; only this machine reaches the default.
        port: 0 takes a free one; the address is printed.
        states: Folder of the named states, of no other server; RUN/states by default.
        max_body: Largest request, in bytes.
        max_tokens: Most tokens that a request may ask for, in each of its texts.
        max_states: Most named states.
        concurrency: Texts that are read or written at the same time.
        queue: Texts that may wait; more are refused with 429.
        grace: Seconds that running requests get at the end.
        device: auto, cpu, cuda, cuda:N or mps.
        weights: fp32, bf16 or int8; fewer bits are faster and less exact.
        impl: Form of the op in every mixer on it; as trained by default.
        compile: Compile the decode step; the first requests wait for it, half a minute each.
    """
    from gla.generate.session import Session
    from gla.serve.limits import Limits
    from gla.train.device import resolve_device

    try:
        from gla.serve.run import serve_forever
    except ImportError as reason:
        raise ConfigError(
            f"aiohttp: got {reason}, expected it installed; fix with pip install 'gla[serve]'"
        ) from None
    if not 0 <= port < 1 << 16:
        raise ConfigError(
            f"--port: got {port}, expected 0 to 65535; fix with --port 0, which takes a free one"
        )
    limits = Limits(
        max_body=max_body,
        max_tokens=max_tokens,
        max_states=max_states,
        concurrency=concurrency,
        queue=queue,
        grace=grace,
    )
    where = str(resolve_device(device))
    session = Session.open(run, device=where, weights=weights, impl=impl, compiled=compile)
    serve_forever(session, run.resolve().name, states or run / "states", limits, host, port)
    return 0
