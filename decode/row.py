"""One text while it is decoded: its tokens, and what decides about it. Knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft_length import DraftLength
from decode.sampler import Sampler
from decode.stopping import Stopping


@dataclass
class Row:
    """The tokens lie in one buffer, a round's drafted ones right behind the text, so that nothing is ever joined."""

    tokens: Tensor  # [n + room + 1] int64, on the device of the loop
    length: int  # tokens of prompt and text
    target_sampler: Sampler
    draft_sampler: Sampler
    stopping: Stopping
    draft_length: DraftLength
    generator: torch.Generator
    log_probs: bool = False

    def __post_init__(self) -> None:
        # On the CPU single tokens are read and written through the same memory at a tenth of a tensor operation's cost.
        self._host = self.tokens.numpy() if self.tokens.device.type == "cpu" else None

    @staticmethod
    def buffer(prompt: Sequence[int], room: int, device: torch.device) -> Tensor:
        """Room for a prompt and `room` tokens after it."""
        tokens = torch.zeros(len(prompt) + room + 1, dtype=torch.int64)
        tokens[: len(prompt)] = torch.tensor(prompt)
        return tokens.to(device)

    @property
    def most(self) -> int:
        """How many tokens may be drafted now: never more than can still be emitted beside the target's own."""
        return max(min(self.draft_length.limit(), self.stopping.room - 1), 0)

    def context(self, drafted: int = 0) -> Tensor:
        """[n + drafted] prompt, text, and the first `drafted` drafted tokens."""
        return self.tokens[: self.length + drafted]

    @property
    def on_host(self) -> bool:
        """Whether the loop runs on the CPU, where single numbers are Python's."""
        return self._host is not None

    def put(self, index: int, token: Tensor | int) -> None:
        """Write drafted token `index`, given as [1] or, on the CPU, as a number."""
        at = self.length + index
        if self._host is not None:
            self._host[at] = token
        else:
            self.tokens[at : at + 1] = token

    def drafted(self, width: int) -> Tensor:
        """[W] the drafted tokens."""
        return self.tokens[self.length : self.length + width]

    def commit(self, emitted: Sequence[int], num_accepted: int) -> None:
        """Make a round's tokens part of the text; the accepted ones are in their places already."""
        if len(emitted) > num_accepted:
            (self.tokens if self._host is None else self._host)[self.length + num_accepted] = emitted[-1]
        self.length += len(emitted)
