"""Tells how far scoring is: tokens, tokens a second, bytes a token."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# Seconds between progress lines where there is no terminal to draw a bar on.
TELL_EVERY = 30.0


class Tally:
    """A progress bar, shown while there is something to do; in a log, a line now and then."""

    def __init__(self, total: int, console: Console) -> None:
        self.total, self.console = total, console
        columns = (TextColumn("scoring"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, disable=total == 0)

    def __enter__(self) -> "Tally":
        self.start = self.told = time.perf_counter()
        self.done = self.num_bytes = self.num_written = 0
        self.progress.start()
        self.task: TaskID = self.progress.add_task("scoring", total=self.total, shown="")
        return self

    def add(self, count: int) -> None:
        """So many positions are scored."""
        self.done += count
        now = time.perf_counter()
        self.progress.update(self.task, completed=self.done, shown=self._shown(now))
        if not self.console.is_terminal and now - self.told >= TELL_EVERY:
            self.console.print(f"scoring: {self._shown(now)}")
            self.told = now

    def wrote(self, num_bytes: int, count: int) -> None:
        """A file of so many bytes holds so many positions."""
        self.num_bytes += num_bytes
        self.num_written += count

    def _shown(self, now: float) -> str:
        size = f", {self.num_bytes / self.num_written:.0f} bytes each" if self.num_written else ""
        return f"{self.done}/{self.total} tokens, {self.done / max(now - self.start, 1e-9):.0f}/s{size}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.progress.stop()
        if kind is None and self.total:
            self.console.print(f"scored {self._shown(time.perf_counter())}")
