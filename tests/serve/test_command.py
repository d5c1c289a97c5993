"""``gla serve`` as a process: it says where it is, answers, and leaves in order."""

from __future__ import annotations

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


@pytest.mark.slow
def test_serve_answers_and_saves_when_it_is_told_to_stop(run, session):
    command = [sys.executable, "-m", "gla", "serve", str(run), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving tiny on http://127.0.0.1:")
        connection = http.client.HTTPConnection("127.0.0.1", int(line.rsplit(":", 1)[1]))
        body = {"prompt": "the", "max_tokens": 5, "temperature": 0, "save_state": "a"}
        sent = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), sent)
        answer = json.loads(connection.getresponse().read())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, process.stderr.read()
    finally:
        process.kill()
    fork = session.fork()
    fork.read("the")
    assert answer["choices"][0]["text"] == "".join(fork.generate(5, temperature=0))
    assert len(list((run / "states").glob("*.state"))) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--port", "70000"], "port"), (["--concurrency", "0"], "concurrency")],
)
def test_bad_options_are_refused(run, options, named, capsys):
    assert main(["serve", str(run), *options]) == 2
    assert capsys.readouterr().err.startswith(f"gla: {named}: got ")


def test_an_address_that_is_taken_is_refused(run, server, capsys):
    assert main(["serve", str(run), "--port", str(server.port), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("gla: host, port: got 127.0.0.1:")
