"""A small server of tiny models on loopback: the completions protocol by token ids, with faults on demand."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from decode.config import SamplingConfig
from decode.models import LoadedModel
from distill.answering import answer_batch

SAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # as SamplingConfig names them


@dataclass
class Reply:
    """What goes out in the place of the model's answer; a fault, mostly."""

    status: int = 200
    body: bytes | dict[str, Any] = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Bytes of the body that go out before the connection is closed."""


Fault = Callable[[int, dict[str, Any]], Reply | None]  # (number of the request from 1, its body)


class OpenAIServer:
    """Serves `target` as `name`. What it was asked is in `requests`, the most at once in `most_at_once`."""

    def __init__(self, target: LoadedModel, name: str = "tiny", max_model_len: int | None = 256) -> None:
        self.target, self.name, self.max_model_len = target, name, max_model_len
        self.key: str | None = None
        self.fault: Fault = lambda number, body: None
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self._lock, self._model_lock = threading.Lock(), threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def reply(self, path: str, body: dict[str, Any] | None, key: str | None) -> Reply:
        if path == "/version":
            return Reply(body={"version": "0.0.test"})
        if self.key is not None and key != f"Bearer {self.key}":
            return _refusal(401, f"Incorrect API key provided: {key}")
        if path == "/v1/models":
            card = {"id": self.name, "object": "model", "max_model_len": self.max_model_len}
            return Reply(body={"object": "list", "data": [card]})
        if path != "/v1/completions" or body is None:
            return _refusal(404, "Not Found")
        with self._lock:
            self.requests.append(body)
            number = len(self.requests)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.fault(number, body) or self.complete(body)
        finally:
            with self._lock:
                self._at_once -= 1

    def complete(self, body: dict[str, Any]) -> Reply:
        """What the model answers, by the loop that generate itself uses, one prompt at a time."""
        if body["model"] != self.name:
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        with self._model_lock:
            ids = self._generate(body)
            laws = self._laws(body["prompt"], body["prompt_logprobs"]) if body.get("prompt_logprobs") else None
        choice = {
            "index": 0,
            "text": "never read",
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "finish_reason": "stop" if ids[-1] in body.get("stop_token_ids", []) else "length",
            "prompt_logprobs": laws,
        }
        return Reply(body={"object": "text_completion", "model": self.name, "choices": [choice]})

    def _generate(self, body: dict[str, Any]) -> list[int]:
        sampling = SamplingConfig(**{key: body[key] for key in SAME if key in body})
        (ids,) = answer_batch(self.target, [body["prompt"]], sampling, body["max_tokens"], body.get("seed", 0))
        return ids

    @torch.no_grad()
    def _laws(self, prompt: list[int], k: int) -> list[Any]:
        """As vLLM: nothing for the first id, then the k likeliest and the prompt's own, each with its rank."""
        laws = self.target.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        entries: list[Any] = [None]
        for law, following in zip(laws, prompt[1:], strict=False):
            ranked = {int(i): rank for rank, i in enumerate(law.topk(k).indices, start=1)}
            wanted = {following: int((law >= law[following]).sum()), **ranked}
            entries.append({str(i): {"logprob": float(law[i]), "rank": rank} for i, rank in wanted.items()})
        return entries


@contextmanager
def serving(target: LoadedModel, **options: Any) -> Iterator[OpenAIServer]:
    server = OpenAIServer(target, **options)
    try:
        yield server
    finally:
        server.stop()


def slow_first(seconds: float) -> Fault:
    """Prompts with an even sum are answered late, so that answers arrive out of turn."""

    def fault(number: int, body: dict[str, Any]) -> None:
        time.sleep(seconds if len(body["prompt"]) % 2 == 0 else 0)

    return fault


def _refusal(status: int, message: str) -> Reply:
    return Reply(status, {"error": {"message": message, "code": status}})


def _handler(server: OpenAIServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(server.reply(self.path, None, self.headers.get("Authorization")))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(server.reply(self.path, body, self.headers.get("Authorization")))

        def _send(self, reply: Reply) -> None:
            content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if reply.cut is None else content[: reply.cut])
            self.close_connection = reply.cut is not None

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:  # a client that went away
                self.close_connection = True

    return Handler
