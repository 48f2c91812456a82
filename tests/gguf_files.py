"""Writes a tiny Llama-type model as a GGUF file, as the embedded package holds its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.fixtures import CHATML


def gguf_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """A query or key matrix in GGUF's order: the two rotary halves of each head interleaved."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def gguf_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The model's tensors under their names in a GGUF file."""
    layer_names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    yield "token_embd.weight", model.model.embed_tokens.weight.numpy()
    yield "output_norm.weight", model.model.norm.weight.numpy()
    for i, layer in enumerate(model.model.layers):
        for path, name in layer_names.items():
            weight = layer.get_submodule(path).weight.numpy()
            yield f"blk.{i}.{name}.weight", gguf_rows(weight, heads[name]) if name in heads else weight


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    vocab = tokenizer.get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "on"]  # a GGUF file can't hold an empty list of merges
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["o n"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_chat_template(CHATML)
    for name, tensor in gguf_tensors(model):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
