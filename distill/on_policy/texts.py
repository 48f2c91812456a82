"""Makes training examples of decoded texts: the draft's own, and the target's with weights at rejected positions."""

from collections.abc import Sequence

from decode.draft import Round
from distill.data.examples import Example
from distill.on_policy.rollout import Rollout


def own_text(rollout: Rollout, source: str) -> Example | None:
    """A text that the draft wrote, every new token supervised; None where nothing was written."""
    new = rollout.new_ids
    mask = [False] * len(rollout.prompt) + [True] * len(new)
    return Example(rollout.ids, mask, source) if new else None


def replayed(prompt: Sequence[int], rounds: Sequence[Round], weight: float, max_length: int, source: str) -> Example:
    """A text of the target that was decoded with a draft, cut to `max_length` tokens.

    A token that took the place of a rejected one counts `weight`, every other new token 1: the first is where the
    target's law and the draft's lie furthest apart, as real decoding meets them. The text itself follows the target's
    law, whatever the draft was.
    """
    ids, weights = list(prompt), [1.0] * len(prompt)
    for done in rounds:
        ids += done.emitted
        weights += [1.0] * len(done.emitted)
        if done.kind == "recovered":
            weights[-1] = weight
    mask = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    return Example(ids[:max_length], mask[:max_length], source, weights[:max_length])
