"""Acceptance of drafts at the positions of held-out answers: teacher-forced, against the target's whole law."""

from collections.abc import Sequence

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.progress import track

from decode.models import LoadedModel
from decode.session import context_limit
from distill.acceptance import acceptance
from distill.data.batches import collate
from distill.data.examples import load_examples
from distill.heads import head_stands_apart, supervised_logits
from distill.laws import Columns
from distill.teacher.online import OnlineTeacher

ROWS_AT_ONCE = 4


@torch.no_grad()
def acceptance_on(file: str, target: LoadedModel, drafts: Sequence[LoadedModel]) -> list[dict[str, float]]:
    """For each draft, the mean of every kind of acceptance over the supervised positions of `file`, at temperature 1.

    The names are those of a run's metrics. The target is run once for all drafts. Raises UsageError for a bad row.
    """
    limit = min(context_limit(model.model) for model in (target, *drafts))
    examples, _ = load_examples([file], target.tokenizer, limit, "error", target.vocab_size)
    teacher = OnlineTeacher(target.model)
    readers = [(d, head_stands_apart(d.model), Columns(d.vocab_size, d.vocab_ids).to(target.device)) for d in drafts]
    sums: list[dict[str, float]] = [{} for _ in drafts]
    starts = range(0, len(examples), ROWS_AT_ONCE)
    for start in track(starts, "held-out answers", transient=True):
        rows = [[index] for index in range(start, min(start + ROWS_AT_ONCE, len(examples)))]
        batch = move_data_to_device(collate(rows, examples, normaliser=1.0), target.device)
        law = teacher.law(batch)
        law = law.part(0, law.num_positions)
        for total, (draft, apart, columns) in zip(sums, readers, strict=True):
            found = acceptance(law, supervised_logits(draft.model, batch, apart), columns)
            for name, values in vars(found).items():
                total[metric(name)] = total.get(metric(name), 0.0) + float(values.sum())
    count = sum(example.num_supervised for example in examples)
    return [{name: value / count for name, value in total.items()} for total in sums]


def metric(name: str) -> str:
    """The name among a run's metrics of one of Acceptance's fields. An upper bound is the value itself here."""
    if name == "agreement":
        return "val/greedy_agreement"
    kind, _, upper = name.partition("_")
    return f"val/{kind}_acceptance" + (f"_{upper}" if upper else "")
