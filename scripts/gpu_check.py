#!/usr/bin/env python
"""Print what steps and whole texts take with every backend; texts that differ from the first backend's are told."""

import time
from dataclasses import replace
from typing import Any

import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table


def main(
    target: str | None = None,
    draft: str | None = None,
    device: str = "cuda",
    backends: str = "eager,lean,cuda_graph,compiled",
    max_new_tokens: int = 128,
) -> None:
    """Measure the pair that is named, or a small random one: greedy, plain and with 3 drafted tokens a round."""
    from decode.backends import with_backend

    pair = _pair(target, draft, device)
    table = Table(
        "asked", "runs", "ready s", "target 1 / 4 ms", "draft 1 ms", "plain tok/s", "chain tok/s", "same text"
    )
    first: list[int] | None = None
    for name in backends.split(","):
        start = time.perf_counter()
        ready = [with_backend(loaded, name) for loaded in pair]
        seconds = time.perf_counter() - start
        row, texts = _measure(ready, max_new_tokens)
        first = first or texts[0]
        same = "/".join("yes" if ids == first else "no" for ids in texts)
        table.add_row(name, ready[0].backend, f"{seconds:.1f}", *row, same)
        Console().print(name, *row, same)
    Console().print(table)


def _pair(target: str | None, draft: str | None, device: str) -> list[Any]:
    from decode.config import ModelConfig
    from decode.models import load_model
    from decode.random_pair import random_pair

    if target is None or draft is None:
        return [replace(loaded, model=loaded.model.to(device)) for loaded in random_pair()]
    return [load_model(n, ModelConfig(device), role=r) for n, r in ((target, "target"), (draft, "draft"))]


def _measure(pair: list[Any], count: int) -> tuple[list[str], list[list[int]]]:
    from decode.backends import probe_seconds
    from decode.config import DecodeConfig, SamplingConfig
    from decode.decoder import SpeculativeDecoder
    from decode.random_pair import random_prompts

    steps = [[seconds * 1e3 for seconds in probe_seconds(loaded)] for loaded in pair]
    config = DecodeConfig(count, 3, "fixed", sampling=SamplingConfig(), eos_token_ids=[])
    prompt = random_prompts(1, pair[0].vocab_size)[0]
    rates, texts = [], []
    for decoder in (SpeculativeDecoder(pair[0]), SpeculativeDecoder(*pair)):
        decoder.generate(prompt, config)  # what is made ready once is not timed
        start = time.perf_counter()
        texts.append(decoder.generate(prompt, config)[0].ids)  # the ids are read, so the device is done
        rates.append(f"{count / (time.perf_counter() - start):.0f}")
    return [f"{steps[0][0]:.2f} / {steps[0][1]:.2f}", f"{steps[1][0]:.2f}", *rates], texts


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    auto_cli(main, as_positional=False)
