"""The README of an exported draft: what it is, what was measured, how each engine loads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from decode.embedded import EMBEDDED
from decode.models import LoadedModel
from distill.results.terms import figure, recorded_bounds, said_of

# Our words for what a checkpoint was judged by. Acceptance on given text and in decoding differ, and are told apart.
ACCEPTANCES = {
    "expected_acceptance": "expected acceptance, mean of Σ min(p, q) over held-out text (teacher-forced)",
    "greedy_acceptance": "greedy acceptance, p(argmax q) over held-out text (teacher-forced)",
}
FIGURES = {
    "val/draft_acceptance_rate": "draft acceptance rate, accepted / drafted in decoding",
    "val/mean_acceptance_length": "mean acceptance length, output tokens per target pass in decoding",
    "val/speedup": "speedup over plain decoding of the target, same prompts, same run",
}
EVAL_FIGURES = {
    "draft_acceptance_rate": "draft acceptance rate, accepted / drafted in decoding",
    "mean_acceptance_length": "mean acceptance length, output tokens per target pass in decoding",
    "speedup_over_plain": "speedup over our own plain decoding",
    "speedup_over_transformers": "speedup over transformers' generate",
}


def model_card(
    name: str,  # of the folder
    target: str,
    draft: LoadedModel,
    num_assistant_tokens: int,
    measured: list[str],  # of measured_lines
) -> str:
    """Markdown with the metadata block that model hubs read."""
    shown = Path(target).name or target
    is_local = target in EMBEDDED or Path(target).expanduser().exists()
    hub_id = None if is_local else target
    data = ModelCardData(
        base_model=hub_id,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["draft-model", "speculative-decoding", "draftsmith"],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {name}: a draft for {shown}\n",
        _about(draft, shown),
        *measured,
        "## Use\n",
        _use(name, hub_id, num_assistant_tokens),
        "## Licence\n",
        f"The draft was distilled on the outputs of {shown}, and carries its tokenizer and chat template. Check what "
        f"the licence of {shown} asks of models made with its outputs before you pass the draft on.\n",
    ]
    return "\n".join(parts)


def _about(draft: LoadedModel, target: str) -> str:
    settings = draft.model.config
    total = sum(p.numel() for p in draft.model.parameters())
    about = (
        f"A small model ({settings.model_type}, {settings.num_hidden_layers} layers, {settings.hidden_size} wide, "
        f"{total / 1e6:.1f}M parameters) that drafts tokens for {target} in speculative decoding. The target verifies "
        "every token, so its output stays its own; the draft only makes it come faster. It is of little use alone.\n"
    )
    if draft.vocab_ids is not None:
        about += (
            f"\nIt proposes {len(draft.vocab_ids)} of the {settings.vocab_size} tokens (`draft_vocab.json`). The other "
            "rows of its output table are there, as engines need, with values that keep them from being proposed.\n"
        )
    return about


def measured_lines(
    metrics: Mapping[str, Any],  # the checkpoint's own
    temperature: float | None,  # of the loss that it was trained on
    evaluation: Mapping[str, Any] | None,  # its row and conditions in a report of `draftsmith eval`
) -> list[str]:
    """The card's part on what was measured."""
    bounds = recorded_bounds(metrics)
    lines = [
        (f"{text}, {said_of([temperature])}", figure(value, bounds[f"{name}_upper"]))
        for name, text in ACCEPTANCES.items()
        if (value := bounds[name]) is not None
    ]
    lines += _figures(metrics, FIGURES)
    parts = ["## Measured\n", _table(lines)] if lines else ["## Measured\n", "Nothing was recorded with this draft.\n"]
    if evaluation is not None:
        found = _figures(evaluation, EVAL_FIGURES)
        parts += [f"By `draftsmith eval`, {evaluation['conditions']}:\n", _table(found)]
    return parts


def _figures(found: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(text, figure(found[key])) for key, text in names.items() if found.get(key) is not None]


def _table(lines: list[tuple[str, str]]) -> str:
    return "\n".join(["| what | figure |", "|---|---|", *(f"| {text} | {value} |" for text, value in lines)]) + "\n"


def _use(name: str, hub_id: str | None, num_assistant_tokens: int) -> str:
    target = hub_id or "TARGET"
    note = "" if hub_id else "TARGET is the target's directory or hub id. "
    return f"""\
{note}With Draftsmith:

```
draftsmith run --target {target} --draft {name} --prompt "..."
```

With transformers (`num_assistant_tokens` is set in the generation config):

```python
from transformers import AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{target}")
draft = AutoModelForCausalLM.from_pretrained("{name}")
target.generate(**inputs, assistant_model=draft)
```

With vLLM:

```
vllm serve {target} --speculative-config \\
  '{{"method": "draft_model", "model": "{name}", "num_speculative_tokens": {num_assistant_tokens}}}'
```

With SGLang:

```
python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE \\
  --speculative-draft-model-path {name} --speculative-num-steps {num_assistant_tokens} \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens {num_assistant_tokens + 1}
```
"""
