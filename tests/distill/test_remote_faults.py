"""A server that fails: one line and the right exit status for each way to fail; passing failures are waited out."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.models import LoadedModel
from distill.cli import main as cli
from distill.remote import client
from tests.distill.openai_server import OpenAIServer, Reply, serving

ROOT = Path(__file__).parents[2]
NUM_ROWS = 6
BUSY = {"error": {"message": "too many requests"}}


@pytest.fixture
def server(loaded_target: LoadedModel) -> Iterator[OpenAIServer]:
    with serving(loaded_target) as server:
        yield server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.02)


@pytest.fixture
def words(target: Path, tmp_path: Path) -> list[str]:
    """A command line of generate, which a server's options complete."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": "x" * (1 + n)}) + "\n" for n in range(NUM_ROWS)))
    given = {"target": target, "prompts": source, "output": tmp_path / "a.jsonl", "max-new-tokens": 5}
    return ["generate", *(word for key, value in given.items() for word in (f"--{key}", str(value)))]


def num_rows(tmp_path: Path) -> int:
    output = tmp_path / "a.jsonl"
    return output.read_bytes().count(b"\n") if output.exists() else 0


def json_reply(body: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(body).encode(), {k.replace("_", "-"): v for k, v in headers.items()})


def choice(**changed: Any) -> Reply:
    """An answer with `changed` parts; those that are None are left out."""
    given = {"index": 0, "text": "no", "finish_reason": "length", **changed}
    return json_reply({"choices": [{key: value for key, value in given.items() if value is not None}]})


