"""The HTTP side: routes, checks of what comes in, streams, an orderly end.

GET  /                    a page to try it
GET  /health              texts at work and waiting
GET  /v1/models           the one model
POST /v1/completions      as OpenAI's, streamed or not; see ``protocol``
GET  /v1/states           names and positions
POST /v1/states           read a text and keep the state
DELETE /v1/states/NAME    forget one
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import resources
from typing import Any

from aiohttp import web

from gla.generate.session import Session
from gla.generate.writer import Request, Token
from gla.serve import protocol
from gla.serve.limits import Limits, Refusal
from gla.serve.protocol import CompletionBody, StateBody
from gla.serve.scheduler import Job, Scheduler
from gla.serve.states import StateStore

_HEAD_SECONDS = 30  # a connection that sends no request for longer is closed
_BODY_SECONDS = 30  # a body that takes longer to arrive is refused
_READ_SECONDS = 30  # a client that takes no piece of a stream for longer has left
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Runner(web.AppRunner):
    """Calls ``heed`` with each new connection."""

    def __init__(self, app: web.Application, heed: Callable[[Any], None], **options: Any) -> None:
        super().__init__(app, **options)
        self._heed = heed

    @property
    def server(self) -> Any:
        """What makes the protocol of a connection, once set up."""
        connect: Any = super().server

        def connection() -> Any:
            protocol = connect()
            self._heed(protocol)
            return protocol

        return connect and connection


class Server:
    """The application and what it works with.

    Args:
        session: at the begin mark; its forks do the work.
        name: of the model.
        store: the named states.
        limits: what to take on.
        local: whether only names of this machine may stand in the Host header; against pages of
            other sites that reach a local server through a name of their own.
    """

    def __init__(
        self, session: Session, name: str, store: StateStore, limits: Limits, local: bool
    ) -> None:
        self._session = session
        self._name = name
        self._store = store
        self._limits = limits
        self._local = local
        self._scheduler = Scheduler(limits)
        self._posts = 0  # requests whose body is in memory
        self._silent: dict[Any, asyncio.TimerHandle] = {}  # connections without a request so far

    def runner(self) -> web.AppRunner:
        """What runs the application. A client that leaves ends its jobs."""
        return _Runner(
            self.application(),
            self.heed,
            handler_cancellation=True,
            keepalive_timeout=_HEAD_SECONDS,
            shutdown_timeout=self._limits.grace + 5,
            access_log=None,
        )

    def heed(self, connection: Any) -> None:
        """Close a new connection that sends no request in time; aiohttp does it after the first."""

        def close() -> None:
            del self._silent[connection]
            connection.force_close()

        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(_HEAD_SECONDS, close)

    def application(self) -> web.Application:
        """The routes, ready to run; shutting it down saves all states."""
        app = web.Application(middlewares=[self._guard], client_max_size=self._limits.max_body)
        app.router.add_get("/", self._page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/states", self._list_states)
        app.router.add_post("/v1/states", self._make_state)
        app.router.add_delete("/v1/states/{name:.+}", self._delete_state)
        app.on_shutdown.append(self._end_requests)
        app.on_cleanup.append(self._save_states)  # when all answers have been sent
        return app

    def cut(self) -> None:
        """While the server stops: end the requests that still run at once."""
        self._scheduler.cut()

    async def _end_requests(self, app: web.Application) -> None:
        await asyncio.to_thread(self._scheduler.close, self._limits.grace)

    async def _save_states(self, app: web.Application) -> None:
        await asyncio.to_thread(self._store.close)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn refusals into JSON; let no page of another site use the browser of our user."""
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        try:
            if self._local and not is_local(_hostname(request.host)):
                asked = f"Host: got {request.host[:100]!r}, expected a local name"
                raise Refusal(403, f"{asked}; fix by asking localhost, or serve with --host")
            with self._counted(request):
                response = await handler(request)
        except Refusal as refusal:
            response = _refused(refusal)
        except web.HTTPRequestEntityTooLarge:
            limit = self._limits.max_body
            text = f"body: got more than {limit} bytes, expected at most that; fix by sending less"
            response = _refused(Refusal(413, text))
        except web.HTTPException as reason:
            asked = f"{request.method} {request.path[:100]!r}"
            text = f"request: got {asked} ({reason.reason}), expected what the README names; fix it"
            response = _refused(Refusal(reason.status, text))
        if not response.prepared:
            response.headers.update(_SECURITY_HEADERS)
        return response

    @contextlib.contextmanager
    def _counted(self, request: web.Request) -> Iterator[None]:
        """Bound the memory of bodies that arrive, and of answers that nobody takes."""
        if request.method != "POST":
            yield
            return
        if self._posts >= (most := self._limits.concurrency + self._limits.queue):
            raise Refusal(
                429,
                f"server: got more than {most} requests at once, expected fewer; fix by asking "
                "again later",
            )
        self._posts += 1
        try:
            yield
        finally:
            self._posts -= 1

    async def _page(self, request: web.Request) -> web.Response:
        page = resources.files("gla.serve").joinpath("page.html").read_text(encoding="utf-8")
        return web.Response(text=page, content_type="text/html")

    async def _health(self, request: web.Request) -> web.Response:
        working, waiting = self._scheduler.load()
        return web.json_response({"status": "ok", "working": working, "waiting": waiting})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._name, "object": "model", "owned_by": "gla"}
        return web.json_response({"object": "list", "data": [model]})

    async def _list_states(self, request: web.Request) -> web.Response:
        data = [kept._asdict() for kept in self._store.list()]
        return web.json_response({"object": "list", "data": data})

    async def _delete_state(self, request: web.Request) -> web.Response:
        self._store.delete(request.match_info["name"])
        return web.json_response({"deleted": True})

    async def _make_state(self, request: web.Request) -> web.Response:
        body = protocol.parse(StateBody, await self._body(request))
        self._store.check_room(body.name)
        work = _Work([None], body.text, self._opener(body.state), self._keeper(body.name))
        async with self._submitted(work):
            async for _, job in work.events():
                if isinstance(job, Job) and job.error is not None:
                    raise job.error
        position = work.jobs[0].session.position if work.jobs[0].session else 0
        return web.json_response(
            {"name": body.name, "position": position, "tokens_read": work.jobs[0].read}
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = protocol.parse(CompletionBody, await self._body(request))
        if body.model not in (None, self._name):
            raise Refusal(404, f"model: got {body.model[:100]!r}, expected {self._name!r}; fix it")
        prompts = protocol.prompts_of(body, self._limits)
        requests = protocol.requests_of(body, len(prompts), self._session.tokenizer.vocab_size)
        texts = [prompt for prompt in prompts for _ in range(body.n)]
        if body.save_state is not None:
            self._store.check_room(body.save_state)
        work = _Work(requests, texts, self._opener(body.state), self._keeper(body.save_state))
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._name,
        }
        async with self._submitted(work):
            if not body.stream:
                return await self._whole(body, work, head)
            try:
                return await self._stream(request, body, work, head)
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the client takes nothing") from None

    async def _whole(self, body: CompletionBody, work: _Work, head: dict[str, Any]) -> web.Response:
        tokens: list[list[Token]] = [[] for _ in work.jobs]
        async for index, event in work.events():
            if isinstance(event, Token):
                tokens[index].append(event)
            elif event.error is not None:
                raise event.error
        choices = []
        for index, job in enumerate(work.jobs):
            text = "".join(token.text for token in tokens[index])
            logprobs = self._logprobs(body, tokens[index], 0)
            choices.append(protocol.choice_object(index, text, job.finish, logprobs))
        return web.json_response({**head, "choices": choices, "usage": work.usage()})

    async def _stream(
        self, request: web.Request, body: CompletionBody, work: _Work, head: dict[str, Any]
    ) -> web.StreamResponse:
        """Server-sent events. They begin with the first event, so that a refusal has its status."""
        response: web.StreamResponse | None = None
        offsets = [0] * len(work.jobs)
        async for index, event in work.events():
            if isinstance(event, Job) and event.error is not None:
                if response is None:
                    raise event.error
                await _send(response, protocol.error_object(event.error))
                break
            if response is None:
                headers = {"Cache-Control": "no-cache", **_SECURITY_HEADERS}
                response = web.StreamResponse(headers=headers)
                response.content_type = "text/event-stream"
                await response.prepare(request)
            if isinstance(event, Job):
                choice = protocol.choice_object(index, "", event.finish, None)
            elif event.text or body.logprobs is not None:
                logprobs = self._logprobs(body, [event], offsets[index])
                choice = protocol.choice_object(index, event.text, None, logprobs)
                offsets[index] += len(event.text)
            else:
                continue
            await _send(response, {**head, "choices": [choice]})
        assert response is not None
        if body.stream_options is not None and body.stream_options.include_usage:
            await _send(response, {**head, "choices": [], "usage": work.usage()})
        await _write(response, b"data: [DONE]\n\n")
        return response

    def _logprobs(
        self, body: CompletionBody, tokens: list[Token], offset: int
    ) -> dict[str, Any] | None:
        if body.logprobs is None:
            return None
        tokenizer = self._session.tokenizer
        return protocol.logprobs_object(tokens, offset, lambda i: tokenizer.decode_bytes([i]))

    def _opener(self, name: str | None) -> Callable[[], Session]:
        return self._session.fork if name is None else lambda: self._store.get(name)

    def _keeper(self, name: str | None) -> Callable[[Session], None] | None:
        if name is None:
            return None
        return lambda session: self._store.put(name, session) and None

    async def _body(self, request: web.Request) -> bytes:
        # A page of another site cannot send this type without asking first, and is not answered.
        if request.content_type != "application/json":
            raise Refusal(
                415,
                f"Content-Type: got {request.content_type[:100]!r}, expected application/json; fix "
                "the header",
            )
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refusal(
                415, "Content-Encoding: got one, expected none; fix by sending plain JSON"
            )
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                return await request.read()
        except TimeoutError:
            raise Refusal(
                408,
                f"body: got no end of it in {_BODY_SECONDS} s, expected one; fix by sending less",
            ) from None

    @contextlib.asynccontextmanager
    async def _submitted(self, work: _Work) -> AsyncIterator[None]:
        """Run the jobs; whatever ends the request early, a client that left included, ends them."""
        self._scheduler.submit(work.jobs)
        try:
            yield
        finally:
            self._scheduler.cancel([job for job in work.jobs if job.finish is None])


