"""Tiny models whose faults show: strong random weights, constant and Markov laws, and slow references."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from decode.config import DecodeConfig
from decode.models import LoadedModel

# The reference pair of laws: sum(min(P, Q)) = 0.5.
P = (0.35, 0.25, 0.20, 0.10, 0.06, 0.04)
Q = (0.05, 0.10, 0.15, 0.30, 0.22, 0.18)


def tiny_llama(seed: int = 0, vocab_size: int = 48, layers: int = 2, std: float = 0.4, **settings: Any) -> Any:
    """Llama, 2 layers, hidden 32, fp64; weights of deviation 0.4, so that far context decides the next token."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        **settings,
    )
    return strengthen(LlamaForCausalLM(config), seed, std)


def tiny_gpt2(seed: int = 0, vocab_size: int = 48, positions: int = 128, std: float = 0.4) -> Any:
    """GPT-2 type: learned positions."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=positions,
        n_embd=32,
        n_layer=2,
        n_head=4,
        eos_token_id=None,
        bos_token_id=None,
    )
    return strengthen(GPT2LMHeadModel(config), seed, std)


def tiny_mistral(seed: int = 0, vocab_size: int = 48, window: int = 8, std: float = 0.4) -> Any:
    """Mistral type with a sliding window."""
    config = MistralConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return strengthen(MistralForCausalLM(config), seed, std)


FAMILIES: dict[str, Callable[..., Any]] = {"llama": tiny_llama, "gpt2": tiny_gpt2, "mistral": tiny_mistral}


def strengthen(model: Any, seed: int, std: float) -> Any:
    """Redraw every matrix with deviation `std`, in fp64 and eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.double().eval()


def with_noise(model: Any, eps: float, seed: int = 1) -> Any:
    """A copy of `model`, each tensor moved by `eps` times its own deviation."""
    copy = type(model)(model.config).to(next(model.parameters()).dtype).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.numel() > 1 and eps > 0:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise * eps * parameter.std())
    return copy


def constant_law(probs: Sequence[float]) -> Any:
    """A model whose next-token law is `probs` whatever the context."""
    return markov_law([probs] * len(probs))


def markov_law(rows: Sequence[Sequence[float]]) -> Any:
    """A model whose next-token law depends on the last token only: rows[last]. No block writes to the residual."""
    size = len(rows)
    model = tiny_llama(vocab_size=size)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        for token in range(size):
            model.model.embed_tokens.weight[token, token] = 1.0
            # The final norm turns a one-hot row of length 32 into sqrt(32) at its one place (up to its epsilon).
            scale = (1 / 32 + model.config.rms_norm_eps) ** -0.5
            model.lm_head.weight[:, token] = torch.tensor(rows[token]).double().log() / scale
    return model


def loaded(model: Any, name: str = "tiny", tokenizer: Any = None, vocab_ids: Tensor | None = None) -> LoadedModel:
    """`model` as the decoder takes it."""
    return LoadedModel(model, tokenizer, name, vocab_ids)


def fixed(tokens: int, width: int, **settings: Any) -> DecodeConfig:
    """Drafts of `width` tokens in every round."""
    return DecodeConfig(tokens, width, "fixed", **settings)


@torch.no_grad()
def greedy_reference(model: Any, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """R1: greedy decoding without any cache, the whole context recomputed for every token."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.max(-1).indices))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


def random_prompt(length: int, vocab_size: int = 48, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


class CallCounter(nn.Module):
    """Counts a model's forward calls and the tokens of each, through a hook."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.widths: list[int] = []
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self.widths.append(kwargs["input_ids"].shape[1])

    def remove(self) -> None:
        self._handle.remove()


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = CHATML, add_bos: bool = False, swap: tuple[int, int] | None = None
) -> Any:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens; `swap` exchanges two ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap:
        letters[swap[0]], letters[swap[1]] = letters[swap[1]], letters[swap[0]]
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", core.token_to_id("<|im_start|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer
