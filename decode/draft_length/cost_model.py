"""The length that promises the most tokens per second, from measured costs and the acceptance seen so far."""

from collections.abc import Sequence
from typing import ClassVar

from decode.draft_length.base import Fixed, LengthSetup
from decode.theory import expected_tokens_of


class Acceptance:
    """How often the token at each position is accepted where all before it were.

    Counts of each position, older rounds weighing less, are drawn towards the rate of all positions, and that towards
    a prior. So a position that was seldom or never reached is judged by the others.
    """

    # Chosen by simulation over texts of steady and of changing acceptance and over seven shapes of costs.
    KEEP = 0.94  # weight of a round in the next: the last 17 rounds or so count, since texts change
    PRIOR, PRIOR_TRIALS = 0.65, 3.0  # optimistic: a round too long costs little and shows more
    POOL_TRIALS = 16.0

    def __init__(self, most: int) -> None:
        self._accepted, self._tried = [0.0] * most, [0.0] * most

    def rates(self) -> list[float]:
        """[i]: the estimate at position i + 1."""
        pooled = self.PRIOR * self.PRIOR_TRIALS + sum(self._accepted)
        pooled /= self.PRIOR_TRIALS + sum(self._tried)
        weight = self.POOL_TRIALS
        return [(a + weight * pooled) / (n + weight) for a, n in zip(self._accepted, self._tried, strict=True)]

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """A round accepted the first `num_accepted` of its drafted tokens; nothing is known beyond the next one."""
        for i in range(len(self._tried)):
            self._accepted[i] = self.KEEP * self._accepted[i] + (i < num_accepted)
            self._tried[i] = self.KEEP * self._tried[i] + (i < min(num_accepted + 1, num_drafted))


class Probes:
    """When to draft although plain decoding seems faster, since a plain step teaches nothing: after ever more steps,
    as long as that stays in vain."""

    FIRST, LAST = 4, 32  # plain steps before a probe

    def __init__(self) -> None:
        self._interval = self._left = self.FIRST

    @property
    def due(self) -> bool:
        return self._left <= 0

    def step(self) -> None:
        """A plain step was made."""
        self._left -= 1

    def failed(self) -> None:
        """A probe did not change the choice."""
        self._interval = self._left = min(2 * self._interval, self.LAST)

    def reset(self) -> None:
        self._interval = self._left = self.FIRST


class CostModel(Fixed):
    """The length with the most expected tokens per second, from measured costs and the acceptance seen so far.

    Tokens of a round of k: 1 + the sum over j <= k of a_1 * ... * a_j; its time: k draft steps, a target pass of width
    k + 1, which need not grow with k, and the host's work. k = 0 is plain decoding.
    """

    needs_costs: ClassVar[bool] = True
    HYSTERESIS: ClassVar[float] = 0.005
    """Another length must promise so much more, as a share, that noise in the estimates alone doesn't change it."""

    def __init__(self, setup: LengthSetup) -> None:
        """Raises ValueError when costs are missing, or do not reach as far as `most`."""
        super().__init__(setup)
        costs = setup.costs
        if setup.most and (costs is None or costs.most < setup.most):
            raise ValueError(f"costs: {costs} do not cover drafts of up to {setup.most} tokens")
        self._ms: Sequence[float] = [costs.ms(k) for k in range(setup.most + 1)] if costs else [1.0]
        self._acceptance, self._probes = Acceptance(setup.most), Probes()
        self._promises = self._promise()
        self._current = self._best()

    def limit(self) -> int:
        if self._current == 0 and self._most and self._probes.due:
            return self._best(least=1)
        return self._current

    def update(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            self._probes.step()
            return
        self._acceptance.update(num_drafted, num_accepted)
        self._promises = self._promise()
        best, before = self._best(), self._current
        if self._promises[best] > self._promises[before] * (1 + self.HYSTERESIS):
            self._current = best
        if self._current > 0:
            self._probes.reset()
        elif before == 0:
            self._probes.failed()

    def _promise(self) -> list[float]:
        """[k]: expected tokens per millisecond of a round that drafts k."""
        tokens = expected_tokens_of(self._acceptance.rates())
        return [count / ms for count, ms in zip(tokens, self._ms, strict=True)]

    def _best(self, least: int = 0) -> int:
        return max(range(least, self._most + 1), key=self._promises.__getitem__)
