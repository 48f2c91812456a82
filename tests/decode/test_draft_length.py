"""Policies keep their bounds and forget nothing they should keep, and cost_model is held to what a simulation shows.

Simulated rounds count tokens and modelled milliseconds; no time is measured.
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from decode.draft_length import DRAFT_LENGTHS, DraftLength, LengthSetup
from decode.draft_length.cost_model import Acceptance, CostModel
from decode.laws import Law
from decode.theory import Costs

# Shapes of costs: the embedded pair on a CPU; a draft a tenth of a target that is bound by memory; a CPU on which two
# tokens cost nearly twice one, and eight hardly more; a draft of six tenths of the target.
COSTS = {
    "cpu": Costs(1.6, (35.0, 36.0, 36.0, 36.0, 37.0, 37.0, 38.0, 38.0, 39.0), 0.5),
    "gpu": Costs(2.0, (20.0, 20.2, 20.4, 20.5, 20.6, 20.7, 20.8, 20.9, 21.0), 0.5),
    "steep": Costs(1.6, (53.0, 92.0, 96.0, 100.0, 110.0, 105.0, 98.0, 96.0, 95.0), 0.5),
    "dear draft": Costs(12.0, (20.0, 20.2, 20.4, 20.5, 20.6, 20.7, 20.8, 20.9, 21.0), 0.5),
}
MOST = 8
TEXT = 128  # tokens
TEXTS = 30  # of each domain


def policy(name: str = "cost_model", most: int = MOST, costs: Costs = COSTS["cpu"], **settings: float) -> DraftLength:
    return DRAFT_LENGTHS[name](LengthSetup(most=most, costs=costs, **settings))


def text(rng: random.Random, rate: Callable[[int], float]) -> list[bool]:
    """For each place of a text, whether the draft, asked there, would draft what the text has."""
    return [rng.random() < rate(place) for place in range(TEXT)]


def wandering(rng: random.Random) -> list[bool]:
    """A text whose acceptance changes every 30 tokens or so."""
    now = rng.uniform(0.1, 0.95)

    def rate(_: int) -> float:
        nonlocal now
        now = rng.uniform(0.1, 0.95) if rng.random() < 1 / 30 else now
        return now

    return text(rng, rate)


def domains(rates: Sequence[float] = (0.03, 0.25, 0.45, 0.6, 0.8, 0.95), seed: int = 0) -> dict[str, list[list[bool]]]:
    rng = random.Random(seed)
    made = {str(rate): [text(rng, lambda _, rate=rate: rate) for _ in range(TEXTS)] for rate in rates}
    return made | {"wandering": [wandering(rng) for _ in range(TEXTS)]}


def decode(matches: list[bool], rule: DraftLength, costs: Costs) -> tuple[float, list[int]]:
    """Modelled milliseconds of one text, and the drafted tokens of each round."""
    place, total, widths = 0, 0.0, []
    while place < len(matches):
        width = min(rule.limit(), len(matches) - place - 1)
        accepted = 0
        while accepted < width and matches[place + accepted]:
            accepted += 1
        rule.update(width, accepted)
        place, total = place + accepted + 1, total + costs.ms(width)
        widths.append(width)
    return total, widths


def speed(texts: list[list[bool]], make: Callable[[], DraftLength], costs: Costs) -> float:
    """Tokens per modelled second."""
    return 1000 * sum(map(len, texts)) / sum(decode(matches, make(), costs)[0] for matches in texts)


def fixed_speeds(texts: list[list[bool]], costs: Costs) -> list[float]:
    """[k]: of the fixed length k."""
    return [speed(texts, lambda k=k: policy("fixed", most=k, costs=costs), costs) for k in range(MOST + 1)]


def together(speeds: list[float]) -> float:
    """Of texts of equal length, one of each speed."""
    return len(speeds) / sum(1 / each for each in speeds)


def worst_and_mixed(name: str, costs: Costs) -> tuple[float, float]:
    """Against the best fixed length of each domain, the worst; against the best single length of all: shares gained."""
    fixed, own = [], []
    for texts in domains().values():
        fixed.append(fixed_speeds(texts, costs))
        own.append(speed(texts, lambda: policy(name, costs=costs), costs))
    worst = min(mine / max(theirs) for mine, theirs in zip(own, fixed, strict=True))
    single = max(together([theirs[k] for theirs in fixed]) for k in range(MOST + 1))
    return worst - 1, together(own) / single - 1


@pytest.mark.parametrize(
    ("shape", "least_mixed"), [("cpu", 0.04), ("gpu", 0.04), ("steep", 0.15), ("dear draft", 0.03)]
)
def test_cost_model_is_near_the_best_fixed_length_of_each_domain_and_beats_the_best_of_all(
    shape: str, least_mixed: float
) -> None:
    worst, mixed = worst_and_mixed("cost_model", COSTS[shape])
    assert worst > (-0.03 if shape in ("cpu", "gpu") else -0.05)  # of texts of no more than 128 tokens
    assert mixed > least_mixed


def test_the_same_bounds_are_not_met_by_a_rule_that_knows_no_costs() -> None:
    worst, mixed = worst_and_mixed("heuristic", COSTS["cpu"])
    assert worst < -0.05 and mixed < 0.04


@pytest.mark.parametrize("most", [0, 1, 8])
@pytest.mark.parametrize("name", DRAFT_LENGTHS)
def test_d48_a_length_stays_within_bounds_and_no_state_survives(name: str, most: int) -> None:
    rng = random.Random(0)
    first = policy(name, most=most)
    start = first.limit()
    for _ in range(300):
        assert 0 <= first.limit() <= most
        drafted = rng.randint(0, first.limit())  # the text's end, or a stop, may have cut it short
        first.update(drafted, rng.randint(0, drafted))
    assert policy(name, most=most).limit() == start


@pytest.mark.parametrize("name", ["heuristic", "cost_model"])
def test_d48_lengths_rise_with_good_drafts_and_fall_with_bad_ones(name: str) -> None:
    lengths = {}
    for call, good in enumerate((True, False, True)):
        rule, seen = policy(name), []
        for _ in range(60):
            seen.append(rule.limit())
            rule.update(seen[-1], seen[-1] if good else 0)
        lengths[call] = seen
    assert lengths[0] == lengths[2], "the third call starts like the first"
    assert lengths[0][-1] == MOST and lengths[1][-1] <= 1
    assert lengths[0][0] == lengths[1][0] > lengths[1][-1]


@pytest.mark.parametrize(("threshold", "stops"), [(0.0, False), (None, True), (0.3, False), (0.35, True), (0.99, True)])
def test_d48_confidence_stops_below_its_threshold(threshold: float | None, stops: bool) -> None:
    law = Law(torch.tensor([[0.3, 0.25, 0.25, 0.2]]), torch.tensor([4, 9, 11, 30]))
    rule = DRAFT_LENGTHS["confidence"](LengthSetup(threshold=threshold))
    assert rule.watches and rule.stop(law) is stops
    assert rule.limit() == MOST  # it stops by what it sees, never by a limit of its own
    assert not rule.stop(Law.point(torch.tensor([3])))


@pytest.mark.parametrize(("threshold", "last"), [(None, 24), (0.0, 148), (0.5, 3), (1.0, 1)])
def test_entropy_stops_where_its_bound_on_acceptance_is_low(threshold: float | None, last: int) -> None:
    """1 - sqrt(.2 ln n) of n equally likely tokens: .2 lies between n = 24 and 25, 0 between 148 and 149, .5 between 3
    and 4."""
    rule = DRAFT_LENGTHS["entropy"](LengthSetup(threshold=threshold))
    assert rule.watches
    for count, stops in ((last, False), (last + 1, True)):
        law = torch.zeros(1, 200, dtype=torch.float64)
        law[0, :count] = 1 / count
        assert rule.stop(Law(law)) is stops


def test_cost_model_starts_at_once_with_what_the_costs_make_of_an_ordinary_draft() -> None:
    assert 2 <= policy(costs=COSTS["cpu"]).limit() <= 5
    assert policy(costs=COSTS["dear draft"]).limit() <= 1


def test_plain_decoding_is_chosen_and_tried_out_of_ever_more_seldom() -> None:
    _, widths = decode([False] * 400, policy(), COSTS["cpu"])
    plain = [i for i, width in enumerate(widths) if width == 0]
    assert plain[0] < 40
    probes = [i for i, width in enumerate(widths) if width > 0 and i > plain[0]]
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert gaps == sorted(gaps) and gaps[-1] > 30 and len(probes) < 20


def test_plain_decoding_is_left_when_drafts_turn_good() -> None:
    _, widths = decode([False] * 200 + [True] * 200, policy(), COSTS["cpu"])
    assert widths[150] == 0 and widths[-2] == MOST
    assert sum(width == 0 for width in widths[200:]) < 40


def test_costs_that_do_not_rise_with_width_are_followed() -> None:
    gap = Costs(0.5, (35.0, 60.0, 60.0, 60.0, 36.0), 0.5)
    _, widths = decode(text(random.Random(0), lambda _: 0.6), policy(most=4, costs=gap), gap)
    assert set(widths[:-4]) == {4}


def test_texts_that_change_are_followed_because_old_rounds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    texts = [wandering(rng) for _ in range(100)]
    best = max(fixed_speeds(texts, COSTS["cpu"]))
    assert speed(texts, policy, COSTS["cpu"]) > 1.01 * best
    monkeypatch.setattr(Acceptance, "KEEP", 1.0)
    assert speed(texts, policy, COSTS["cpu"]) < 1.01 * best


def test_hysteresis_keeps_noise_from_changing_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes() -> int:
        rng = random.Random(1)
        runs = [decode(text(rng, lambda _: 0.6), policy(), COSTS["cpu"])[1] for _ in range(10)]
        return sum(a != b for widths in runs for a, b in pairwise(widths))

    with_it = changes()
    monkeypatch.setattr(CostModel, "HYSTERESIS", 0.0)
    assert with_it < 0.8 * changes()


@pytest.mark.parametrize("costs", [None, Costs(1.0, (10.0, 10.0), 0.5)])
def test_cost_model_needs_costs_unless_nothing_is_ever_drafted(costs: Costs | None) -> None:
    with pytest.raises(ValueError, match="do not cover drafts of up to 8 tokens"):
        CostModel(LengthSetup(costs=costs))
    rule = CostModel(LengthSetup(most=0, costs=costs))
    rule.update(0, 0)
    assert rule.limit() == 0 and CostModel.needs_costs


def test_a_round_says_nothing_of_positions_that_were_not_reached() -> None:
    """Two rounds that rejected their first token, and two that drafted one only, teach the same of position 2."""
    short, long = policy(), policy()
    for _ in range(2):
        short.update(1, 0)
        long.update(8, 0)
    assert short.limit() == long.limit()
    assert math.isclose(short._promises[8], long._promises[8])  # type: ignore[attr-defined]
