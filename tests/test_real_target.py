"""The embedded real target: what the tiny models show holds on it too. Slow: it is converted on first use."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.benchmark import decoder_method, transformers_method
from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.models import LoadedModel, load_model
from distill.config import InitConfig
from distill.data.examples import load_prompts
from distill.drafts.make import init_draft

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = Path(__file__).parent.parent / "configs" / "quickstart"
CONFIG = DecodeConfig(max_new_tokens=48, num_speculative_tokens=3)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model("smollm2-135m", ModelConfig(backend="eager"), role="target")


@pytest.fixture(scope="module")
def prompts(target: LoadedModel) -> list[list[int]]:
    return load_prompts(str(PROMPTS / "held_out_prompts.jsonl"), target.tokenizer, 2, target.vocab_size)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("drafts") / "draft"
    settings = {"hidden_size": 64, "num_layers": 1, "draft_vocab_size": 2048, "data": [str(PROMPTS / "held_out.jsonl")]}
    return init_draft(InitConfig(target="smollm2-135m", output=str(output), **settings))  # type: ignore[arg-type]


def test_d01_greedy_text_equals_transformers(target: LoadedModel, prompts: list[list[int]], draft_folder: Path) -> None:
    """An untrained draft is nearly always rejected, the target as its own draft never: both roads of a round."""
    reference = transformers_method("transformers", target, CONFIG)
    draft = load_model(str(draft_folder), ModelConfig(backend="eager"), role="draft")
    decoders = [SpeculativeDecoder(target), SpeculativeDecoder(target, draft), SpeculativeDecoder(target, target)]
    for prompt in prompts:
        wanted = reference.run(prompt, CONFIG.max_new_tokens).ids
        for decoder in decoders:
            assert decoder_method("ours", decoder, CONFIG).run(prompt, CONFIG.max_new_tokens).ids == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_d02_the_target_accepts_itself(target: LoadedModel, prompts: list[list[int]], temperature: float) -> None:
    config = DecodeConfig(32, 3, sampling=SamplingConfig(temperature=temperature), seed=1)
    stats = SpeculativeDecoder(target, target).generate(prompts[0], config)[0].stats
    # fp32 sums of a block and of single steps round differently: p and q differ in the seventh digit.
    assert stats.draft_acceptance_rate == 1.0


@torch.inference_mode()
def test_plain_transformers_never_proposes_beyond_the_draft_vocabulary(
    draft_folder: Path, prompts: list[list[int]]
) -> None:
    ours = load_model(str(draft_folder), ModelConfig(backend="eager"), role="draft")
    plain = AutoModelForCausalLM.from_pretrained(draft_folder, dtype=torch.float32)
    ids = torch.tensor([prompts[0]])
    assert ours.vocab_ids is not None
    full, narrow = plain(ids).logits.softmax(-1), ours.model(ids).logits.softmax(-1)
    assert torch.allclose(full[..., ours.vocab_ids], narrow, atol=1e-6)
    assert full.sum(-1).sub(full[..., ours.vocab_ids].sum(-1)).abs().max() < 1e-6
