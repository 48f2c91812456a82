"""A chat on the terminal: lines in, streamed answers out. Keeps the conversation, and no other state."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from decode.errors import UsageError
from distill.cli.commands import stats_line

if TYPE_CHECKING:
    from decode.config import DecodeConfig
    from decode.decoder import SpeculativeDecoder

COMMANDS = "/reset begins a new conversation, /exit ends the chat"


def chat(decoder: "SpeculativeDecoder", config: "DecodeConfig | None" = None, first: str | None = None) -> None:
    """Answer `first`, where there is one, and then each line of standard input, until it ends or says /exit.

    Ctrl-C stops an answer: what was shown of it becomes the assistant's message. While a line is waited for, it
    raises KeyboardInterrupt. A conversation that fills the target's context is told, and its last line dropped.
    Raises UsageError for a target without a chat template.
    """
    if not getattr(decoder.target.tokenizer, "chat_template", None):
        raise UsageError(f"interactive: target {decoder.target.name!r} has no chat template; give a prompt instead")
    print(f"{COMMANDS}; Ctrl-C stops an answer", file=sys.stderr)
    messages: list[dict[str, Any]] = []
    for line in _lines(first):
        if line == "/exit":
            return
        if line == "/reset":
            messages.clear()
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(decoder, config, messages)})
        except UsageError as error:
            messages.pop()
            print(f"{error}; {COMMANDS}", file=sys.stderr)


def _lines(first: str | None) -> Iterator[str]:
    """`first`, then what is typed or piped in; blank lines are skipped."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        import readline  # noqa: F401  (gives `input` its editing keys and history)
    if first is not None and first.strip():
        yield first
    while True:
        try:
            line = input("> " if on_terminal else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(decoder: "SpeculativeDecoder", config: "DecodeConfig | None", messages: list[dict[str, Any]]) -> str:
    """Stream the answer to `messages`; returns what was shown of it."""
    shown: list[str] = []
    started = time.perf_counter()
    try:
        for chunk in decoder.stream(messages, config):
            shown.append(chunk.text)
            print(chunk.text, end="", flush=True)
        told = "" if chunk.generation is None else stats_line(chunk.generation, time.perf_counter() - started)
    except KeyboardInterrupt:
        told = "stopped"
    print(flush=True)
    print(told, file=sys.stderr, flush=True)
    return "".join(shown)
