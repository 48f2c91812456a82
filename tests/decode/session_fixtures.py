"""Tiny models of many families, fp64, with strong weights, and random lives of sessions over them."""

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from decode.backends.eager import TransformersForward
from decode.dynamic_session import DynamicSession
from decode.session import Session, SlotSession
from tests.fixtures import random_prompt, strengthen, tiny_gpt2, tiny_llama, tiny_mistral

NO_IDS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def tiny(family: str, config: str | None = None, std: float = 0.4, **settings: Any) -> Any:
    """A causal model of a family of transformers, two layers of width 32."""
    made = getattr(transformers, f"{config or family}Config")(**{**SIZES, **NO_IDS, **settings})
    return strengthen(getattr(transformers, f"{family}ForCausalLM")(made), 0, std)


def tiny_bloom() -> Any:
    """Distances as a bias on attention scores (ALiBi), no positions."""
    config = transformers.BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4, **NO_IDS)
    return strengthen(transformers.BloomForCausalLM(config), 0, 0.4)


def tiny_gpt_neo() -> Any:
    """A window of 8 that the model counts from the last key back."""
    config = transformers.GPTNeoConfig(
        vocab_size=48,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=256,
        **NO_IDS,
    )
    return strengthen(transformers.GPTNeoForCausalLM(config), 0, 0.4)


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# Families that run over slots.
SLOT_FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "llama_eager": lambda: tiny_llama(attn_implementation="eager"),
    "gpt2": lambda: tiny_gpt2(positions=256),
    "mistral": tiny_mistral,
    "gemma2": lambda: tiny("Gemma2", num_hidden_layers=3, head_dim=8, sliding_window=8, layer_types=MIXED),
    "gemma3": lambda: tiny(
        "Gemma3", "Gemma3Text", num_hidden_layers=3, head_dim=8, sliding_window=8, layer_types=MIXED
    ),
    "gpt_neox": lambda: tiny("GPTNeoX"),
    "qwen2": lambda: tiny("Qwen2", num_key_value_heads=2),
    "qwen3": lambda: tiny("Qwen3", num_key_value_heads=2, head_dim=8),
    "phi": lambda: tiny("Phi"),
    "deepseek_v3": lambda: tiny(
        "DeepseekV3",
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=4,
        first_k_dense_replace=1,
        experts_implementation="eager",
    ),
}

# Families that do not, but whose caches rewind.
CACHE_FAMILIES: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: tiny(
        "Lfm2", num_hidden_layers=3, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"]
    ),
    "bloom": tiny_bloom,
    "gpt_neo": tiny_gpt_neo,
    "llama_dynamic": lambda: tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
}

# Families whose states cannot be taken back, and the class that the refusal names.
RECURRENT_FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (
        lambda: tiny("Mamba", std=0.2),
        "LinearAttentionLayer",
    ),
    "recurrent_gemma": (
        lambda: tiny("RecurrentGemma", num_hidden_layers=3, head_dim=8, lru_width=32, attention_window_size=8),
        "LinearAttentionLayer",
    ),
    "jamba": (
        lambda: tiny(
            "Jamba",
            num_key_value_heads=2,
            num_experts=2,
            experts_implementation="eager",
            attn_layer_period=2,
            attn_layer_offset=1,
        ),
        "LinearAttentionLayer",
    ),
    "rwkv": (
        lambda: tiny("Rwkv", std=0.2, intermediate_size=128),
        "RwkvForCausalLM",
    ),
}


@torch.no_grad()
def plain_logits(model: Any, context: Tensor, keep: int) -> Tensor:
    """[keep, V] at the last positions of `context` [n], without any cache."""
    return model(input_ids=context.unsqueeze(0), use_cache=False).logits[0, len(context) - keep :]


# Order of summation alone differs, in fp64; but eager attention takes its softmax in fp32 (2e-6 on logits of the order
# of 10). The faults of the controls are 1e-3 and more.
TOLERANCE = 1e-4
RAGGED = (1, 5, 33, 60)


def slot_session(model: Any, rows: int, length: int = 256) -> Session:
    return SlotSession(TransformersForward(model), model, rows, length)


def dynamic_session(model: Any, rows: int, length: int = 256) -> Session:
    return DynamicSession(model, rows, prefill_chunk=7)


def prompts(*lengths: int) -> list[Tensor]:
    return [torch.tensor(random_prompt(length, seed=row)) for row, length in enumerate(lengths)]


def worst_gap(session: Session, model: Any, contexts: list[Tensor], keep: list[int]) -> float:
    """The largest difference from plain logits of an extension of all rows."""
    logits = session.extend(contexts, keep)
    assert [len(part) for part in logits] == keep
    gaps = [
        float((ours - plain_logits(model, context, count)).abs().max())
        for ours, context, count in zip(logits, contexts, keep, strict=True)
        if count
    ]
    return max(gaps, default=0.0)


class Life:
    """A random life of a session: rows grow, idle, forget and leave; remembers the worst difference from plain."""

    def __init__(self, session: Session, model: Any, contexts: list[Tensor], seed: int) -> None:
        self.session, self.model, self.contexts = session, model, contexts
        self.sure = [len(context) for context in contexts]  # no later rewind goes below it, as in decoding
        self.random = random.Random(seed)
        self.worst = worst_gap(session, model, contexts, [1] * len(contexts))

    def grow(self) -> None:
        keep = [self.random.choice((0, 1, 1, 2, 4)) for _ in self.contexts]
        for row, count in enumerate(keep):
            fresh = count and count + self.random.choice((0, 0, 1, 3))
            more = torch.tensor([self.random.randrange(48) for _ in range(fresh)], dtype=torch.int64)
            self.contexts[row] = torch.cat([self.contexts[row], more])
        self.worst = max(self.worst, worst_gap(self.session, self.model, self.contexts, keep))

    def forget(self) -> None:
        lengths = [self.random.randint(at, len(c)) for at, c in zip(self.sure, self.contexts, strict=True)]
        self.contexts = [context[:length] for context, length in zip(self.contexts, lengths, strict=True)]
        self.sure = lengths
        self.session.rewind(lengths)

    def leave(self) -> None:
        rows = sorted(self.random.sample(range(len(self.contexts)), len(self.contexts) - 1))
        self.contexts = [self.contexts[row] for row in rows]
        self.sure = [self.sure[row] for row in rows]
        self.session.keep_rows(rows)

    def run(self, rounds: int) -> float:
        for index in range(rounds):
            for _ in range(self.random.randint(1, 3)):
                self.grow()
            self.forget()
            if len(self.contexts) > 1 and index % 3 == 2:
                self.leave()
        return self.worst
