"""Sampled output follows the target's law: the exact joint law by enumeration, and wrong rules that it catches."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.config import SamplingConfig
from decode.draft import Draft, Verdict
from decode.draft_length import DRAFT_LENGTHS
from decode.draws import draw_uniform
from decode.laws import Law
from decode.loop import decode_rounds
from decode.processors import Processors
from decode.proposers import PROPOSERS, Proposer, Setup
from decode.row import Row
from decode.sampler import Sampler
from decode.stats import Stats
from decode.verifiers import VERIFIERS, Verifier
from decode.verifiers.residual import next_token
from decode.vocabulary import Vocabulary
from tests.fixtures import P, Q
from tests.tables import TableSession, chi_square_p, table_row

# Laws that depend on the last token, for target and draft. The text starts after token 0. The first two rows let the
# block rule stop where p_1 < 1, so that a wrong residual there is seen.
TARGET_ROWS = [
    (0.05, 0.40, 0.30, 0.10, 0.10, 0.05),
    (0.48, 0.48, 0.02, 0.02, 0.00, 0.00),
    (0.10, 0.10, 0.20, 0.20, 0.20, 0.20),
    P[::-1],
    Q,
    P,
]
DRAFT_ROWS = [
    (0.02, 0.75, 0.08, 0.05, 0.05, 0.05),
    (0.02, 0.25, 0.25, 0.20, 0.18, 0.10),
    (0.30, 0.10, 0.10, 0.10, 0.20, 0.20),
    P,
    P,
    (0.90, 0.10, 0.00, 0.00, 0.00, 0.00),
]
COUNT = 3  # tokens whose joint law is enumerated
DRAWS = 2000
PLAIN = SamplingConfig(temperature=1.0)
SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top_k": SamplingConfig(temperature=1.0, top_k=3),
    "top_p": SamplingConfig(temperature=1.3, top_p=0.8),
    "min_p": SamplingConfig(temperature=1.0, min_p=0.3),
    "typical_p": SamplingConfig(temperature=1.0, typical_p=0.7),
    "penalties": SamplingConfig(
        temperature=1.0, repetition_penalty=1.8, frequency_penalty=0.5, presence_penalty=0.4, top_k=5
    ),
    "bans": SamplingConfig(
        temperature=1.0, no_repeat_ngram_size=2, bad_words_ids=[[3], [1, 2]], logit_bias={"4": 0.7}, top_p=0.95
    ),
    "allowed": SamplingConfig(temperature=1.0, allowed_ids=[0, 1, 2, 4]),
}


@cache
def _exact(name: str) -> Tensor:
    return joint_law_of(SAMPLINGS.get(name, PLAIN))


def joint_law_of(sampling: SamplingConfig) -> Tensor:
    """[6 ** COUNT]: every sequence of tokens after token 0, each step's law as plain decoding would have it."""
    sampler = Sampler(sampling, Vocabulary(6, None), Processors.of(sampling, 1, ()))
    logits = torch.tensor(TARGET_ROWS, dtype=torch.float64).log()
    law = {(0,): 1.0}
    for _ in range(COUNT):
        longer = {}
        for text, mass in law.items():
            step = sampler.law(logits[text[-1]].unsqueeze(0), torch.tensor(text), len(text)).dense(6)[0].tolist()
            longer |= {(*text, token): mass * step[token] for token in range(6)}
        law = longer
    return torch.tensor(list(law.values()), dtype=torch.float64)


def joint_counts(verify: Verifier, proposer: type[Proposer] = PROPOSERS["draft_model"], **settings: Any) -> Tensor:
    """How often each sequence of COUNT tokens came out, [6 ** COUNT]; `settings` go to table_row."""
    generator = torch.Generator().manual_seed(0)
    vocab_ids = settings.get("vocab_ids")
    draft_rows = DRAFT_ROWS if vocab_ids is None else [tuple(row[i] for i in vocab_ids) for row in DRAFT_ROWS]
    counts = torch.zeros(6**COUNT, dtype=torch.int64)
    rows = [table_row(COUNT, 2, generator, **settings) for _ in range(DRAWS)]
    setup = Setup(TableSession(draft_rows), 6)
    for _ in decode_rounds(rows, TableSession(TARGET_ROWS), proposer(setup), verify):
        pass
    for row in rows:
        index = 0
        for token in row.context()[1:].tolist():
            index = index * 6 + token
        counts[index] += 1
    return counts


