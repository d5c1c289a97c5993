"""A server from its start to its end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from aiohttp import web

from gla.errors import ConfigError
from gla.generate.session import Session
from gla.serve.app import Server, is_local
from gla.serve.limits import Limits
from gla.serve.states import StateStore


def serve_forever(
    session: Session, name: str, states: Path, limits: Limits, host: str, port: int
) -> None:
    """Serve until SIGINT or SIGTERM; then let requests end, save all states, and return.

    A second signal ends the requests at once.

    Prints one line with the address once it is open.

    Args:
        session: at the begin mark.
        name: of the model.
        states: folder of the named states.
        limits: what to take on.
        host: address to listen on.
        port: 0 takes a free one.

    Raises:
        ConfigError: the address cannot be had.
    """
    asyncio.run(_serve(session, name, states, limits, host, port))


async def _serve(
    session: Session, name: str, states: Path, limits: Limits, host: str, port: int
) -> None:
    store = StateStore(states, session, limits)
    server = Server(session, name, store, limits, local=is_local(host))
    runner = server.runner()
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if stop.is_set():
            server.cut()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except (OSError, UnicodeError) as reason:
            why = getattr(reason, "strerror", None) or reason
            raise ConfigError(
                f"host, port: got {host}:{port}, which cannot be opened ({why}), "
                "expected a free address of this machine; fix with --port"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {name} on http://{shown}:{runner.addresses[0][1]}", flush=True)
        await stop.wait()
        print("stopping: running requests end, states are saved", flush=True)
    finally:
        await runner.cleanup()
