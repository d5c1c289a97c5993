"""What clients, processes and disks can do against a server, and what it must not do to others."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from gla import storage
from gla.errors import ConfigError, StateError
from gla.generate.writer import Request, Token
from gla.serve import app, protocol
from gla.serve.limits import Limits, Refusal
from gla.serve.protocol import CompletionBody
from gla.serve.scheduler import Job, Scheduler
from gla.serve.states import StateStore

from .test_server import until

ENDLESS = {"prompt": "the", "max_tokens": 1_000_000, "stream": True}


@pytest.fixture
def endless(session, monkeypatch):
    """The model never ends a text."""
    monkeypatch.setattr(session.tokenizer, "eos_id", -1)


def send(server, body, size=None):
    """A connection that has sent a completion, or only the first ``size`` bytes of its body."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    connection.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[:size])
    return connection


def load(server):
    health = server.ask("GET", "/health")[1]
    return health["working"], health["waiting"]


def test_a_client_that_leaves_the_queue_frees_its_place(start, endless):
    server = start(concurrency=1, queue=1, max_tokens=1_000_000)
    with send(server, ENDLESS) as working:
        assert working.recv(100).startswith(b"HTTP/1.1 200")
        with send(server, ENDLESS):
            until(lambda: load(server) == (1, 1))
        until(lambda: load(server) == (1, 0))


def test_a_request_that_could_never_find_room_is_refused_for_good(start, endless):
    server = start(concurrency=1, queue=2, max_tokens=1_000_000)
    status, answer = server.ask("POST", "/v1/completions", {"n": 4})
    assert status == 400 and "expected 1 to 3 texts" in answer["error"]["message"]
    with send(server, ENDLESS) as working:
        assert working.recv(100).startswith(b"HTTP/1.1 200")
        status, answer = server.ask("POST", "/v1/completions", {"n": 3})
    assert status == 429 and answer["error"]["message"].startswith("server: got more than 1 texts")


def test_bodies_that_do_not_arrive_are_bounded_in_number(start):
    server = start(concurrency=1, queue=1)
    with send(server, ENDLESS, 5), send(server, ENDLESS, 5):
        until(lambda: server.ask("POST", "/v1/completions", {"max_tokens": 0})[0] == 429)
        assert load(server) == (0, 0)
    until(lambda: server.ask("POST", "/v1/completions", {"max_tokens": 0})[0] == 200)


def test_a_request_that_does_not_arrive_is_not_waited_for(start, endless, monkeypatch):
    monkeypatch.setattr(app, "_HEAD_SECONDS", 0.5)
    server = start(max_tokens=1_000_000)
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with send(server, ENDLESS) as working:
        assert working.recv(100).startswith(b"HTTP/1.1 200")
        for sent in (b"", asked[:30], asked + asked[:30]):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
                slow.sendall(sent)
                answer = b""
                while piece := slow.recv(1000):
                    answer += piece
                assert answer.count(b"HTTP/1.1 200") == (len(sent) > len(asked))  # and closed
        assert load(server) == (1, 0) and working.recv(100)  # asked long ago, and not cut


def test_a_client_that_takes_nothing_is_let_go(start, endless, monkeypatch):
    monkeypatch.setattr(app, "_READ_SECONDS", 0.3)
    monkeypatch.setattr(app.Server, "_logprobs", lambda *_: {"much": "x" * 2_000_000})
    server = start(max_tokens=1_000_000)
    with send(server, {**ENDLESS, "logprobs": 1}):
        until(lambda: load(server) == (1, 0))
        until(lambda: load(server) == (0, 0))
    assert server.complete(prompt="the", max_tokens=1)["usage"]["completion_tokens"] <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1e-308},
        {"frequency_penalty": -1e308},
        {"frequency_penalty": 1e308, "temperature": 1e-300},
        {"temperature": 1e308, "min_p": 1.0},
    ],
)
def test_extreme_options_are_answered(server, options):
    answer = server.complete(prompt="the", max_tokens=10, seed=1, **options)
    assert 0 <= answer["usage"]["completion_tokens"] <= 10


def test_a_word_without_end_is_read_like_any_text(server):
    status, answer = server.ask(
        "POST", "/v1/completions", {"prompt": "a" * 20_000, "max_tokens": 1}
    )
    assert status == 200 and answer["usage"]["prompt_tokens"] > 20_000 / 64
    assert load(server) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"1," * 1000 + b"1]}",
        b'{"stop": [' + b"1," * 1000 + b"1]}",
        json.dumps({"logit_bias": dict.fromkeys(map(str, range(1000)), "a")}).encode(),
        json.dumps(dict.fromkeys(map(str, range(1000)), "a")).encode(),
    ],
)
def test_of_a_thousand_faults_one_is_described(body, monkeypatch):
    counts = []
    describe = protocol.describe_faults

    def count(kind, error):
        counts.append(error.error_count())
        return describe(kind, error)

    monkeypatch.setattr(protocol, "describe_faults", count)
    with pytest.raises(Refusal) as refusal:
        protocol.prompts_of(protocol.parse(CompletionBody, body), Limits())
    assert sum(counts) <= 1 and len(refusal.value.message) < 600


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prompt", [1, 2], "[1, 2], expected text, or a list of texts"),
        ("prompt", None, "None, expected text, or a list of texts"),
        ("stop", ["a", 2], "['a', 2], expected text, or a list of at most 16 texts"),
    ],
)
def test_a_field_of_several_types_is_told_of_once(field, value, said):
    with pytest.raises(Refusal) as refusal:
        protocol.parse(CompletionBody, json.dumps({field: value}).encode())
    assert refusal.value.message.startswith(f"{field}: got {said}")


