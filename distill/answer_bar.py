"""A bar on the terminal for prompts that are answered, with the speed in tokens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def answer_bar(total: int, done: int) -> Iterator[Any]:
    """Gives a function that takes how many more rows are done, and the tokens generated since the bar began."""
    columns = (
        SpinnerColumn(),
        TextColumn("answering prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    started = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generate", total=total, completed=done, speed="")

        def advance(num_rows: int, num_tokens: int) -> None:
            speed = num_tokens / (time.perf_counter() - started)
            bar.update(task, advance=num_rows, speed=f"{speed:.0f} tokens/s")

        yield advance
