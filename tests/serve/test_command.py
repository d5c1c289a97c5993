"""``gla serve`` as a process: it says where it is, answers, and leaves in order."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.torch import save_file

from gla.cli.main import main
from gla.storage import write_folder


@pytest.fixture
def run(session, tokenizer_dir, tmp_path):
    """A run folder with the model and tokenizer of the other tests."""
    folder = tmp_path / "tiny"
    weights = {k: v.clone() for k, v in session._decoder.model.state_dict().items()}

    def fill(checkpoint):
        save_file(weights, checkpoint / "model.safetensors")

    (folder / "checkpoints").mkdir(parents=True)
    write_folder(folder / "checkpoints" / "step-00000001", fill)
    model = '[model]\nd_model = 32\nvocab_size = 300\nlayers = ["gla", "window"]\n'
    (folder / "config.toml").write_text(model)
    shutil.copytree(tokenizer_dir, folder / "tokenizer")
    return folder


@contextlib.contextmanager
def serving(run, *options):
    """A server process and the port on which it listens."""
    command = [sys.executable, "-m", "gla", "serve", str(run), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving tiny on http://127.0.0.1:")
        yield process, int(line.rsplit(":", 1)[1])
    finally:
        process.kill()
        process.wait()


def ask(port, body):
    """A connection that has sent a greedy completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"prompt": "the", "temperature": 0, "save_state": "a", **body}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    return connection


@pytest.mark.slow
def test_serve_answers_and_saves_when_it_is_told_to_stop(run, session):
    with serving(run) as (process, port):
        answer = json.loads(ask(port, {"max_tokens": 5}).getresponse().read())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    fork = session.fork()
    fork.read("the")
    assert answer["choices"][0]["text"] == "".join(fork.generate(5, temperature=0))
    assert len(list((run / "states").glob("*.state"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_grace(run, number):
    with serving(run, "--max-tokens", "1000000", "--grace", "600") as (process, port):
        connection = ask(port, {"max_tokens": 1_000_000, "stream": True})
        response = connection.getresponse()
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("stopping: ")
        process.send_signal(number)
        events = response.read().decode()
        assert '"finish_reason": "shutdown"' in events and events.endswith("data: [DONE]\n\n")
        assert process.wait(30) == 0
    assert len(list((run / "states").glob("*.state"))) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--port", "70000"), ("--concurrency", "0"), ("--max-body", "0"), ("--max-states", "-1")],
)
def test_bad_options_are_refused_by_their_names(run, option, value, capsys):
    assert main(["serve", str(run), option, value]) == 2
    assert capsys.readouterr().err.startswith(f"gla: {option}: got {value}, expected ")


def test_an_address_that_is_taken_is_refused(run, server, capsys):
    assert main(["serve", str(run), "--port", str(server.port), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("gla: host, port: got 127.0.0.1:")