# What the third row's request gets, each time: the exit status and the line that ends the command.
FAULTS: dict[str, tuple[Any, int, str]] = {
    "500": (lambda body: json_reply({"detail": "engine dead"}, 500), 1, r"500 Internal Server Error: engine dead \(2"),
    "503": (lambda body: Reply(503, b"<html>no</html>"), 1, r"503 Service Unavailable: <html>no</html> \(2 tries\)"),
    "429": (lambda body: json_reply(BUSY, 429), 1, r"429 Too Many Requests: too many requests \(2 tries\)"),
    "long wait": (lambda body: json_reply(BUSY, 429, Retry_After="3600"), 1, "asks to wait 3600 s, longer than serv"),
    "401": (lambda body: json_reply({"error": "no"}, 401), 2, "server.api_key_env: .* asks for a key; set its variab"),
    "403": (lambda body: json_reply({"error": "no"}, 403), 2, "server.api_key_env: .*403 Forbidden: no"),
    "400": (lambda body: json_reply({"error": {"message": "max 20"}}, 400), 2, "refuses the request: 400 .*: max 20"),
    "404": (lambda body: json_reply({"error": {"message": "gone"}}, 404), 2, "has no /completions, or not for this mo"),
    "moved": (lambda body: Reply(307, b"", {"Location": "/v2"}), 2, r"sends elsewhere \(307\)"),
    "half an answer": (
        lambda body: Reply(body=b'{"choices": [1, 2]}', cut=9),
        1,
        r"the connection broke: .* \(2 tries",
    ),
    "no JSON": (lambda body: Reply(body=b"<html>"), 1, r"its answer is no JSON object \(2 tries\)"),
    "a JSON list": (lambda body: json_reply([1]), 1, r"its answer is no JSON object \(2 tries\)"),
    "no ids": (lambda body: choice(prompt_token_ids=body["prompt"]), 1, "hold no token_ids, so which tokens the targ"),
    "no choice": (lambda body: json_reply({"choices": []}), 1, "an answer has not one choice"),
    "no prompt": (lambda body: choice(token_ids=[1] * 5), 1, "tells of no prompt_token_ids; expected the same"),
    "a BOS": (
        lambda body: choice(token_ids=[1] * 5, prompt_token_ids=[1, *body["prompt"]]),
        1,
        "22 ids tells of .* 23",
    ),
    "too few ids": (lambda body: choice(token_ids=[7] * 4, prompt_token_ids=body["prompt"]), 1, "of 4 tokens ends w"),
    "too many ids": (lambda body: choice(token_ids=[7] * 6, prompt_token_ids=body["prompt"]), 1, "of 6 tokens ends w"),
    "an end inside": (lambda body: choice(token_ids=[7, 258, 7], prompt_token_ids=body["prompt"]), 1, "of 3 tokens e"),
    "an id too high": (lambda body: choice(token_ids=[259], prompt_token_ids=body["prompt"]), 1, "not ids below 259"),
    "no numbers": (lambda body: choice(token_ids=["a"], prompt_token_ids=body["prompt"]), 1, "not ids below 259"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_failure_is_one_line_and_the_rows_before_it_are_kept(
    server: OpenAIServer, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    reply, status, line = FAULTS[name]
    server.fault = lambda number, body: reply(body) if len(body["prompt"]) == 22 else None  # the third row
    options = ["--server.url", server.url, "--server.retries", "1", "--server.concurrency", "2"]
    assert cli.main([*words, *options]) == status
    said = [part for part in capsys.readouterr().err.splitlines() if part.startswith("draftsmith generate:")]
    assert len(said) == 1
    assert re.search(line, said[0]), said[0]
    assert num_rows(tmp_path) == 2


def test_passing_failures_are_waited_out(server: OpenAIServer, words: list[str], tmp_path: Path) -> None:
    faults = [json_reply(BUSY, 429, Retry_After="0"), Reply(502), Reply(body=b"{", cut=1), Reply(body=b"no")]
    server.fault = lambda number, body: faults[number - 1] if number <= len(faults) else None
    assert cli.main([*words, "--server.url", server.url, "--server.concurrency", "1"]) == 0
    assert num_rows(tmp_path) == NUM_ROWS and len(server.requests) == NUM_ROWS + len(faults)
    assert server.requests[0] == server.requests[4]  # the same was asked again, its seed too


def test_a_timeout_is_a_passing_failure(server: OpenAIServer, words: list[str], tmp_path: Path) -> None:
    held = threading.Event()
    server.fault = lambda number, body: held.wait(30) and None if number == 1 else None
    assert cli.main([*words, "--server.url", server.url, "--server.timeout", "1", "--server.retries", "500"]) == 0
    held.set()
    assert num_rows(tmp_path) == NUM_ROWS < len(server.requests)


def test_a_server_that_dies_in_the_middle(
    server: OpenAIServer, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(number: int, body: dict[str, Any]) -> Reply | None:
        if number == 4:
            server.stop()
        return Reply(body=b"{}", cut=1) if number >= 4 else None

    server.fault = fault
    options = ["--server.url", server.url, "--server.concurrency", "1", "--server.retries", "2"]
    assert cli.main([*words, *options]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "it can't be reached" in told and "(3 tries)" in told and num_rows(tmp_path) == 3


def test_a_server_that_is_not_there_is_told_at_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--server.url", "http://127.0.0.1:9/v1", "--server.retries", "9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftsmith generate: server http://127.0.0.1:9/v1: it can't be reached: ")


def test_a_key_is_sent_and_never_shown(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    server.key = "sk-right"
    monkeypatch.setenv("TINY_KEY", "sk-wrong")
    given = [*words, "--server.url", server.url, "--server.api-key-env"]
    assert cli.main([*given, "TINY_KEY"]) == 2
    told = capsys.readouterr().err
    assert "it refuses the key in TINY_KEY: 401 Unauthorized: Incorrect API key provided: Bearer ***" in told
    assert cli.main([*given, "NO_SUCH_NAME"]) == 2
    assert cli.main([*given, "sk-right"]) == 2
    assert "sk-" not in told + capsys.readouterr().err
    monkeypatch.setenv("TINY_KEY", " sk-right\n")
    assert cli.main([*given, "TINY_KEY"]) == 0


def test_ctrl_c_ends_at_once_and_the_same_command_goes_on(
    server: OpenAIServer, words: list[str], tmp_path: Path
) -> None:
    held = threading.Event()
    server.fault = lambda number, body: held.wait(60) and None if number > 3 else None
    code = "import sys; from distill.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--server.url", server.url, "--server.concurrency", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        while num_rows(tmp_path) < 3 or len(server.requests) < 5:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode == 130 and said.splitlines()[-1] == "draftsmith generate: interrupted"
    assert "Traceback" not in said and not held.is_set()
    held.set()
    server.fault = lambda number, body: None
    assert cli.main([*words, "--server.url", server.url]) == 0
    assert num_rows(tmp_path) == NUM_ROWS
