"""A server in this process, in a thread of its own, and a plain HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from gla.data.corpus import Document
from gla.data.tokenizer import Tokenizer
from gla.generate.session import Session
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.serve.app import Server
from gla.serve.limits import Limits
from gla.serve.states import StateStore


class Address:
    """A running server, and how to ask it."""

    def __init__(self, port: int, states: Path) -> None:
        self.port = port
        self.states = states

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """The status and the JSON (or text) of an answer; ``body`` is bytes or becomes JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**sent, **(headers or {})})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text

    def complete(self, **body: Any) -> Any:
        """The answer to a completion that has to succeed."""
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed completion."""
        status, text = self.ask("POST", "/v1/completions", {**body, "stream": True})
        assert status == 200, text
        lines = text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = "the state forgets slowly while each key writes its value Grüße 漢字 😀 ".split()
    text = " ".join(words[i * i % len(words)] for i in range(3000)) + "\n"
    Tokenizer.train(iter([Document("text", text)]), 300, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="session")
def session(tokenizer: Tokenizer) -> Session:
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, vocab_size=300, layers=["gla", "window"])
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        model.head and model.head.weight[tokenizer.eos_id].zero_()  # pyright: ignore
    return Session(model, tokenizer)


@pytest.fixture
def start(session: Session, tmp_path: Path) -> Iterator[Callable[..., Address]]:
    """Return a function that starts a server; it is shut down at the end of the test."""
    ends: list[Callable[[], None]] = []

    def begin(session: Session = session, **limits: int) -> Address:
        loop = asyncio.new_event_loop()
        bounds = Limits(**{"grace": 1, **limits})
        store = StateStore(tmp_path / "states", session, bounds)

        async def up() -> web.AppRunner:
            runner = Server(session, "tiny", store, bounds, local=True).runner()
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner

        runner = loop.run_until_complete(up())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        def end() -> None:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

        ends.append(end)
        address = Address(runner.addresses[0][1], tmp_path / "states")
        address.end = lambda: ends.pop()()  # type: ignore[attr-defined]
        return address

    yield begin
    for end in ends:
        end()


@pytest.fixture
def server(start: Callable[..., Address]) -> Address:
    return start()
