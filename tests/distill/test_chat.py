"""The chat: conversation, commands, and what Ctrl-C and the end of input do. A scripted decoder answers."""

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from decode.answers import Generation, StreamChunk
from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from decode.stats import Stats
from distill.cli.chat import chat
from tests.fixtures import byte_tokenizer, loaded, tiny_llama, with_noise


class Scripted:
    """Streams each of `answers` in pieces; an exception among the pieces is raised there."""

    def __init__(self, *answers: list[Any], template: str | None = "chat") -> None:
        self.target = SimpleNamespace(name="big", tokenizer=SimpleNamespace(chat_template=template))
        self.asked: list[list[tuple[str, str]]] = []
        self.closed = 0
        self._answers = list(answers)

    def stream(self, messages: list[dict[str, str]], config: Any) -> Iterator[StreamChunk]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        answer = self._answers.pop(0)
        try:
            for piece in answer:
                if isinstance(piece, BaseException):
                    raise piece
                yield StreamChunk([1], piece)
            yield StreamChunk([], "", Generation([1], "".join(answer), "stop", Stats()))
        finally:
            self.closed += 1


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """What the user types, then the end of input."""
    left = list(lines)

    def read(prompt: str = "") -> str:
        assert prompt == "", "a pipe is shown no prompt"
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", io.StringIO())


def talk(decoder: Any, first: str | None = None) -> None:
    chat(decoder, None, first)


def test_the_conversation_is_kept_until_it_is_reset(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    decoder = Scripted(["He", "llo"], ["Fine"], ["Again"])
    typed(monkeypatch, "hi", "", "how?", "/reset", "new", "/exit", "never asked")
    talk(decoder)
    hello = [("user", "hi"), ("assistant", "Hello")]
    assert decoder.asked == [hello[:1], [*hello, ("user", "how?")], [("user", "new")]]
    shown = capsys.readouterr()
    assert shown.out == "Hello\nFine\nAgain\n"
    assert shown.err.count("tokens/s") == 3 and "/reset" in shown.err


def test_a_first_prompt_is_answered_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Scripted(["a"], ["b"])
    typed(monkeypatch, "two")
    talk(decoder, "one")
    assert decoder.asked[1] == [("user", "one"), ("assistant", "a"), ("user", "two")]


def test_an_interrupt_stops_the_answer_and_keeps_what_was_shown(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    decoder = Scripted(["one ", "two", KeyboardInterrupt(), "three"], [KeyboardInterrupt()], ["ok"])
    typed(monkeypatch, "count", "again", "well")
    talk(decoder)
    said = [("user", "count"), ("assistant", "one two"), ("user", "again"), ("assistant", ""), ("user", "well")]
    assert decoder.asked[2] == said
    assert decoder.closed == 3
    shown = capsys.readouterr()
    assert shown.out == "one two\n\nok\n" and shown.err.count("stopped") == 2


def test_an_interrupt_while_nothing_is_answered_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Scripted(["one", KeyboardInterrupt()])
    typed(monkeypatch, "count", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        talk(decoder)
    assert len(decoder.asked) == 1


def test_a_full_context_is_told_and_the_line_dropped(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    decoder = Scripted(["a"], [UsageError("prompt: it has 9 tokens; the target's context holds 8")], ["b"])
    typed(monkeypatch, "one", "long", "two")
    talk(decoder)
    assert decoder.asked[2] == [("user", "one"), ("assistant", "a"), ("user", "two")]
    assert "context holds 8; /reset begins a new conversation" in capsys.readouterr().err


def test_a_target_without_a_template_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "hi")
    with pytest.raises(UsageError, match="interactive: target 'big' has no chat template"):
        talk(Scripted(["a"], template=None))


def test_answers_of_a_real_decoder_are_those_of_the_same_messages(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    tokenizer = byte_tokenizer()
    target = tiny_llama(0, vocab_size=len(tokenizer))
    decoder = SpeculativeDecoder(
        loaded(target, tokenizer=tokenizer), loaded(with_noise(target, 0.1), tokenizer=tokenizer)
    )
    config = DecodeConfig(9, 3, draft_length="fixed", sampling=SamplingConfig())
    typed(monkeypatch, "hi")
    chat(decoder, config)
    wanted = decoder.generate([[{"role": "user", "content": "hi"}]], config)[0].text
    assert capsys.readouterr().out == wanted + "\n"
