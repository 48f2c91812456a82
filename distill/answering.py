"""The target answers one batch of encoded prompts. Knows nothing of rows and files."""

import torch
from torch import Tensor

from decode.config import SamplingConfig
from decode.generation import generation_config, only_settings
from decode.models import LoadedModel
from decode.stopping import Stopping


def answer_batch(
    target: LoadedModel, prompts: list[list[int]], sampling: SamplingConfig, max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Generated ids for each prompt, up to and including the first that ends a text.

    The draws depend on the arguments only; global random state and the model's own settings are left as they were.
    """
    model, eos_ids = target.model, sorted(target.eos_token_ids)
    ids, mask = left_pad(prompts, pad_id=eos_ids[0] if eos_ids else 0)
    settings = generation_config(sampling, max_new_tokens, eos_ids)
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(), only_settings(model, settings):
        torch.manual_seed(seed)
        out = model.generate(ids.to(target.device), attention_mask=mask.to(target.device), generation_config=settings)
    generated = out[:, ids.shape[1] :].tolist()
    return [Stopping(max_new_tokens, eos_ids).cut(answer) for answer in generated]


def left_pad(prompts: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both [B, T] int64; which positions are padding is known from lengths, never from ids."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask
