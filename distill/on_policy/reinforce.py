"""The policy gradient on accepted length: from rounds of real decoding to proposals with advantages.

For a context c let a draft of W tokens be drawn from q and token i be kept, if all before it were, with probability
min(1, p / q) (the token rule). The expected number of kept tokens is J = sum_i sum_x prod_{j <= i} min(p, q)(x_j). Its
gradient needs more than the score of the proposals, for what is kept depends on q itself:

    grad J = E[ sum_j  1[all before j kept] (R_j 1[q(x_j) <= p(x_j)] - b_j)  grad log q(x_j) ],

R_j: the tokens of the round that were kept from j on; b_j: any number that does not depend on x_j. Without the
indicator a token that is proposed more often than the target would say it still earns its reward, and the gradient is
another one: where q > p to propose it more often keeps no more of it. Derivation: the score of x_j carries the expected
reward from j on, G_j; the derivative of the acceptance probabilities carries -G_j where q > p; the two cancel there.

A token that was not reached has no part, a rejected one has R_j = 0, so p and q are needed at kept tokens only: those
are on the text. The gradient is of the round's length at the contexts that decoding met, of the draft that drew the
proposals; between two makings it is not corrected for how far the draft has moved since.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from decode.draft import Round
from distill.data.batches import collate
from distill.data.examples import Example
from distill.heads import head_stands_apart, supervised_logits
from distill.laws import Columns, tempered
from distill.on_policy.rollout import Rollout


@dataclass(frozen=True)
class Trial:
    """The part of a round's proposal on which something was decided."""

    context: list[int]
    tokens: list[int]  # the kept ones, then the rejected one where there is one
    credits: list[float]  # of each: R_j 1[q <= p]
    text: int  # the rollout that it is from


def trials_of(rollout: Rollout, text: int, width: int, fits: Sequence[bool]) -> list[Trial]:
    """The trials of a text's rounds of `width` drafted tokens, or that an end-of-text token ended.

    `fits` tells for each new token whether q <= p there. Rounds shortened by the budget would have another expected
    reward at the same place.
    """
    found = []
    for done in rollout.rounds:
        if len(done.drafted) < width and done.kind != "ended":
            continue
        start = done.context_length - len(rollout.prompt)
        kept = fits[start : start + done.num_accepted]
        context = rollout.ids[: done.context_length]
        found.append(Trial(context, done.drafted[: done.num_accepted + 1], credits_of(done, kept), text))
    return [trial for trial in found if trial.tokens]


def credits_of(done: Round, fits: Sequence[bool]) -> list[float]:
    """R_j 1[q <= p] of each kept token, and 0 of the rejected one where there is one."""
    rewards = [float(done.num_accepted - j) * fit for j, fit in enumerate(fits)]
    return rewards + [0.0] * (done.num_accepted < len(done.drafted))


def advantages_of(trials: Sequence[Trial]) -> list[list[float]]:
    """Credits less the mean credit of the trials of *other* texts that reached the same place; 0 where there is none.

    Trials of one text are not independent: a later round's context holds what an earlier one proposed.
    """
    sums: defaultdict[tuple[int | None, int], float] = defaultdict(float)  # by text, None for all, and place
    counts: defaultdict[tuple[int | None, int], int] = defaultdict(int)
    for trial in trials:
        for j, credit in enumerate(trial.credits):
            for text in (None, trial.text):
                sums[text, j] += credit
                counts[text, j] += 1

    def baseline(text: int, j: int) -> float:
        others = counts[None, j] - counts[text, j]
        return (sums[None, j] - sums[text, j]) / others if others else 0.0

    return [[credit - baseline(trial.text, j) for j, credit in enumerate(trial.credits)] for trial in trials]


def proposal(trial: Trial, advantages: Sequence[float], weight: float, anchor: float, source: str) -> Example:
    """A trial as a document of its own: the loss counts `anchor` at its tokens, the policy gradient `weight`."""
    before, size = len(trial.context), len(trial.tokens)
    return Example(
        input_ids=[*trial.context, *trial.tokens],
        mask=[False] * before + [True] * size,
        source=source,
        weights=[0.0] * before + [anchor] * size,
        advantages=[0.0] * before + [weight * value for value in advantages],
    )


def where_draft_fits(
    target: Any, draft: Any, columns: Columns, texts: Sequence[Example], temperature: float, batch_size: int
) -> list[list[bool]]:
    """For each new token of each text, whether the draft's probability is at most the target's, as both models say when
    they read the whole text. False for a token that the draft lacks, which it never proposed."""
    apart = head_stands_apart(target), head_stands_apart(draft)
    found: list[list[bool]] = []
    for first in range(0, len(texts), batch_size):
        group = texts[first : first + batch_size]
        fits = _compare(target, draft, columns, group, temperature, apart).tolist()
        for size in (example.num_supervised for example in group):
            found.append([fits.pop(0) for _ in range(size)])
    return found


@torch.inference_mode()
def _compare(
    target: Any, draft: Any, columns: Columns, group: Sequence[Example], temperature: float, apart: tuple[bool, bool]
) -> Tensor:  # [N] bool
    batch = collate([[place] for place in range(len(group))], group, normaliser=1.0)
    batch = move_data_to_device(batch, columns.ids.device)
    following = batch.next_ids[batch.supervised]
    p = _log_prob(supervised_logits(target, batch, apart[0]), following, temperature)
    column = columns.column_of[following]
    logits = supervised_logits(draft, batch, apart[1])
    q = _log_prob(logits, column.clamp(max=logits.shape[-1] - 1), temperature)
    return (q <= p) & (column < logits.shape[-1])


def _log_prob(logits: Tensor, columns: Tensor, temperature: float) -> Tensor:  # [N, V], [N] -> [N]
    logits = tempered(logits, temperature)
    return logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
