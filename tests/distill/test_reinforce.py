"""The policy gradient against exact enumeration, its negative controls, and the whole way from decoding to a loss."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from decode.config import DecodeConfig, SamplingConfig
from decode.draft import Round
from distill.config import LossConfig, ReinforceConfig
from distill.data.batches import collate
from distill.laws import Columns
from distill.on_policy.reinforce import Trial, advantages_of, credits_of, proposal, trials_of, where_draft_fits
from distill.on_policy.rollout import roll_out
from distill.on_policy.sources import Pair, proposals
from distill.on_policy.texts import own_text
from distill.student import Student
from distill.teacher.online import OnlineTeacher
from tests.fixtures import loaded, markov_law, tiny_llama

SIZE = 4


def laws(seed: int) -> tuple[Tensor, Tensor]:
    """p and the logits of q, [V, V]: what follows each token."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    return p.softmax(-1), q.log_softmax(-1).requires_grad_(True)


def accepted_length(p: Tensor, log_q: Tensor, start: int, width: int) -> Tensor:
    """The expected number of kept tokens: sum over i and x of the products of min(p, q)."""
    kept = torch.minimum(p, log_q.softmax(-1))
    total, reach = log_q.new_zeros(()), torch.eye(SIZE, dtype=torch.float64)[start]
    for _ in range(width):
        reach = reach @ kept
        total = total + reach.sum()
    return total


Credits = Callable[[Round, list[bool]], list[float]]


def policy_gradient(
    p: Tensor, logits: Tensor, start: int, width: int, credit: Credits, baseline: Callable[[int, bool], float]
) -> Tensor:
    """The expectation of the estimate over all proposals and all outcomes of their trials."""
    log_q = logits.log_softmax(-1)
    q, surrogate = log_q.detach().exp(), log_q.new_zeros(())
    for x in itertools.product(range(SIZE), repeat=width):
        path = list(itertools.pairwise((start, *x)))
        drawn = torch.stack([q[pair] for pair in path]).prod()
        keep = [min(1.0, float(p[pair] / q[pair])) for pair in path]
        for kept in range(width + 1):
            chance = math.prod([*keep[:kept], 1 - keep[kept] if kept < width else 1.0])
            fits = [bool(q[pair] <= p[pair]) for pair in path[:kept]]
            values = credit(Round(1, list(x), kept, [*x[:kept], 0]), fits)
            for j, (value, pair) in enumerate(zip(values, path, strict=False)):
                surrogate = surrogate + drawn * chance * (value - baseline(j, j < kept)) * log_q[pair]
    return torch.autograd.grad(surrogate, logits)[0]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_expected_policy_gradient_is_the_gradient_of_the_expected_accepted_length(width: int, seed: int) -> None:
    p, logits = laws(seed)
    expected = torch.autograd.grad(accepted_length(p, logits, 1, width), logits)[0]

    def gap(credit: Credits, baseline: Callable[[int, bool], float]) -> float:
        return float((policy_gradient(p, logits, 1, width, credit, baseline) - expected).abs().max())

    assert expected.abs().max() > 1e-2
    assert gap(credits_of, lambda j, kept: 0.0) < 1e-12
    assert gap(credits_of, lambda j, kept: 0.7 - 0.2 * j) < 1e-12
    # controls: as if acceptance did not depend on q; a baseline that knows the outcome of the token's own trial
    assert gap(lambda done, fits: credits_of(done, [True] * len(fits)), lambda j, kept: 0.0) > 1e-3
    assert gap(credits_of, lambda j, kept: 0.7 * kept) > 1e-3


def test_credits_are_the_kept_tokens_from_each_on() -> None:
    assert credits_of(Round(5, [1, 2, 3], 2, [1, 2, 9]), [True, True]) == [2.0, 1.0, 0.0]
    assert credits_of(Round(5, [1, 2, 3], 2, [1, 2, 9]), [False, True]) == [0.0, 1.0, 0.0]
    assert credits_of(Round(5, [1, 2], 2, [1, 2, 9]), [True, True]) == [2.0, 1.0]
    assert credits_of(Round(5, [1, 2], 0, [9]), []) == [0.0]


DECODE = DecodeConfig(12, 2, "fixed", sampling=SamplingConfig(temperature=1.0), eos_token_ids=[])


