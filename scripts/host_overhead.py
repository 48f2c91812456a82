#!/usr/bin/env python
"""Print what a round costs on the host outside the models' forwards: ours, beside transformers' assisted generation."""

from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table


def main(target: str, draft: str, prompts: str, num_prompts: int = 4, max_new_tokens: int = 64) -> None:
    """Measure greedy decoding and sampling at temperature 1 with 3 drafted tokens a round, on the CPU."""
    from transformers import AutoModelForCausalLM

    from decode.benchmark import decoder_method, transformers_method
    from decode.config import DecodeConfig, ModelConfig, SamplingConfig
    from decode.decoder import SpeculativeDecoder
    from decode.models import load_model, resolve_model_path
    from decode.overhead import measure_overhead
    from distill.data.examples import load_prompts

    on_cpu = ModelConfig(device="cpu")
    pair = load_model(target, on_cpu, role="target"), load_model(draft, on_cpu, role="draft")
    assistant = AutoModelForCausalLM.from_pretrained(resolve_model_path(draft), dtype="float32").eval()
    asked = load_prompts(prompts, pair[0].tokenizer, num_prompts, pair[0].vocab_size)
    table = Table("method", "temperature", "rounds", "target ms", "draft ms", "host ms", title="per round")
    for temperature in (0.0, 1.0):
        config = DecodeConfig(max_new_tokens, 3, sampling=SamplingConfig(temperature), seed=0)
        methods = [
            (decoder_method("draftsmith", SpeculativeDecoder(*pair), config), pair[1].model),
            (transformers_method("transformers assisted", pair[0], config, assistant), assistant),
        ]
        for method, small in methods:
            cost = measure_overhead(lambda p, m=method: m.run(p, max_new_tokens), pair[0].model, small, asked)
            figures = (f"{v:.2f}" for v in (cost.target_ms, cost.draft_ms, cost.host_ms))
            table.add_row(method.name, f"{temperature:g}", str(cost.rounds), *figures)
    Console().print(table)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
