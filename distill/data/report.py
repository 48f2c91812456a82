"""What became of the rows of a file or a stream, in counts and in words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from distill.data.rows import BadRow


@dataclass
class DataReport:
    """What became of every row: num_examples + num_dropped + bad rows = num_rows."""

    num_rows: int = 0
    num_examples: int = 0
    num_truncated: int = 0
    """Examples that were cut to max_length."""
    num_cut_tokens: int = 0
    """Tokens that were cut off them."""
    num_tokens: int = 0
    num_supervised: int = 0
    num_rewritten: int = 0
    """Answers in the middle of chats that are not supervised, because the chat template shortens them there."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each example that is kept, in ascending order."""
    dropped: Counter[str] = field(default_factory=Counter)
    """How many good rows were left out for each reason."""
    bad_rows: list[BadRow] = field(default_factory=list)
    num_forgotten: int = 0
    """Further bad rows, of which nothing but their number is kept."""

    @property
    def num_dropped(self) -> int:
        return self.dropped.total()

    def forget(self) -> None:
        """Keep the first bad row only: a stream may have any number of them."""
        self.num_forgotten += len(self.bad_rows[1:])
        del self.bad_rows[1:]

    def count(self, lengths: Sequence[int], num_supervised: int) -> None:
        """Take the totals of the examples that are kept: the tokens of each, and how many are supervised in all."""
        self.num_examples, self.num_supervised = len(lengths), num_supervised
        self.lengths = sorted(lengths)
        self.num_tokens = sum(lengths)

    def lines(self) -> list[str]:
        """The report in words, a line for each thing worth telling."""
        told = [
            f"{self.num_examples} examples of {self.num_rows} rows: {self.num_tokens} tokens, "
            f"{self.num_supervised} supervised ({_share(self.num_supervised, self.num_tokens)})"
        ]
        if self.lengths:
            told.append(
                f"tokens of an example: median {self._at(0.5)}, 90 % have up to {self._at(0.9)}, "
                f"the longest {self.lengths[-1]}"
            )
        return told + self.losses()

    def _at(self, share: float) -> int:
        """The least length that `share` of the examples do not exceed."""
        return self.lengths[max(0, -(-len(self.lengths) * round(share * 100) // 100) - 1)]

    def losses(self) -> list[str]:
        """What of the rows is not trained on, and why."""
        told = []
        if self.num_truncated:
            told.append(
                f"{self.num_truncated} examples ({_share(self.num_truncated, self.num_rows)} of the rows) cut to "
                f"max_length, {self.num_cut_tokens} tokens left out"
            )
        if self.num_rewritten:
            told.append(
                f"{self.num_rewritten} answers within chats are read, not supervised: the chat template shortens them"
            )
        told += [
            f"{count} rows ({_share(count, self.num_rows)}) dropped: {reason}" for reason, count in self.dropped.items()
        ]
        if self.bad_rows:
            first, count = self.bad_rows[0], len(self.bad_rows) + self.num_forgotten
            told.append(
                f"{count} bad rows ({_share(count, self.num_rows)}) skipped, the first {first.source}: {first.reason}"
            )
        return told


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
