"""Many clients at once against a server of its own, or one that runs: errors and latencies.

    python tools/load_serve.py RUN [--clients 64] [--requests 4] [--max-tokens 32] [--json]
    python tools/load_serve.py --url http://127.0.0.1:8000 …

Every second request is streamed. Latency is from sending to the last byte; "first" is to the first
piece of streamed text. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import aiohttp


async def ask(http: aiohttp.ClientSession, url: str, seed: int, tokens: int) -> dict[str, Any]:
    """One request; its times in seconds, its tokens, or its error."""
    stream = bool(seed % 2)
    body = {"prompt": "def f(x):\n" * (seed % 5 + 1), "max_tokens": tokens, "seed": seed}
    began, first = time.perf_counter(), None
    try:
        post = http.post(f"{url}/v1/completions", json={**body, "stream": stream})
        async with post as response:
            async for _ in response.content:
                first = first or time.perf_counter() - began
            error = None if response.status == 200 else f"status {response.status}"
    except (aiohttp.ClientError, TimeoutError) as reason:
        error = repr(reason)
    took = time.perf_counter() - began
    return {"seconds": took, "first": first if stream else None, "error": error}


async def load(url: str, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """Let each client send its requests one after another, all clients at once."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def client(number: int) -> list[dict[str, Any]]:
            return [await ask(http, url, number * requests + i, tokens) for i in range(requests)]

        began = time.perf_counter()
        per_client = await asyncio.gather(*map(client, range(clients)))
        seconds = time.perf_counter() - began
    answers = [answer for answers in per_client for answer in answers]
    times = [answer["seconds"] for answer in answers if answer["error"] is None]
    firsts = [answer["first"] for answer in answers if answer["first"] is not None]
    errors = [answer["error"] for answer in answers if answer["error"] is not None]
    return {
        "clients": clients,
        "requests": len(answers),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "requests_per_s": len(answers) / seconds,
        "latency_p50_s": _quantile(times, 50),
        "latency_p95_s": _quantile(times, 95),
        "first_p50_s": _quantile(firsts, 50),
        "first_p95_s": _quantile(firsts, 95),
    }


def _quantile(values: list[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", nargs="?", help="serve this run for the test")
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (options.run is None) == (options.url is None):
        parser.error("name a run or --url")
    arguments = (options.clients, options.requests, options.max_tokens)
    if options.url:
        figures = asyncio.run(load(options.url.rstrip("/"), *arguments))
    else:
        with tempfile.TemporaryDirectory() as states:
            command = [sys.executable, "-m", "gla", "serve", options.run, "--port", "0"]
            command += ["--states", states, "--queue", str(options.clients)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603
                assert server.stdout is not None
                url = server.stdout.readline().split()[-1]
                figures = asyncio.run(load(url, *arguments))
                server.terminate()
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:16} {value:.3f}" if isinstance(value, float) else f"{name:16} {value}")
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
