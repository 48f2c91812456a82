#!/usr/bin/env python
"""Print what a round costs on the host outside the models' forwards: ours, beside transformers' assisted generation."""

from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table


def main(
    pair: str | None = None,
    vocab_size: int = 49152,
    target: str = "smollm2-135m",
    draft: str = "runs/quickstart/draft",
    prompts: str = "configs/quickstart/held_out_prompts.jsonl",
    num_prompts: int = 4,
    max_new_tokens: int = 64,
    backend: str = "lean",
) -> None:
    """Measure greedy decoding and sampling at temperature 1 with 3 drafted tokens a round, on the CPU.

    Args:
        pair: "random": two small random models and random prompts, which need no files.
        vocab_size: of the random pair.
        backend: of our own decoding; transformers runs the models as they are.
    """
    from transformers import AutoModelForCausalLM

    from decode.config import DecodeConfig, ModelConfig, SamplingConfig
    from decode.models import load_model, resolve_model_path
    from decode.overhead import compare_overheads
    from decode.random_pair import random_pair, random_prompts
    from distill.data.examples import load_prompts

    assistant = None
    if pair == "random":
        big, small = random_pair(vocab_size)
        asked = random_prompts(num_prompts, vocab_size)
    elif pair is None:
        big = load_model(target, ModelConfig(device="cpu"), role="target")
        small = load_model(draft, ModelConfig(device="cpu"), role="draft")
        assistant = AutoModelForCausalLM.from_pretrained(resolve_model_path(draft), dtype="float32").eval()
        asked = load_prompts(prompts, big.tokenizer, num_prompts, big.vocab_size)
    else:
        raise SystemExit(f"host_overhead: pair {pair!r} is not legal; expected random, or none")
    table = Table("method", "temperature", "rounds", "target ms", "draft ms", "host ms", title="per round")
    for temperature in (0.0, 1.0):
        config = DecodeConfig(max_new_tokens, 3, "fixed", sampling=SamplingConfig(temperature), seed=0)
        for name, cost in compare_overheads((big, small), backend, asked, config, assistant).items():
            figures = (f"{value:.2f}" for value in (cost.target_ms, cost.draft_ms, cost.host_ms))
            table.add_row(name, f"{temperature:g}", str(cost.rounds), *figures)
    Console().print(table)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
