"""What the columns of a row mean: finds the prompt and the completion. Knows nothing of tokens."""

import math
from typing import Any

from distill.data.rows import Row

Messages = list[dict[str, str]]
Prompt = str | Messages

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}
COLUMNS = "input_ids+mask, messages, conversations, prompt+completion, prompt or text"


class RowError(Exception):
    """This row cannot be used; the text says why, without the row's content."""


def kind_of(row: Row) -> str:
    """The column that a row is read by: the first of COLUMNS that it has with a value; other columns are ignored.

    Raises RowError naming the columns that would be legal.
    """
    present = {name for name, value in row.fields.items() if value is not None}
    if {"input_ids", "mask"} <= present:
        return "input_ids"
    for name in ("messages", "conversations", "prompt", "text"):
        if name in present:
            return name
    raise RowError(f"none of the needed columns has a value; expected {COLUMNS}")


def prompt_of(row: Row) -> Prompt:
    """What the target is asked: text, or the messages before the last answer; for rows without input_ids.

    Raises RowError for a row of another form.
    """
    kind = kind_of(row)
    if kind in ("messages", "conversations"):
        return asked(messages_of(row, kind))
    value = row.fields[kind]
    return asked(check_messages(value, kind)) if isinstance(value, list) else check_text(value, kind)


def completion_of(row: Row) -> str | None:
    """The text that answers the row's prompt, None where there is none. One assistant message is as good as text.

    Raises RowError for anything else.
    """
    value = row.fields.get("completion")
    if not isinstance(value, list):
        return None if value is None else check_text(value, "completion")
    turns = [_check_turn(turn, f"completion[{number}]") for number, turn in enumerate(value)]
    if [turn["role"] for turn in turns] != ["assistant"]:
        raise RowError("completion: expected text or a list of one assistant message")
    return turns[0]["content"]


def ids_and_mask(row: Row) -> tuple[list[int], list[bool]]:
    """Exact ids and, for each, whether it is supervised, as generate writes them."""
    ids, mask = row.fields["input_ids"], row.fields["mask"]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise RowError("input_ids: expected a list of integers >= 0")
    if not isinstance(mask, list) or not all(m in (0, 1) for m in mask):
        raise RowError("mask: expected a list of 0 and 1")
    if len(ids) != len(mask) or not ids:
        raise RowError(f"mask: {len(mask)} values for {len(ids)} input_ids; expected as many, at least one")
    return ids, [bool(m) for m in mask]


def weights_of(row: Row) -> list[float] | None:
    """How much each of a row's input_ids counts in the loss: finite numbers >= 0; None where it has no weights."""
    weights = row.fields.get("weights")
    if weights is None:
        return None
    size = len(row.fields["input_ids"])
    if not isinstance(weights, list) or not all(type(w) in (int, float) and 0 <= w < math.inf for w in weights):
        raise RowError("weights: expected a list of finite numbers >= 0")
    if len(weights) != size:
        raise RowError(f"weights: {len(weights)} values for {size} input_ids; expected as many")
    return [float(weight) for weight in weights]


def messages_of(row: Row, kind: str) -> Messages:
    """Checked messages of a chat row; ShareGPT's from and value are put in our words."""
    turns = row.fields[kind]
    if kind == "conversations" and isinstance(turns, list):
        turns = [_from_sharegpt(turn) for turn in turns]
    return check_messages(turns, kind)


def _from_sharegpt(turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"]
    return {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": turn.get("value")}


def check_messages(turns: Any, name: str) -> Messages:
    """Turns with a known role and non-empty text, with a user turn before the first assistant turn, else RowError."""
    if not isinstance(turns, list) or not turns:
        raise RowError(f"{name}: expected a list with at least one message")
    messages = [_check_turn(turn, f"{name}[{number}]") for number, turn in enumerate(turns)]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise RowError(f"{name}: there is no user turn")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise RowError(f"{name}: an assistant turn comes before the first user turn")
    return messages


def _check_turn(turn: Any, place: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise RowError(f"{place}: expected an object with role and content")
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        shown = repr(role)[:40]
        raise RowError(f"{place}: the role {shown} is not known; expected one of {', '.join(ROLES)}")
    return {"role": str(role), "content": check_text(content, f"{place}.content")}


def check_text(value: Any, name: str) -> str:
    """`value` if it is text that can be encoded and is not blank, else RowError."""
    if not isinstance(value, str):
        raise RowError(f"{name}: expected text, found a value of type {type(value).__name__}")
    if not value.strip():
        raise RowError(f"{name}: it is empty")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RowError(f"{name}: it holds half of a surrogate pair, which is not text")
    return value


def asked(messages: Messages) -> Messages:
    """The messages before the last answer: what stands at the end of a chat is what is asked for again."""
    end = len(messages)
    while messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]
