"""Closed forms of speculative decoding: expected tokens, speedup, best draft length. Pure arithmetic, imports no torch.

All of them take acceptance as a probability, the draft as a chain of k tokens, and count the recovered or bonus token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from decode.errors import require

# The rows and columns of the textbook table: draft k times faster than the target, acceptance p.
TABLE_SPEEDS = (2, 5, 10)
TABLE_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round."""

    draft_ms: float  # one more drafted token: a step of the draft, and what the host does for that token
    verify_ms: tuple[float, ...]  # [w - 1]: the target's pass over w tokens, w = 1..most + 1
    round_ms: float  # host time of a round
    start_ms: float = 0.0  # what a round that drafts costs beside all that, however long it is

    @property
    def most(self) -> int:
        """The longest draft whose cost is known."""
        return len(self.verify_ms) - 1

    def ms(self, length: int) -> float:
        """A round that drafts `length` tokens, 0..most; 0 is a step of plain decoding."""
        drafting = self.start_ms + length * self.draft_ms if length else 0.0
        return drafting + self.verify_ms[length] + self.round_ms


@dataclass(frozen=True)
class Prediction:
    """What measured costs promise."""

    tokens_per_round: float
    round_ms: float  # drafting, verifying and host work of one round
    plain_ms: float  # one round of plain decoding

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens_per_round / self.round_ms

    @property
    def speedup(self) -> float:
        """Against plain decoding by the same loop."""
        return self.tokens_per_round * self.plain_ms / self.round_ms


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per round, (1 - a^(k+1)) / (1 - a), where each of `length` drafted tokens is accepted with probability a
    whatever came before it (Leviathan et al. 2022, equation 1).

    Exact for the token rule under that assumption. The block rule accepts at least as many in expectation (Sun et al.
    2024), so for it this is a lower bound. Raises UsageError unless 0 <= a <= 1 and length >= 0.
    """
    _check(acceptance, length)
    if acceptance == 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def expected_tokens_of(conditional_rates: Sequence[float]) -> list[float]:
    """[k] = tokens per round with k drafted tokens, k = 0..len(rates): 1 + the sum over j <= k of a_1 * ... * a_j.

    `conditional_rates[j - 1]`: how often the token at position j is accepted where all before it were.
    """
    return list(accumulate(accumulate(conditional_rates, mul), initial=1.0))


def conditional_rates(per_position_rates: Sequence[float]) -> list[float]:
    """Conditional rates from unconditional ones, the `per_position_acceptance_rate` of Stats; 0 where none arrived."""
    before = [1.0, *per_position_rates]
    return [rate / reached if reached else 0.0 for reached, rate in zip(before, per_position_rates, strict=False)]


def speedup(
    acceptance: float, length: int, cost_ratio: float, verify_ratio: float = 1.0, overhead_ratio: float = 0.0
) -> float:
    """E / (k c + v + o): against plain decoding, all costs in units of one plain target step.

    `cost_ratio` c: a draft step; `verify_ratio` v: the target's pass over k + 1 tokens; `overhead_ratio` o: the host
    work of a round. Raises UsageError for a cost below 0, or a round that costs nothing.
    """
    for key, ratio in (("cost_ratio", cost_ratio), ("overhead_ratio", overhead_ratio)):
        require(0 <= ratio < float("inf"), key, ratio, "a finite number >= 0")
    require(0 < verify_ratio < float("inf"), "verify_ratio", verify_ratio, "a finite number > 0")
    return expected_tokens(acceptance, length) / (length * cost_ratio + verify_ratio + overhead_ratio)


def walltime_improvement(acceptance: float, length: int, cost_ratio: float) -> float:
    """Leviathan's theorem 3.8, (1 - a^(k+1)) / ((1 - a)(k c + 1)): `speedup` where verifying k + 1 tokens costs as
    much as one target step and the host nothing. CPUs and long drafts break that assumption."""
    return speedup(acceptance, length, cost_ratio)


def operations_factor(acceptance: float, length: int, cost_ratio: float) -> float:
    """Leviathan's theorem 3.11, (1 - a)(k c + k + 1) / (1 - a^(k+1)): arithmetic per token against plain decoding.

    `cost_ratio`: the draft's operations per token in units of the target's. Above 1: speed is bought with arithmetic.
    """
    require(0 <= cost_ratio < float("inf"), "cost_ratio", cost_ratio, "a finite number >= 0")
    return (length * cost_ratio + length + 1) / expected_tokens(acceptance, length)


def best_length(
    acceptance: float,
    cost_ratio: float,
    verify_ratios: Sequence[float] = (),
    overhead_ratio: float = 0.0,
    most: int = 64,
) -> int:
    """The draft length, 0 (plain decoding) to `most`, with the highest `speedup`; the shortest of equals.

    `verify_ratios[k]`: the target's pass over k + 1 tokens; it need not rise with k, and bounds k. Empty: always 1.
    """
    ratios = verify_ratios or (1.0,) * (most + 1)
    lengths = range(min(most + 1, len(ratios)))
    return max(lengths, key=lambda k: speedup(acceptance, k, cost_ratio, ratios[k], overhead_ratio))


def textbook_estimate(acceptance: float, draft_speed: float) -> float:
    """The simple estimate 1 / ((1 - p) + p / k) for a draft k times faster than the target.

    It assumes that a share p of all tokens costs a k-th of a target step each and every other token a whole step, as
    if verification were free: no draft length, no rejected work, no bonus token. A rule of thumb, neither a lower nor
    an upper bound. Raises UsageError unless 0 <= p <= 1 and k > 0.
    """
    _check(acceptance, 0)
    require(0 < draft_speed < float("inf"), "draft_speed", draft_speed, "a finite number > 0")
    return 1 / ((1 - acceptance) + acceptance / draft_speed)


def textbook_table(
    speeds: Sequence[float] = TABLE_SPEEDS, acceptances: Sequence[float] = TABLE_ACCEPTANCES
) -> list[list[float]]:
    """[speed][acceptance]: `textbook_estimate` of each."""
    return [[textbook_estimate(p, k) for p in acceptances] for k in speeds]


def predict(costs: Costs, conditional_rates: Sequence[float], length: int) -> Prediction:
    """What rounds of `length` drafted tokens promise, from measured costs and acceptance per position.

    Raises UsageError where rates or costs do not reach that far.
    """
    most = min(len(conditional_rates), costs.most)
    require(0 <= length <= most, "length", length, f"an integer from 0 to {most}, as far as rates and costs reach")
    return Prediction(expected_tokens_of(conditional_rates)[length], costs.ms(length), costs.ms(0))


def predict_best(costs: Costs, conditional_rates: Sequence[float]) -> tuple[int, Prediction]:
    """The length with the most tokens per second, and what it promises; the shortest of equals."""
    lengths = range(min(len(conditional_rates), costs.most) + 1)
    return max(((k, predict(costs, conditional_rates, k)) for k in lengths), key=lambda pair: pair[1].tokens_per_second)


def predict_run(costs: Costs, num_drafted: Iterable[int], num_tokens: int) -> Prediction:
    """What measured costs promise for a run whose rounds drafted `num_drafted` tokens each and gave `num_tokens` in
    all: beside a measured time, it tells how much was lost outside the costs. Raises UsageError for no rounds."""
    times = [costs.ms(drafted) for drafted in num_drafted]
    require(len(times) > 0, "num_drafted", [], "at least one round")
    return Prediction(num_tokens / len(times), sum(times) / len(times), costs.ms(0))


def _check(acceptance: float, length: int) -> None:
    require(0 <= acceptance <= 1, "acceptance", acceptance, "a number in [0, 1]")
    require(length >= 0, "length", length, "an integer >= 0")