def test_of_two_tokens_spelled_alike_the_likelier_is_told():
    token = Token(7, b"a", "a", -0.1, ((7, -0.1), (8, -2.5), (9, -3.0)))
    spelled = {7: b"a", 8: b"a", 9: b"b"}
    (top,) = protocol.logprobs_object([token], 0, spelled.__getitem__)["top_logprobs"]
    assert top == {"a": -0.1, "b": -3.0}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "127.0.0.2:80", "[::1]:80"])
def test_names_of_this_machine_are_answered(server, host):
    assert server.ask("GET", "/health", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "other", ["", "evil.example", "127.0.0.1.evil.example", "192.0.2.1", "127.1"]
)
def test_other_names_are_not(server, other):
    assert server.ask("GET", "/health", headers={"Host": other})[0] == 403


def test_a_packed_body_is_refused_unread(server):
    packed = {"Content-Encoding": "gzip"}
    assert server.ask("POST", "/v1/completions", b"\x1f\x8b\x08\x00", packed)[0] == 415


@pytest.mark.parametrize("name", [".", "..", "../x", "a/b", "ü?#%2F"])
def test_a_state_of_any_name_can_be_deleted(server, name):
    assert server.ask("POST", "/v1/states", {"name": name, "text": "the"})[0] == 200
    path = "".join(f"%{byte:02X}" for byte in name.encode())
    assert server.ask("DELETE", f"/v1/states/{path}")[0] == 200
    assert server.ask("GET", "/v1/states")[1]["data"] == []


def test_a_fault_in_reading_ends_one_request(session):
    scheduler, ended = Scheduler(Limits()), []

    def broken():
        raise RuntimeError("broken")

    jobs = [Job(open, "the", Request(3, seed=0), ended.append) for open in (broken, session.fork)]
    scheduler.submit(jobs)
    until(lambda: {id(job) for job in ended if isinstance(job, Job)} == set(map(id, jobs)))
    scheduler.close(1)
    assert [job.error and job.error.status for job in jobs] == [500, None]
    assert jobs[1].finish is not None


def test_a_state_that_cannot_be_kept_does_not_stop_the_end(session, endless):
    scheduler, ended = Scheduler(Limits()), []

    def broken(session):
        raise RuntimeError("broken")

    jobs = [
        Job(session.fork, "the", Request(1_000_000), ended.append, done)
        for done in (broken, lambda session: None)
    ]
    scheduler.submit(jobs)
    until(lambda: len({id(event) for event in ended}) > 4)
    closing = threading.Thread(target=scheduler.close, args=(60,))
    closing.start()
    scheduler.cut()  # ends the grace
    closing.join(10)
    assert not closing.is_alive()
    assert {id(event) for event in ended if isinstance(event, Job)} == set(map(id, jobs))


@pytest.fixture
def make_store(session, tmp_path):
    return lambda: StateStore(tmp_path / "states", session, Limits())


def test_two_servers_do_not_share_a_folder(make_store, tmp_path):
    first = make_store()
    with pytest.raises(ConfigError, match=r"^states: got .*states, where process \d+ keeps"):
        make_store()
    first.close()
    make_store().close()
    assert list((tmp_path / "states").iterdir()) == []


def test_descriptions_that_are_none_are_not_offered(make_store, session, tmp_path):
    store = make_store()
    store.put("a", session)
    store.close()
    (file,) = (tmp_path / "states").glob("*.json")
    good = file.read_bytes()
    texts = [b'{"name": 5, "position": 1}', b"[" * 100_000, good.replace(b"1", b'"1"')]
    texts += [b'["a", 1]', good.replace(b'"a"', b'"\\ud800"'), b"\xff"]
    for i, text in enumerate(texts):
        (tmp_path / "states" / f"{i}.json").write_bytes(text)
    (tmp_path / "states" / "copy.json").write_bytes(good)
    store = make_store()
    assert [kept.name for kept in store.list()] == ["a"]
    file.write_bytes(texts[2])
    store.close()
    store = make_store()
    assert store.list() == []
    store.close()


def test_what_a_full_disk_refused_is_written_at_the_end(make_store, session, monkeypatch):
    write, full = storage.write_bytes_atomic, True

    def refuse(path, data):
        if full:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(storage, "write_bytes_atomic", refuse)
    store = make_store()
    for name in ("a", "b"):
        store.put(name, session)
    until(lambda: all(future.done() for future in store._unwritten.values()))
    full = False
    store.close()
    store = make_store()
    assert [kept.name for kept in store.list()] == ["a", "b"]
    assert store.get("b").position == session.position
    full = True
    store.put("c", session)
    with pytest.raises(StateError, match="No space left"):
        store.close()


def test_a_closed_store_refuses_and_loses_nothing(make_store, session, tmp_path):
    store = make_store()
    store.put("a", session)
    store.close()
    for late in (lambda: store.delete("a"), lambda: store.put("b", session)):
        with pytest.raises(Refusal, match="while it stops"):
            late()
    assert [kept.name for kept in store.list()] == ["a"]
    assert len(list((Path(tmp_path) / "states").glob("*.state"))) == 1