def test_estimates_from_real_decoding_agree_with_the_exact_gradient_and_naive_ones_do_not() -> None:
    p, logits = laws(3)
    q = logits.detach().softmax(-1)
    target, draft = markov_law(p.tolist()), markov_law(q.tolist())
    rollouts = roll_out(loaded(target), loaded(draft), [[0], [1], [2], [3]] * 100, DECODE, "seed", 400)
    texts = [text for rollout in rollouts if (text := own_text(rollout, "")) is not None]
    fits = where_draft_fits(target, draft, Columns(SIZE), texts, 1.0, 100)
    exact = [torch.autograd.grad(accepted_length(p, logits, c, 2), logits)[0] for c in range(SIZE)]

    def worst(all_fit: bool) -> float:
        """The largest deviation of the mean over texts from the exact gradient, in standard errors."""
        own = [[True] * len(row) if all_fit else row for row in fits]
        trials = [t for n, each in enumerate(rollouts) for t in trials_of(each, n, 2, own[n])]
        differences = torch.zeros(len(rollouts), SIZE, SIZE, dtype=torch.float64)
        for trial, advantages in zip(trials, advantages_of(trials), strict=True):
            differences[trial.text] -= exact[trial.context[-1]]
            previous = trial.context[-1]
            for token, advantage in zip(trial.tokens, advantages, strict=True):
                score = -q[previous].clone()
                score[token] += 1
                differences[trial.text, previous] += advantage * score
                previous = token
        z = differences.mean(0) / (differences.std(0) / len(rollouts) ** 0.5)
        return float(z.abs().max())

    assert worst(all_fit=False) < 4.5
    assert worst(all_fit=True) > 6


def test_shortened_rounds_are_left_out_and_ended_ones_are_not() -> None:
    p, logits = laws(3)
    target, draft = loaded(markov_law(p.tolist())), loaded(markov_law(logits.detach().softmax(-1).tolist()))
    ends = DecodeConfig(12, 3, "fixed", sampling=SamplingConfig(temperature=1.0), eos_token_ids=[2])
    rollouts = roll_out(target, draft, [[0]] * 40, ends, "seed", 40)
    kinds = set()
    for rollout in rollouts:
        trials = trials_of(rollout, 0, 3, [True] * len(rollout.new_ids))
        rounds = [done for done in rollout.rounds if len(done.drafted) == 3 or done.kind == "ended"]
        kinds |= {(done.kind, len(done.drafted)) for done in rollout.rounds}
        assert [len(trial.context) for trial in trials] == [done.context_length for done in rounds]
        for trial, done in zip(trials, rounds, strict=True):
            assert trial.tokens == done.drafted[: done.num_accepted + 1]
            assert len(trial.credits) == len(trial.tokens)
    assert ("ended", 1) in kinds and any(kind != "ended" and width < 3 for kind, width in kinds)


def test_a_trials_baseline_is_the_mean_of_other_texts() -> None:
    found = [make_trial(0, [2.0, 1.0]), make_trial(0, [0.0]), make_trial(1, [1.0, 1.0]), make_trial(2, [2.0, 0.0])]
    assert advantages_of(found) == [[2 - 1.5, 1 - 0.5], [0 - 1.5], [1 - 4 / 3, 1 - 0.5], [2 - 1.0, 0 - 1.0]]
    assert advantages_of(found[:2]) == [[2.0, 1.0], [0.0]]


def make_trial(text: int, credits: Sequence[float]) -> Trial:
    return Trial([0], [1] * len(credits), list(credits), text)


def test_the_students_total_has_the_policy_gradient_beside_the_anchor() -> None:
    """total = sum of anchor * loss - sum of advantage * log q, at the proposed tokens and nowhere else."""
    draft, target = tiny_llama(seed=1), tiny_llama()
    example = proposal(Trial([3, 4, 5], [6, 7], [1.0, 0.0], 0), [0.5, -0.25], 2.0, 0.125, "made")
    batch = collate([[0]], [example], normaliser=1.0)
    outcome = Student(loaded(draft), LossConfig())(batch, OnlineTeacher(target).law(batch))
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    log_q = draft(input_ids=ids).logits[0, 2:4].log_softmax(-1)
    log_p = target(input_ids=ids).logits[0, 2:4].log_softmax(-1)
    anchor = 0.125 * (log_p.exp() * (log_p - log_q)).sum()
    expected = anchor - (2 * 0.5 * log_q[0, 6] - 2 * 0.25 * log_q[1, 7])
    assert float(outcome.total.detach()) == pytest.approx(float(expected.detach()), abs=1e-9)
    parameters = list(draft.parameters())
    ours, theirs = torch.autograd.grad(outcome.total, parameters), torch.autograd.grad(expected, parameters)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-9


def test_proposals_of_a_perfect_draft_have_the_same_expectation_everywhere() -> None:
    """A draft that is the target keeps all: every advantage is 0, and so is the policy gradient."""
    model = tiny_llama(vocab_size=12)
    pair = Pair(loaded(model), loaded(model), "eager")
    config = ReinforceConfig(fraction=0.5, num_texts=6, max_new_tokens=9, num_speculative_tokens=2, num_rounds=5)
    texts = proposals(config, 1.0)(pair, [[n, n + 1] for n in range(6)], "seed")
    assert len(texts) == 5
    for text in texts:
        assert text.advantages is not None and text.weights is not None
        assert text.mask[-2:] == [True, True] and text.num_supervised == 2
        assert not any(text.advantages)
        assert text.weights == [0.0] * (len(text.input_ids) - 2) + [1.0, 1.0]
