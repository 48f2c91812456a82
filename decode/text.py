"""Turns a growing list of token ids into growing text. Knows tokenizers, nothing of decoding."""

import re
from collections.abc import Sequence
from typing import Any

# Ids that are decoded again with each chunk: at most LONGEST, cut to SHORTEST now and then. A decoder's view of a token
# reaches back a few tokens at most: the bytes of one character, or a run of byte tokens.
LONGEST, SHORTEST = 64, 32
# Cleaning up spaces (" ." -> ".", " ' " -> "'") changes no character that lies further than this from the end.
CLEANED = 8
BROKEN = "\ufffd"  # what bytes that are no whole character are shown as
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class GrowingText:
    """The text of a growing list of ids, special tokens left out. A tail that further ids may change is held back.

    What `extend` returned, and then `rest_of(tokenizer.decode(all ids, skip_special_tokens=True))`, join to that text.
    The work per chunk does not grow with the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last ids
        self._limit = LONGEST
        self._shown_here = 0  # characters of the window's text that were shown
        self._shown = 0  # characters shown in all
        self._special = _left_out(tokenizer)
        self._held = CLEANED if _cleans_up(tokenizer) else 0

    def extend(self, ids: Sequence[int]) -> str:
        """What `ids` add to the text and nothing that follows can change."""
        if self._tokenizer is None:
            return ""
        self._window.extend(ids)
        fresh = self._final(self._window)[self._shown_here :]
        self._shown_here += len(fresh)
        self._shown += len(fresh)
        if len(self._window) > self._limit:
            self._shorten()
        return fresh

    def rest_of(self, text: str) -> str:
        """The part of the whole `text` that was not shown yet."""
        fresh = text[self._shown :]
        self._shown += len(fresh)
        return fresh

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _final(self, ids: list[int]) -> str:
        """The part of the text of `ids` that stays whatever follows."""
        end = len(ids)
        while end and self._is_open(ids[end - 1]):
            end -= 1
        text = self._decode(ids[:end]).rstrip(BROKEN)
        return text[: max(len(text) - self._held, 0)]

    def _is_open(self, token: int) -> bool:
        """Byte tokens are decoded as one run, which a wrong byte turns into broken characters from its start on.
        Special tokens, being left out, don't end a run."""
        if token in self._special:
            return True
        name = self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and BYTE_TOKEN.fullmatch(name) is not None

    def _shorten(self) -> None:
        """Forget ids at the front, where the rest decodes as it does behind them, its first space apart."""
        whole, final = self._decode(self._window), len(self._final(self._window))
        for start in range(len(self._window) - SHORTEST, len(self._window) - SHORTEST // 2):
            rest = self._window[start:]
            text = self._decode(rest)
            cut = len(whole) - len(text)
            if text and whole.endswith(text) and self._final(rest) == whole[cut:final] and cut < self._shown_here:
                self._window, self._shown_here, self._limit = rest, self._shown_here - cut, LONGEST
                return
        self._limit *= 2


def _left_out(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens, those included that have no role such as end-of-text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(getattr(tokenizer, "all_special_ids", ())) | {i for i, token in added.items() if token.special}


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding takes spaces out; transformers does not for byte-pair tokenizers, whatever their setting."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    ignored = type(getattr(core, "model", None)).__name__ == "BPE" and not forced
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and not ignored
