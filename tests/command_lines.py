"""Command lines that are whole, and commands that only note what they were asked."""

from dataclasses import replace
from typing import Any

import pytest

from distill.cli import main as cli

FIT = """\
target: t
draft: d
output: o
max_steps: 3
data:
  train: [a.jsonl]
"""
RUN = ["run", "--target", "t", "--prompt", "p"]
INIT = ["init", "--target", "t", "--output", "o"]
EXPORT = ["export", "--target", "t", "--draft", "d", "--output", "o"]
EVAL = ["eval", "--target", "t", "--prompts", "p", "--output", "o", "--drafts", "d"]


def stub_commands(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs that the commands are called with from now on; the commands themselves do nothing."""
    seen: list[Any] = []
    for name, command in cli.COMMANDS.items():
        monkeypatch.setitem(cli.COMMANDS, name, replace(command, call=seen.append))
    monkeypatch.setattr(cli, "_quiet_libraries", lambda: None)
    return seen
