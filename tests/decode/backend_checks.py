"""Models that the lean forward serves, and checks that a forward gives a model's own logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decode.backends.base import Forward
from tests.fixtures import random_prompt, strengthen, tiny_llama, tiny_mistral

QWEN = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def tiny_qwen2() -> Any:
    """Biases of query, key and value; one layer of two with a window."""
    config = Qwen2Config(**QWEN, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    return redraw_vectors(strengthen(Qwen2ForCausalLM(config), 0, 0.4))


def tiny_qwen3() -> Any:
    """Norms of queries and keys; heads wider than the hidden size tells."""
    return redraw_vectors(strengthen(Qwen3ForCausalLM(Qwen3Config(**QWEN, head_dim=16)), 0, 0.4))


@torch.no_grad()
def redraw_vectors(model: Any) -> Any:
    """Biases and norms that are not what a forgetful forward would take them for."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
    return model


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **settings}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LEAN: dict[str, Callable[[], Any]] = {
    "llama": lambda: redraw_vectors(tiny_llama()),
    "llama biases": lambda: redraw_vectors(tiny_llama(attention_bias=True, mlp_bias=True)),
    "llama wide heads": lambda: tiny_llama(head_dim=16),
    "llama yarn": lambda: tiny_llama(**rope("yarn", original_max_position_embeddings=64)),
    "llama llama3": lambda: tiny_llama(**rope("llama3", **LLAMA3)),
    "mistral window": lambda: redraw_vectors(tiny_mistral(window=6)),
    "qwen2 mixed windows": tiny_qwen2,
    "qwen3": tiny_qwen3,
}


def own_logits(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


class Feeder:
    """Feeds rows of ids to a forward, as a session does: right-aligned, from where each row is."""

    def __init__(self, forward: Forward, rows: int, length: int = 64) -> None:
        self.forward, self.slots = forward, forward.new_slots(rows, length)

    @torch.inference_mode()
    def feed(self, starts: Sequence[int], parts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of each row's own tokens."""
        width = self.forward.pad_width(max(map(len, parts)))
        ids = torch.tensor([[0] * (width - len(part)) + list(part) for part in parts])
        self.slots.aim(starts, [len(part) for part in parts], ids.device, width)
        logits = self.forward(ids, self.slots, width)
        return [row[width - len(part) :].clone() for row, part in zip(logits, parts, strict=True)]


def check_text(forward: Forward, model: Any, atol: float) -> None:
    """One row: prompt, steps, a chunk, a rewind over which other tokens are written."""
    text, other = random_prompt(30), random_prompt(30, seed=1)
    feeder = Feeder(forward, 1)
    parts = [feeder.feed([at], [text[at:end]])[0] for at, end in ((0, 11), (11, 12), (12, 17), (17, 18), (18, 30))]
    torch.testing.assert_close(torch.cat(parts), own_logits(model, text), atol=atol, rtol=0)
    mixed = text[:13] + other[:9]
    again = [feeder.feed([13], [other[:5]])[0], feeder.feed([18], [other[5:9]])[0]]
    torch.testing.assert_close(torch.cat(again), own_logits(model, mixed)[13:], atol=atol, rtol=0)


def check_rows(forward: Forward, model: Any, atol: float) -> None:
    """Three ragged rows, rewound apart; then one of them leaves."""
    rows = [random_prompt(n, seed=n) for n in (20, 14, 9)]
    wanted = [own_logits(model, row) for row in rows]
    feeder = Feeder(forward, 3)
    first = feeder.feed([0, 0, 0], [rows[0][:12], rows[1][:7], rows[2][:2]])
    for got, want in zip(first, wanted, strict=True):
        torch.testing.assert_close(got, want[: len(got)], atol=atol, rtol=0)
    starts = (9, 7, 1)
    second = feeder.feed(starts, [row[s : s + 4] for row, s in zip(rows, starts, strict=True)])
    for got, want, s in zip(second, wanted, starts, strict=True):
        torch.testing.assert_close(got, want[s : s + 4], atol=atol, rtol=0)
    feeder.slots.keep_rows([0, 2])
    last = feeder.feed([13, 5], [rows[0][13:14], rows[2][5:9]])
    torch.testing.assert_close(last[0], wanted[0][13:14], atol=atol, rtol=0)
    torch.testing.assert_close(last[1], wanted[2][5:9], atol=atol, rtol=0)