class _Work:
    """The jobs of one request, and the events that the model's thread sends back."""

    def __init__(
        self,
        requests: list[Request] | list[None],
        texts: list[str] | str,
        opener: Callable[[], Session],
        keeper: Callable[[Session], None] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Token | Job]] = asyncio.Queue()
        texts = [texts] if isinstance(texts, str) else texts

        def sender(index: int) -> Callable[[Token | Job], None]:
            def send(event: Token | Job) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is gone, and so is the client
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

            return send

        self.jobs = [
            Job(opener, text, request, sender(index), keeper)
            for index, (text, request) in enumerate(zip(texts, requests, strict=True))
        ]

    async def events(self) -> AsyncIterator[tuple[int, Token | Job]]:
        """Tokens of all jobs as they come, with the job's index; each job itself at its end."""
        ended = 0
        while ended < len(self.jobs):
            index, event = await self._events.get()
            ended += isinstance(event, Job)
            yield index, event

    def usage(self) -> dict[str, int]:
        """Tokens of all jobs."""
        read, written = (sum(getattr(j, field) for j in self.jobs) for field in ("read", "written"))
        return protocol.usage_object(read, written)


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await _write(response, b"data: " + json.dumps(event).encode() + b"\n\n")


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(_READ_SECONDS):
        await response.write(data)


def is_local(host: str) -> bool:
    """Whether a name or address is one of this machine that no other site can take."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hostname(host: str) -> str:
    """The name in a Host header, without the port and the brackets of an IPv6 address."""
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.strip("[]").lower()


def _refused(refusal: Refusal) -> web.Response:
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
    return web.json_response(protocol.error_object(refusal), status=refusal.status, headers=headers)
