"""From logits to laws. Greedy is a point mass made here, not a second algorithm."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from decode.config import SamplingConfig
from decode.laws import Known, Law

# Columns that hold what a filter keeps, as a rule. More of them cost more to find than they save behind it.
SHORTLIST = 512

# (probs [R, K], key [R, K]) -> probs [R, K], 0 where a token is dropped; whatever has a lower key goes first.
_Rule = Callable[[Tensor, Tensor], Tensor]


def law_of(
    logits: Tensor,  # [R, V or N] any float dtype
    sampling: SamplingConfig,
    ids: Tensor | None = None,  # [N] int64 ascending: the token ids that the columns stand for; None: column = id
) -> Law:
    """The laws that tokens are drawn from: temperature, top-k, top-p, min-p, typical-p, in transformers' order.

    fp32, or fp64 for fp64 logits. At temperature 0 all mass is on the largest logit, ties to the lowest id. Where few
    tokens survive the filters the law has columns for those alone, by rising id, so that a draw depends on the law and
    not on its form. On the CPU; on a GPU to ask how many survive would cost more than whole rows do.

    Rows that define no law (NaN, +inf, or nothing but -inf) make the law unhealthy; they raise nothing.
    """
    precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if sampling.greedy:
        return _largest(logits, ids, precise)
    probs, columns = _top_k(logits if logits.dtype == precise else logits.to(precise), sampling)
    healthy = _are_laws(probs)
    if sampling.top_p < 1 or sampling.min_p > 0:
        probs, columns = _cut(probs, columns, probs, partial(_likely, top_p=sampling.top_p, min_p=sampling.min_p))
    if sampling.typical_p < 1:
        probs, columns = _cut(probs, columns, _typicality(probs), partial(_typical, typical_p=sampling.typical_p))
    if ids is not None:
        columns = ids if columns is None else ids[columns]
    return Law(probs, columns, healthy)


def _largest(logits: Tensor, ids: Tensor | None, precise: torch.dtype) -> Law:
    """All mass on each row's largest logit, the lowest id among equals. Healthy where all of these are finite."""
    if logits.is_cpu:
        rows = (logits if logits.dtype == precise else logits.to(precise)).numpy()
        best = rows.argmax(-1)  # six times as fast as torch's on a CPU
        columns = best.tolist()
        healthy = all(math.isfinite(rows.item(row, column)) for row, column in enumerate(columns))
        return Known(columns if ids is None else ids.numpy()[best].tolist(), healthy, precise)
    found = logits.max(-1)
    tokens = found.indices if ids is None else ids[found.indices]
    return Law.point(tokens, found.values.isfinite().all(), precise)


def _are_laws(probs: Tensor) -> Tensor | bool:
    """Whether all rows are laws: one that defines none is NaN from end to end."""
    if probs.is_cpu:
        rows = probs.numpy()
        return all(rows.item(row, 0) >= 0 for row in range(len(rows)))
    return (probs[:, 0] >= 0).all()


def _top_k(scores: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor | None]:
    """Probabilities after temperature and top-k, and the columns of `scores` they belong to; None: all.

    As transformers has it, all equals of the k-th likeliest token are kept: those need a column more than there is.
    """
    k = sampling.top_k
    if not 0 < k < scores.shape[-1]:
        return _soften(scores, sampling.temperature), None
    best = scores.topk(k + 1)
    last, next_one = best.values[:, k - 1 : k], best.values[:, k : k + 1]
    if scores.device.type == "cpu" and (last > next_one).all():
        columns, order = best.indices[:, :k].sort(-1)
        return _soften(best.values[:, :k], sampling.temperature).gather(-1, order), columns
    return _soften(scores.masked_fill(scores < last, float("-inf")), sampling.temperature), None


def _soften(scores: Tensor, temperature: float) -> Tensor:
    return (scores if temperature == 1 else scores / temperature).softmax(-1)


def _cut(probs: Tensor, columns: Tensor | None, key: Tensor, rule: _Rule) -> tuple[Tensor, Tensor | None]:
    """What `rule` keeps, renormalised, and its columns."""
    if columns is None:
        kept, columns = _survivors(probs, key, rule, SHORTLIST)
    else:
        kept = rule(probs, key)
    return kept / kept.sum(-1, keepdim=True), columns


def _survivors(probs: Tensor, key: Tensor, rule: _Rule, count: int) -> tuple[Tensor, Tensor | None]:
    """What `rule` keeps, in `count` columns where that is enough of them, else in all.

    To sort a whole vocabulary costs more than the model's head. A rule drops tokens from the lowest key up; so where
    it keeps nothing of the lowest key in a shortlist of the highest, it keeps nothing outside either.
    """
    if 8 * count > probs.shape[-1] or probs.device.type != "cpu":
        return rule(probs, key), None
    columns = key.topk(count, sorted=False).indices.sort(-1).values
    short = key.gather(-1, columns)
    kept = rule(probs.gather(-1, columns), short)
    fits = torch.where(kept > 0, short, float("inf")).amin(-1) > short.amin(-1)
    if fits.all():
        return kept, columns
    whole = _spread(probs, kept, columns)
    more = ~fits
    whole[more] = _spread(probs[more], *_survivors(probs[more], key[more], rule, 8 * count))
    return whole, None


def _spread(like: Tensor, kept: Tensor, columns: Tensor | None) -> Tensor:
    return kept if columns is None else torch.zeros_like(like).scatter_(-1, columns, kept)


def _likely(probs: Tensor, key: Tensor, *, top_p: float, min_p: float) -> Tensor:
    """The likeliest tokens until their mass reaches `top_p`, the lower id first among equals, and of these all that are
    at least `min_p` times as likely as the likeliest. `key` is `probs`."""
    kept = probs
    if top_p < 1:
        values, order = probs.sort(dim=-1, descending=True, stable=True)
        beyond = values.cumsum(-1, dtype=torch.float64) - values >= top_p
        kept = torch.zeros_like(probs).scatter_(-1, order, values.masked_fill_(beyond, 0.0))
    if min_p > 0:
        kept = kept.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
    return kept


def _typicality(probs: Tensor) -> Tensor:
    """Minus the distance of each token's surprise from the law's entropy. Source: Meister et al. 2022."""
    entropy = torch.special.entr(probs).sum(-1, keepdim=True)
    return -(probs.log() + entropy).abs()


def _typical(probs: Tensor, key: Tensor, *, typical_p: float) -> Tensor:
    """The most typical tokens until their mass reaches `typical_p`, with all equals of the last."""
    ranked, order = key.sort(-1, descending=True)
    mass = probs.gather(-1, order).cumsum(-1, dtype=torch.float64)
    last = (mass < typical_p).sum(-1, keepdim=True).clamp_(max=key.shape[-1] - 1)
    return probs.masked_fill(key < ranked.gather(-1, last), 0.0)


def is_healthy(logits: Tensor) -> Tensor:
    """[] bool: every row has a finite largest logit, so that it defines a law."""
    return logits.amax(-1).isfinite().all()
