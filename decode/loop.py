"""The speculative loop: propose, score, verify, commit. All rows of a batch take each step together."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decode.draft import Draft, Round, Verdict
from decode.errors import unhealthy
from decode.laws import Law
from decode.proposers import Proposer
from decode.row import Row
from decode.session import Session
from decode.verifiers import Verifier


def decode_rounds(
    rows: Sequence[Row], target: Session, proposer: Proposer, verify: Verifier
) -> Iterator[list[tuple[int, Round]]]:
    """Rounds until every row's stopping has a reason: what was done for each live row, by its index in `rows`.

    The first round also reads the prompts, and already verifies drafts. A row that ends leaves the batch.
    Raises DraftsmithError when the target or the draft yields NaN or infinite logits.
    """
    live = list(range(len(rows)))
    while True:
        with torch.inference_mode():
            live = _keep_unfinished(rows, live, target, proposer)
            if not live:
                return
            done = _round([rows[index] for index in live], target, proposer, verify)
        yield list(zip(live, done, strict=True))


def _round(rows: Sequence[Row], target: Session, proposer: Proposer, verify: Verifier) -> list[Round]:
    """One round of each of the rows, which are those that the session and the proposer know."""
    started = time.perf_counter()
    drafts = proposer.propose(rows)
    drafted = time.perf_counter()
    contexts = [row.context(draft.width) for row, draft in zip(rows, drafts, strict=True)]
    logits = target.extend(contexts, [draft.width + 1 for draft in drafts])
    scored = time.perf_counter()
    laws = [
        row.target_sampler.law(own, row.tokens, row.length + draft.width)
        for row, own, draft in zip(rows, logits, drafts, strict=True)
    ]
    verdicts = [verify(draft, law, row.generator) for row, draft, law in zip(rows, drafts, laws, strict=True)]
    decided = _read(rows, drafts, verdicts, laws)
    seconds = (drafted - started, scored - drafted)
    done = [_commit(row, *what, own, seconds) for row, what, own in zip(rows, decided, logits, strict=True)]
    lengths = [round_.context_length + round_.num_accepted for round_ in done]
    target.rewind(lengths)
    proposer.rewind(lengths)
    return done


def _keep_unfinished(rows: Sequence[Row], live: list[int], target: Session, proposer: Proposer) -> list[int]:
    stay = [place for place, index in enumerate(live) if rows[index].stopping.reason is None]
    if stay and len(stay) < len(live):
        target.keep_rows(stay)
        proposer.keep_rows(stay)
    return [live[place] for place in stay]


def _commit(
    row: Row, drafted: list[int], num_accepted: int, next_token: int, logits: Tensor, seconds: tuple[float, float]
) -> Round:
    """Make of a verdict what the row's stopping lets through."""
    length = row.length
    emitted = row.stopping.cut([*drafted[:num_accepted], next_token])
    kept = min(num_accepted, len(emitted))
    row.commit(emitted, kept)
    row.draft_length.update(len(drafted), kept)
    log_probs = _log_probs(row.target_sampler.vocabulary.cut(logits), row.context()[length:]) if row.log_probs else None
    if kept == len(emitted):  # the text ended inside the block, and nothing was decided on the rest of it
        drafted = drafted[:kept]
    return Round(length, drafted, kept, emitted, *seconds, log_probs)


def _log_probs(logits: Tensor, emitted: Tensor) -> list[float]:
    scores = logits[: len(emitted)].to(torch.promote_types(logits.dtype, torch.float32))
    return scores.log_softmax(-1).gather(-1, emitted.unsqueeze(-1)).squeeze(-1).tolist()


Decision = tuple[list[int], int, int]  # drafted tokens, how many are accepted, the token after them


def _read(
    rows: Sequence[Row], drafts: Sequence[Draft], verdicts: Sequence[Verdict], laws: Sequence[Law]
) -> list[Decision]:
    """What was decided on each row: the round's one read from the device."""
    kept = verdicts[0].num_accepted
    read = _read_each if isinstance(kept, int) or kept.is_cpu else _read_together
    decisions, healthy = read(drafts, verdicts, laws)
    if not all(healthy):
        at = healthy.index(False)
        bans = rows[at // 2].target_sampler.processors is not None
        raise unhealthy("draft" if at % 2 else "target", ", or settings that ban every token" if bans else "")
    return decisions


def _read_each(
    drafts: Sequence[Draft], verdicts: Sequence[Verdict], laws: Sequence[Law]
) -> tuple[list[Decision], list[bool]]:
    """The decisions, and of each row whether the target's and the draft's logits defined laws."""
    decisions = [
        (draft.listed, int(verdict.num_accepted), int(verdict.next_token))
        for draft, verdict in zip(drafts, verdicts, strict=True)
    ]
    return decisions, list(map(bool, _health(drafts, laws)))


def _read_together(
    drafts: Sequence[Draft], verdicts: Sequence[Verdict], laws: Sequence[Law]
) -> tuple[list[Decision], list[bool]]:
    """The same; from a GPU each read costs a wait, so all that is to be read is joined."""
    flags = _health(drafts, laws)
    single = [torch.as_tensor(value) for verdict in verdicts for value in (verdict.num_accepted, verdict.next_token)]
    single += [flag.to(torch.int64) for flag in flags if isinstance(flag, Tensor)]
    values = iter(torch.cat([*(draft.tokens for draft in drafts), torch.stack(single)]).tolist())
    drafted = [[next(values) for _ in range(draft.width)] for draft in drafts]
    decisions = [(tokens, next(values), next(values)) for tokens in drafted]
    return decisions, [bool(next(values)) if isinstance(flag, Tensor) else flag for flag in flags]


def _health(drafts: Sequence[Draft], laws: Sequence[Law]) -> list[Tensor | bool]:
    flags = [flag for law, draft in zip(laws, drafts, strict=True) for flag in (law.healthy, draft.healthy)]
    return [True if flag is None else flag for flag in flags]
