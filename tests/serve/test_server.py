"""Completions and states over real HTTP, compared with sessions that work alone."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gla.generate.sampling import Sampling
from gla.generate.writer import Request

GREEDY: dict[str, Any] = {"temperature": 0}


def alone(session, prompt: str, count: int, **options: Any) -> str:
    fork = session.fork()
    fork.read(prompt)
    return "".join(fork.generate(count, **options))


def test_a_completion_equals_a_session(server, session):
    answer = server.complete(prompt="the state", max_tokens=12, **GREEDY)
    choice = answer["choices"][0]
    assert choice["text"] == alone(session, "the state", 12, **GREEDY) != ""
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    read = 1 + len(session.tokenizer.encode("the state"))
    usage = {"prompt_tokens": read, "completion_tokens": 12, "total_tokens": read + 12}
    assert answer["usage"] == usage
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"


def test_a_stream_is_the_same_text_in_pieces(server, session):
    body = {"prompt": "each key", "max_tokens": 20, "seed": 5, "temperature": 0.9, "top_p": 0.9}
    events = server.stream(**body, stream_options={"include_usage": True})
    text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
    want = alone(session, "each key", 20, seed=5, temperature=0.9, top_p=0.9)
    assert text == want == server.complete(**body)["choices"][0]["text"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]].count("length") == 1
    assert events[-1]["usage"]["completion_tokens"] == 20
    assert len(events) > 5


def test_prompts_and_choices_are_numbered_and_seeded(server, session):
    answer = server.complete(prompt=["the", "each key writes", ""], n=2, max_tokens=8, seed=3)
    texts = [choice["text"] for choice in answer["choices"]]
    prompts = ["the", "the", "each key writes", "each key writes", "", ""]
    assert texts == [alone(session, p, 8, seed=3 + i) for i, p in enumerate(prompts)]


def test_options_reach_the_sampler(server, session):
    options: dict[str, Any] = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.3}
    options |= {"frequency_penalty": 0.2, "temperature": 0.7, "top_p": 0.9, "seed": 1}
    whole = alone(session, "the", 30, **options)
    stop = whole[8:11]
    choice = server.complete(prompt="the", max_tokens=30, stop=[stop], **options)["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"


def test_log_probabilities(server, session):
    body = {"prompt": "the", "max_tokens": 6, "logprobs": 3, **GREEDY}
    got = server.complete(**body)["choices"][0]["logprobs"]
    fork = session.fork()
    fork.read("the")
    tokens = list(fork.generate_tokens(Request(6, Sampling(0), top_logprobs=3)))
    assert got["token_logprobs"] == pytest.approx([token.logprob for token in tokens])
    assert all(len(top) == 3 for top in got["top_logprobs"])
    assert all(
        max(top.values()) == pytest.approx(p)
        for top, p in zip(got["top_logprobs"], got["token_logprobs"], strict=True)
    )
    streamed = server.stream(**body)
    pieces = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [x for piece in pieces for x in piece[key]] == got[key]


def test_a_state_is_read_once_and_asked_twice(server, session):
    text = "the state forgets slowly while each key writes its value. " * 40
    status, made = server.ask("POST", "/v1/states", {"name": "a book", "text": text})
    assert status == 200
    assert made["position"] == 1 + len(session.tokenizer.encode(text)) == made["tokens_read"]
    status, more = server.ask(
        "POST", "/v1/states", {"name": "more", "state": "a book", "text": "each key"}
    )
    assert status == 200 and more["tokens_read"] == more["position"] - made["position"]
    for _ in range(2):
        answer = server.complete(prompt="the", state="a book", max_tokens=9, **GREEDY)
        assert answer["choices"][0]["text"] == alone(session, text + "the", 9, **GREEDY)
        assert answer["usage"]["prompt_tokens"] < 10
    names = [kept["name"] for kept in server.ask("GET", "/v1/states")[1]["data"]]
    assert names == ["a book", "more"]
    assert server.ask("DELETE", "/v1/states/a%20book")[0] == 200
    assert server.ask("DELETE", "/v1/states/a%20book")[0] == 404
    assert server.ask("POST", "/v1/completions", {"state": "a book"})[0] == 404


def test_states_outlive_the_server(start, session):
    first = start(states_in_memory=1)
    for name in ("../../etc/passwd", "b\x00c", "."):
        body = {"name": name, "text": "the state " + name.replace("\x00", "")}
        assert first.ask("POST", "/v1/states", body)[0] == 200
    begun = first.complete(prompt="the", max_tokens=5, save_state="talk", **GREEDY)
    first.end()
    files = sorted(path.name for path in first.states.iterdir())
    assert len(files) == 8 and all(len(name.split(".")[0]) == 40 for name in files)
    second = start()
    assert len(second.ask("GET", "/v1/states")[1]["data"]) == 4
    answer = second.complete(prompt="", state="talk", max_tokens=6, **GREEDY)
    text = begun["choices"][0]["text"] + answer["choices"][0]["text"]
    assert text == alone(session, "the", 11, **GREEDY)
    answer = second.complete(state="../../etc/passwd", max_tokens=5, **GREEDY)
    want = alone(session, "the state ../../etc/passwd", 5, **GREEDY)
    assert answer["choices"][0]["text"] == want


def test_a_damaged_state_is_refused_and_the_server_lives(start):
    first = start()
    assert first.ask("POST", "/v1/states", {"name": "x", "text": "the state"})[0] == 200
    first.end()
    (file,) = first.states.glob("*.state")
    file.write_bytes(file.read_bytes()[:-3])
    second = start()
    status, answer = second.ask("POST", "/v1/completions", {"state": "x"})
    assert status == 409 and "cannot be used" in answer["error"]["message"]
    assert second.ask("GET", "/health")[1]["status"] == "ok"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"", 400, "body"),
        (b"{", 400, "body"),
        (b"[1]", 400, "body"),
        (b"\xff\xfe", 400, "body"),
        (b"[" * 100_000, 400, "body"),
        (b'{"max_tokens": ' + b"9" * 10_000 + b"}", 400, "body"),
        (b'{"temperature": NaN}', 400, "body"),
        (b'{"temperature": 1e999}', 400, "temperature"),
        (b'{"prompt": "\\ud800"}', 400, "body"),
        ({"prompt": 3}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ["a"] * 17}, 400, "prompt"),
        ({"prompt": "a", "n": 17}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 4097}, 400, "max_tokens"),
        ({"max_tokens": "5"}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_k": 301}, 400, "top_k"),
        ({"top_k": 0}, 400, "top_k"),
        ({"min_p": 2}, 400, "min_p"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"seed": -1}, 400, "seed"),
        ({"seed": 2**70}, 400, "seed"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"echo": True}, 400, "echo"),
        ({"best_of": 3}, 400, "best_of"),
        ({"presence_penalty": 1.0}, 400, "presence_penalty"),
        ({"promt": "a"}, 400, "promt"),
        ({"model": "other"}, 404, "model"),
        ({"state": "none"}, 404, "state"),
        ({"state": ""}, 400, "state"),
        ({"save_state": "x" * 201}, 400, "save_state"),
        ({"save_state": "x", "n": 2}, 400, "save_state"),
        ({"state": "none", "stream": True}, 404, "state"),
    ],
)
def test_bad_requests_are_refused_in_one_line(server, body, status, named):
    got, answer = server.ask("POST", "/v1/completions", body)
    message = answer["error"]["message"]
    assert got == status and "\n" not in message and len(message) < 600
    assert message.startswith(f"{named}"), message


def test_other_refusals(server):
    assert server.ask("GET", "/../../etc/passwd")[0] == 404
    assert server.ask("GET", "/v1/completions")[0] == 405
    assert server.ask("POST", "/v1/states", {"name": "x"})[0] == 400
    body, plain = b'{"prompt": "a"}', {"Content-Type": "text/plain"}
    assert server.ask("POST", "/v1/completions", body, plain)[0] == 415
    assert server.ask("GET", "/health", headers={"Host": "evil.example:80"})[0] == 403
    assert server.ask("GET", "/health", headers={"Host": "[::1]:80"})[0] == 200
    status, answer = server.ask("POST", "/v1/completions", b" " * ((8 << 20) + 1))
    assert status == 413 and "8388608" in answer["error"]["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200_000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nZZ\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_the_server_lives(server, sent):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        try:
            connection.sendall(sent)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
    assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0]
    assert server.ask("GET", "/health")[0] == 200


def test_a_full_queue_refuses_clearly(start):
    server = start(concurrency=1, queue=2, max_tokens=4000)
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": "the", "max_tokens": 300, **GREEDY}
        answers = list(pool.map(lambda _: server.ask("POST", "/v1/completions", body), range(8)))
    by_status: dict[int, int] = {}
    for status, _ in answers:
        by_status[status] = by_status.get(status, 0) + 1
    assert set(by_status) == {200, 429} and by_status[200] >= 3
    refused = next(answer for status, answer in answers if status == 429)
    assert refused["error"]["message"].startswith("server: got more than 3 requests at once")
    texts = {a["choices"][0]["text"] for status, a in answers if status == 200}
    assert len(texts) == 1


def test_too_many_states_are_refused(start):
    server = start(max_states=1)
    assert server.ask("POST", "/v1/states", {"name": "a", "text": "x"})[0] == 200
    assert server.ask("POST", "/v1/states", {"name": "a", "text": "y"})[0] == 200
    assert server.ask("POST", "/v1/states", {"name": "b", "text": "x"})[0] == 409
    assert server.ask("POST", "/v1/completions", {"save_state": "b"})[0] == 409


def until(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_leaves_frees_its_place(start, session, monkeypatch):
    monkeypatch.setattr(session.tokenizer, "eos_id", -1)  # it writes without end
    server = start(concurrency=1, queue=1, max_tokens=1_000_000)
    body = json.dumps({"prompt": "the", "max_tokens": 1_000_000, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert server.ask("GET", "/health")[1]["working"] == 1
    until(lambda: server.ask("GET", "/health")[1]["working"] == 0)
    server.complete(prompt="the", max_tokens=2)


def test_shutting_down_ends_requests_and_saves_their_states(start, session, monkeypatch):
    monkeypatch.setattr(session.tokenizer, "eos_id", -1)  # it writes without end
    server = start(max_tokens=1_000_000)
    answers: list[Any] = []
    body = {"prompt": "the", "max_tokens": 1_000_000, "save_state": "long", **GREEDY}
    asking = threading.Thread(target=lambda: answers.append(server.complete(**body)))
    asking.start()
    until(lambda: server.ask("GET", "/health")[1]["working"] == 1)
    server.end()
    asking.join(20)
    (choice,) = answers[0]["choices"]
    assert choice["finish_reason"] == "shutdown" and choice["text"]
    (kept,) = start().ask("GET", "/v1/states")[1]["data"]
    assert kept["position"] == answers[0]["usage"]["total_tokens"]


def test_a_long_text_does_not_hold_up_who_writes(server):
    long = {"name": "long", "text": "the state forgets slowly " * 8_000}
    reading = threading.Thread(target=lambda: server.ask("POST", "/v1/states", long))
    reading.start()
    until(lambda: server.ask("GET", "/health")[1]["working"] == 1)
    server.complete(prompt="the", max_tokens=10)
    assert reading.is_alive()
    reading.join()


def test_many_clients_get_what_each_would_get_alone(start, session):
    server = start(concurrency=16, queue=64)
    seeds = range(64)

    def client(seed: int) -> str:
        body = {"prompt": "each key " * (seed % 7), "max_tokens": 4 + seed % 9, "seed": seed}
        if seed % 2:
            return server.complete(**body)["choices"][0]["text"]
        return "".join(event["choices"][0]["text"] for event in server.stream(**body))

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(client, seeds))
    for seed, text in zip(seeds, texts, strict=True):
        assert text == alone(session, "each key " * (seed % 7), 4 + seed % 9, seed=seed)


def test_the_page_is_whole(server):
    status, page = server.ask("GET", "/")
    assert status == 200 and page.startswith("<!doctype html>") and "http" not in page
    assert server.ask("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
