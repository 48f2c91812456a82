#!/usr/bin/env python
"""Print tokens per second of ragged batches: ours beside transformers' generate, each row beside its solo run."""

import sys

from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

from decode.errors import DraftsmithError


def main(
    target: str = "smollm2-135m",
    draft: str = "runs/quickstart/draft",
    prompts: tuple[str, ...] = ("configs/bench/stories.jsonl", "configs/bench/questions.jsonl"),
    num_prompts: int = 8,
    batch_sizes: tuple[int, ...] = (1, 4, 8),
    methods: tuple[str, ...] = ("transformers", "plain", "fixed:1", "fixed:2", "fixed:3", "cost_model"),
    max_new_tokens: int = 64,
    repeats: int = 2,
    backend: str = "auto",
    device: str = "auto",
) -> None:
    """Decode the same prompts greedily at every batch size, in one interleaved run.

    Args:
        prompts: Files whose prompts take turns, so that the rows of a batch are of different lengths.
        num_prompts: Of all files together; every batch size divides it.
        methods: transformers, plain, or NAME[:LENGTH][/VERIFIER] with one of our draft lengths.
        backend: Of our own methods; transformers runs the target as it was loaded.
    """
    from decode.config import ModelConfig
    from decode.models import load_model
    from distill.data.examples import load_prompts
    from distill.drafts.load import load_draft
    from distill.results.bench_batches import batch_methods, measure_batches
    from distill.results.evaluate import busy_share
    from distill.results.report import machine_warnings

    warnings = machine_warnings(busy_share(), None)
    big = load_model(target, ModelConfig(device), role="target")
    small = load_draft(draft, big, ModelConfig(device))
    found = [load_prompts(file, big.tokenizer, num_prompts, big.vocab_size) for file in prompts]
    turns = [ids for turn in zip(*found, strict=False) for ids in turn][:num_prompts]
    ways = batch_methods(methods, big, small, backend)
    results = measure_batches(ways, big, turns, batch_sizes, max_new_tokens, repeats)
    table = Table("batch", "method", "tokens", "s", "tok/s", "over transf.", "ties", "faults")
    for row in results:
        over = row.over_transformers
        ratio = "-" if over is None else f"{over.median:.2f} ({over.low:.2f}-{over.high:.2f})"
        speed = (str(row.num_tokens), f"{row.seconds:.2f}", f"{row.tokens_per_second:.1f}", ratio)
        faults = row.num_differences
        table.add_row(str(row.batch_size), row.method, *speed, str(len(row.mismatches) - faults), str(faults))
    lengths = [len(ids) for ids in turns]
    print(f"{len(turns)} prompts of {min(lengths)} to {max(lengths)} tokens, greedy, the least of {repeats} repeats")
    print("over transformers: the median of paired ratios, and its 95% interval")
    Console().print(table)
    for line in warnings:
        print(f"warning: {line}")
    if any(row.num_differences for row in results):
        raise DraftsmithError("rows differ from their solo runs by more than a tie")


if __name__ == "__main__":
    try:
        auto_cli(main, as_positional=False)
    except DraftsmithError as error:
        print(f"batch_throughput: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