def law_p(counts: Tensor, law: Tensor) -> float:
    """p-value of counts under a joint law: of all tokens together, and, with more power, of every few of them.

    The least p of the seven tests, times seven (Bonferroni).
    """
    tables = counts.view([6] * COUNT), law.view([6] * COUNT)
    dropped = [[], *([[i] for i in range(COUNT)]), *([[i, j] for i in range(COUNT) for j in range(i)])]
    values = [chi_square_p(*(t.sum(d).flatten() if d else t.flatten() for t in tables)) for d in dropped]
    return min(values) * len(values)


@pytest.mark.parametrize("policy", DRAFT_LENGTHS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_d16_joint_law_under_every_rule_and_policy(verifier: str, policy: str) -> None:
    assert law_p(joint_counts(VERIFIERS[verifier], policy=policy), _exact("")) > 1e-4


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_d15_joint_law_under_every_sampling_option(verifier: str, name: str) -> None:
    counts = joint_counts(VERIFIERS[verifier], sampling=SAMPLINGS[name])
    assert law_p(counts, _exact(name)) > 1e-4
    assert law_p(counts, _exact("")) < 1e-4, "the option has no effect that would be seen"


@pytest.mark.parametrize("name", ["top_k", "penalties"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_may_be_drawn_otherwise(verifier: str, name: str) -> None:
    counts = joint_counts(VERIFIERS[verifier], sampling=SAMPLINGS[name], draft_sampling=PLAIN)
    assert law_p(counts, _exact(name)) > 1e-4


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_d17_a_greedy_draft_is_scored_as_a_point_mass(verifier: str) -> None:
    assert law_p(joint_counts(VERIFIERS[verifier], draft_sampling=SamplingConfig()), _exact("")) > 1e-4


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_reduced_draft_vocabulary_is_lossless(verifier: str) -> None:
    assert law_p(joint_counts(VERIFIERS[verifier], vocab_ids=torch.tensor([0, 3, 4])), _exact("")) > 1e-4


def test_no_draft_at_all() -> None:
    assert law_p(joint_counts(VERIFIERS["token"], PROPOSERS["none"]), _exact("")) > 1e-4


def replaced_from_target(draft: Draft, target: Law, generator: torch.Generator) -> Verdict:
    """A wrong rule: the token after a rejection is drawn from p instead of the residual."""
    right = VERIFIERS["token"](draft, target, generator)
    whole = Draft(draft.tokens[:0])
    kept = torch.as_tensor(right.num_accepted)
    uniform = draw_uniform(1, generator).squeeze(0)
    return Verdict(kept, next_token(whole, target, kept, torch.ones((), dtype=torch.float64), uniform))


def only_drafted_token_removed(draft: Draft, target: Law, generator: torch.Generator) -> Verdict:
    """A wrong rule: the residual zeroes the drafted token and keeps p elsewhere."""
    right = VERIFIERS["token"](draft, target, generator)
    removed = Draft(draft.tokens)
    uniform = draw_uniform(1, generator).squeeze(0)
    one, kept = torch.ones((), dtype=torch.float64), torch.as_tensor(right.num_accepted)
    return Verdict(kept, next_token(removed, target, kept, one, uniform))


def never_compared(draft: Draft, target: Law, generator: torch.Generator) -> Verdict:
    """A wrong rule: the first drafted token is committed without a trial."""
    right = VERIFIERS["token"](draft, target, generator)
    kept = torch.as_tensor(right.num_accepted).clamp(min=min(1, draft.width))
    uniform = draw_uniform(1, generator).squeeze(0)
    return Verdict(kept, next_token(Draft(draft.tokens[:0]), target, kept, uniform.new_ones(()), uniform))


def block_with_the_token_rules_residual(draft: Draft, target: Law, generator: torch.Generator) -> Verdict:
    """A wrong rule: the block rule's coins, then max(p - q, 0) where max(p_i p - q, 0) is due."""
    right = VERIFIERS["block"](draft, target, generator)
    uniform, kept = draw_uniform(1, generator).squeeze(0), torch.as_tensor(right.num_accepted)
    return Verdict(kept, next_token(draft, target, kept, uniform.new_ones(()), uniform))


WRONG_RULES = [replaced_from_target, only_drafted_token_removed, never_compared, block_with_the_token_rules_residual]


@pytest.mark.parametrize("wrong", WRONG_RULES)
def test_d16_d19_the_same_test_catches_wrong_rules(wrong: Verifier) -> None:
    assert law_p(joint_counts(wrong), _exact("")) < 1e-4


class DropsToken(PROPOSERS["draft_model"]):  # type: ignore[misc, valid-type]
    """A wrong proposer: it takes a drawn token back because of what it is."""

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        drafts = super().propose(rows)
        return [draft if not draft.width or draft.tokens[-1] != 3 else _shorter(draft) for draft in drafts]


def _shorter(draft: Draft) -> Draft:
    assert draft.law is not None
    return Draft(draft.tokens[:-1], draft.law[:-1], draft.healthy)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_policy_that_takes_tokens_back_is_caught(verifier: str) -> None:
    assert law_p(joint_counts(VERIFIERS[verifier], DropsToken), _exact("")) < 1e-4


def test_processors_that_see_the_whole_block_at_every_position_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong history: each row of a block is processed as if all drafted tokens stood before it."""
    right = Processors.__call__

    def wrong(self: Processors, logits: Tensor, history: Tensor) -> Tensor:
        return torch.cat([right(self, row.unsqueeze(0), history) for row in logits])

    exact = _exact("penalties")
    monkeypatch.setattr(Processors, "__call__", wrong)
    assert law_p(joint_counts(VERIFIERS["token"], sampling=SAMPLINGS["penalties"]), exact) < 1e-4


def rounds_of(rows: tuple[Any, Any], verifier: str, width: int, tokens: int = 5000) -> Stats:
    """Counts of a long text between constant laws of the target and of the draft."""
    generator = torch.Generator().manual_seed(1)
    size = len(rows[0])
    row = table_row(tokens, width, generator, size=size)
    session, draft = TableSession([rows[0]] * size), TableSession([rows[1]] * size)
    proposer = PROPOSERS["draft_model"](Setup(draft, size))
    done = [step[0][1] for step in decode_rounds([row], session, proposer, VERIFIERS[verifier])]
    return Stats.of(done[:-1])  # the budget may cut the last round


@pytest.mark.parametrize("width, mean", [(1, 1.5), (4, 1.9375), (8, 1.99609375)])
def test_e05_counts_meet_the_closed_forms(width: int, mean: float) -> None:
    """alpha = 0.5: tokens a round (1 - .5 ** (W + 1)) / .5; position i is kept in .5 ** i of the rounds."""
    stats = rounds_of((P, Q), "token", width)
    assert stats.mean_acceptance_length is not None
    assert abs(stats.mean_acceptance_length - mean) < 3 * 1.4 / stats.num_spec_steps**0.5
    for i, rate in enumerate(stats.per_position_acceptance_rate[:4], start=1):
        assert abs(rate - 0.5**i) < 4 * (0.25 / stats.num_spec_steps) ** 0.5


@pytest.mark.parametrize("verifier, accepted", [("token", 10 / 9), ("block", 11 / 9)])
def test_the_published_example_of_the_block_rule(verifier: str, accepted: float) -> None:
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two drafted: 10/9 are accepted by tokens, 11/9 by blocks.

    Source: Sun et al. 2024, section 2.
    """
    stats = rounds_of(((1 / 3, 2 / 3), (2 / 3, 1 / 3)), verifier, 2, tokens=12_000)
    mean = stats.num_accepted_draft_tokens / stats.num_spec_steps
    assert abs(mean - accepted) < 4 * 0.85 / stats.num_spec_steps**0.5 < 1 / 9
