"""The tables of a run: metrics.csv, a row per checkpoint, and train.csv, a row per few optimiser steps."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from decode.errors import DraftsmithError
from distill.runs import write_text_atomic

Number = int | float | None

METRICS_FILE, STEPS_FILE = "metrics.csv", "train.csv"
TIMED_COLUMNS = ("val/speedup", "val/tokens_per_second", "val/plain_tokens_per_second", "seconds")
"""What differs from run to run; all other columns are reproduced bit for bit on a CPU."""
METRICS_COLUMNS = (
    "step",
    "tokens_seen",
    "train/loss",
    "val/loss",
    "val/expected_acceptance",
    "val/expected_acceptance_upper",
    "val/greedy_acceptance",
    "val/greedy_acceptance_upper",
    "val/greedy_agreement",
    "val/mean_acceptance_length",
    "val/draft_acceptance_rate",
    *TIMED_COLUMNS,
)
STEPS_COLUMNS = ("step", "tokens_seen", "train/loss", "learning_rate", "seconds")


class DamagedTable(DraftsmithError):
    """A table that holds something else than rows of numbers."""


class Table:
    """A CSV file of numbers with a step in each row; what is unknown stays empty."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)

    def append(self, row: Mapping[str, Number]) -> None:
        """Add a row in one write; a kill leaves it whole, or torn without its line end, and then it doesn't count."""
        new = not self.path.exists() or self.path.stat().st_size == 0
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write((self._line(self.columns) if new else "") + self._row(row))

    def rows(self) -> list[dict[str, Number]]:
        """All whole rows, in order. Raises DamagedTable where the file holds anything else."""
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            lines = list(csv.reader(line for line in text.splitlines(keepends=True) if line.endswith("\n")))
            return [self._read(lines[0], line) for line in lines[1:]]
        except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
            raise DamagedTable(f"{self.path}: it is damaged: {error}") from error

    def _read(self, header: list[str], line: list[str]) -> dict[str, Number]:
        row = dict(zip(header, map(_number, line), strict=True))
        if not isinstance(row.get("step"), int):
            raise ValueError("a row has no step")
        return {name: row.get(name) for name in self.columns}

    def cut(self, last_step: int) -> None:
        """Drop the rows after `last_step`, which a resumed run writes again, and what a kill left torn."""
        kept = [row for row in self.rows() if (row["step"] or 0) <= last_step]
        if kept:
            self._write(kept)
        else:
            self.path.unlink(missing_ok=True)

    def restore(self, rows: Sequence[Mapping[str, Number]]) -> bool:
        """Make the table `rows` unless they are its first ones already. Whether it had to."""
        try:
            first = self.rows()[: len(rows)]
        except DamagedTable:
            first = []
        if [self._row(row) for row in first] == [self._row(row) for row in rows]:  # as text: NaN is no equal of NaN
            return False
        self._write(rows)
        return True

    def _write(self, rows: Sequence[Mapping[str, Number]]) -> None:
        write_text_atomic(self.path, self._line(self.columns) + "".join(self._row(row) for row in rows))

    def _row(self, row: Mapping[str, Number]) -> str:
        # repr is the shortest text that reads back to the same float
        return self._line("" if row.get(name) is None else repr(row[name]) for name in self.columns)

    @staticmethod
    def _line(values: object) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(values)  # type: ignore[arg-type]
        return text.getvalue()


def _number(text: str | None) -> Number:
    if not text:
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)


def metrics_table(run_folder: Path) -> Table:
    return Table(run_folder / METRICS_FILE, METRICS_COLUMNS)


def steps_table(run_folder: Path) -> Table:
    return Table(run_folder / STEPS_FILE, STEPS_COLUMNS)
