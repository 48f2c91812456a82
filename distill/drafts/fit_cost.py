"""Chooses the size of a draft by what its step is measured to cost, and shows what it measured."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from decode.backends import with_backend
from decode.models import LoadedModel
from distill.config import InitConfig
from distill.drafts.shapes import Depth, Shape, largest_within
from distill.drafts.step_cost import step_seconds

Size = TypeVar("Size", Shape, Depth)


def by_cost(
    sizes: Sequence[Size],
    build: Callable[[Size], Any],
    target: LoadedModel,
    config: InitConfig,
    console: Console,
) -> Size:
    """The largest of `sizes` (small to large) whose measured step is within fit_cost_ratio of the target's.

    Both run as decoding would run them. Prints a table of all that were measured. Raises UsageError where none fits.
    """
    assert config.fit_cost_ratio is not None
    base = step_seconds(with_backend(target, config.model.backend))
    table = Table("draft", "parameters", "step ms", "cost ratio")

    def ratio(size: Size) -> float:
        model = build(size).to(device=target.device, dtype=target.model.dtype).eval().requires_grad_(False)
        seconds = step_seconds(with_backend(LoadedModel(model, target.tokenizer, "candidate"), config.model.backend))
        parameters = sum(p.numel() for p in model.parameters())
        table.add_row(size.describe(), f"{parameters / 1e6:.1f}M", f"{seconds * 1e3:.2f}", f"{seconds / base:.3f}")
        return seconds / base

    chosen, cost = largest_within(sizes, config.fit_cost_ratio, ratio)
    console.print(table)
    console.print(f"target step {base * 1e3:.1f} ms; {chosen.describe()}: a step costs {cost:.3f} of it")
    return chosen
