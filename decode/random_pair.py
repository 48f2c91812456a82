"""A small random pair of models that agrees on some tokens: to measure with where no files are. Knows no decoder."""

from typing import Any

import torch

from decode.models import LoadedModel

VOCAB_SIZE = 49152
STD = 0.3
# What the target's layers add to its embeddings, which the draft shares: so much that about half the drafts are right.
BLEND = 2e-4


@torch.no_grad()
def random_pair(vocab_size: int = VOCAB_SIZE, seed: int = 0) -> tuple[LoadedModel, LoadedModel]:
    """(target, draft): Llama-type, fp32 on the CPU; 4 layers of width 384, and 1 layer of width 128.

    Embeddings and head of the target lie in the draft's 128 dimensions, where the draft has the same ones; each model
    then adds what its own layers make of the context.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target, draft = _llama(vocab_size, 384, 4), _llama(vocab_size, 128, 1)
    shared = draft.config.hidden_size
    for theirs, ours in (
        (target.model.embed_tokens.weight, draft.model.embed_tokens.weight),
        (target.lm_head.weight, draft.lm_head.weight),
    ):
        theirs.zero_()
        theirs[:, :shared] = ours
    # The norm before the head scales 384 numbers, most of them near zero, to the size that it gives 128.
    target.lm_head.weight.mul_((shared / target.config.hidden_size) ** 0.5)
    for layer in (*target.model.layers, *draft.model.layers):
        layer.self_attn.o_proj.weight.mul_(BLEND)
        layer.mlp.down_proj.weight.mul_(BLEND)
    return LoadedModel(target, None, "random target"), LoadedModel(draft, None, "random draft")


def random_prompts(count: int, vocab_size: int = VOCAB_SIZE, length: int = 32, seed: int = 0) -> list[list[int]]:
    """Prompts of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(vocab_size, (count, length), generator=generator).tolist()
    return prompts


def _llama(vocab_size: int, width: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        initializer_range=STD,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)
