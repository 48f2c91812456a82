"""Draft length policies: how many tokens a round drafts. A policy lives for one text and never biases the output.

A policy decides from the counts of earlier rounds, and from laws before a token is drawn from them. It never discards
a token that was drawn, for what is left would follow another law than the one that is declared. This file imports no
library, as settings are checked against its names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from decode.theory import Costs, expected_tokens_of

if TYPE_CHECKING:
    from decode.laws import Law

# Tokens drafted per round where none are stated: by a fixed length, and at most by a policy that chooses.
FIXED_LENGTH = 3
LONGEST_DRAFT = 8


@dataclass(frozen=True)
class LengthSetup:
    """All that a policy may need; every policy is made from one."""

    most: int = LONGEST_DRAFT  # tokens that a round may draft; 0: none ever
    threshold: float | None = None  # of the policies that stop where the draft is unsure; None: their own default
    costs: Costs | None = None  # of rounds of 0..most drafted tokens, for policies that need them


class DraftLength(Protocol):
    watches: ClassVar[bool]
    """Whether `stop` is to be asked; that costs a read from the device for each token."""
    needs_costs: ClassVar[bool]
    """Whether the setup must hold the pair's costs, unless nothing is ever drafted."""

    def __init__(self, setup: LengthSetup) -> None: ...

    def limit(self) -> int:
        """The most tokens to draft in the next round; 0 is a plain step."""

    def stop(self, law: "Law") -> bool:
        """Whether drafting ends before a token is drawn. `law`: one row, the draft's own law of that token; under
        greedy decoding the law at temperature 1, for a point mass doesn't tell how sure the draft is."""

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Learn how the round went. Fewer may have been drafted than the limit allowed."""


class Fixed:
    """The same length in every round."""

    watches: ClassVar[bool] = False
    needs_costs: ClassVar[bool] = False

    def __init__(self, setup: LengthSetup) -> None:
        self._most = setup.most

    def limit(self) -> int:
        return self._most

    def stop(self, law: "Law") -> bool:
        return False

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learnt."""


class Heuristic(Fixed):
    """Two more after a fully accepted round, one less after any other; between 1 and `most`.

    The rule of transformers' assisted generation, kept within one text and within bounds.
    """

    def __init__(self, setup: LengthSetup) -> None:
        super().__init__(setup)
        self._current = setup.most

    def limit(self) -> int:
        return self._current

    def update(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            return
        step = 2 if num_accepted == num_drafted else -1
        self._current = min(max(self._current + step, min(1, self._most)), self._most)


class Confidence(Fixed):
    """Stop where the draft's likeliest token is less likely than a threshold (default 0.4, as in transformers, which
    looks only after it has drawn the token)."""

    watches: ClassVar[bool] = True
    default_threshold: ClassVar[float] = 0.4

    def __init__(self, setup: LengthSetup) -> None:
        super().__init__(setup)
        self._threshold = self.default_threshold if setup.threshold is None else setup.threshold

    def stop(self, law: "Law") -> bool:
        return float(law.probs.max()) < self._threshold


class Entropy(Confidence):
    """Stop where a lower bound on acceptance, 1 - sqrt(c H), is below a threshold (default 0.2); H is the entropy of
    the draft's law in nats.

    AdaEDL (Agrawal, Jeon and Lee 2024): acceptance is 1 - TV(p, q), which Pinsker's inequality bounds by the divergence
    of p and q; of that, which only the target knows, the paper takes c H as a stand-in, with c = 0.2 throughout. Its
    threshold drifts with the acceptance seen; here it stays, so c = 0.2 and 0.2 mean: stop beyond 3.2 nats.
    """

    default_threshold: ClassVar[float] = 0.2
    SCALE: ClassVar[float] = 0.2

    def stop(self, law: "Law") -> bool:
        entropy = -float(law.probs.xlogy(law.probs).sum())
        return 1 - (self.SCALE * max(entropy, 0.0)) ** 0.5 < self._threshold


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


DRAFT_LENGTHS: dict[str, type[DraftLength]] = {
    "fixed": Fixed,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "entropy": Entropy,
    "cost_model": CostModel,
}
