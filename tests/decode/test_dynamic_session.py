"""Sessions over transformers' own caches against logits without any cache, and models whose states do not rewind."""

from collections.abc import Callable

import pytest

from decode.dynamic_session import chunks
from decode.errors import UsageError
from decode.session import Session, check_cache
from tests.decode.session_fixtures import (
    CACHE_FAMILIES,
    RAGGED,
    RECURRENT_FAMILIES,
    SLOT_FAMILIES,
    TOLERANCE,
    Life,
    dynamic_session,
    prompts,
    slot_session,
    worst_gap,
)


@pytest.mark.parametrize("family", [*CACHE_FAMILIES, "llama", "mistral", "gemma3", "gpt2"])
def test_dynamic_caches_equal_plain_logits(family: str) -> None:
    """Convolutions (LFM2), distances as bias (Bloom), windows counted from the end (GPT-Neo), and plain layers."""
    model = {**SLOT_FAMILIES, **CACHE_FAMILIES}[family]()
    assert Life(dynamic_session(model, 4), model, prompts(*RAGGED), seed=0).run(4) < TOLERANCE


@pytest.mark.parametrize(
    ("make", "family"), [(slot_session, "mistral"), (dynamic_session, "mistral"), (dynamic_session, "lfm2")]
)
def test_a_rewind_may_go_back_further_than_a_round(make: Callable[..., Session], family: str) -> None:
    model = {**SLOT_FAMILIES, **CACHE_FAMILIES}[family]()
    session = make(model, 1)
    (context,) = prompts(60)
    session.extend([context[:40]], [1])
    for length in (39, 20, 2, 0):
        session.rewind([length])
        assert worst_gap(session, model, [context[: length + 9]], [9]) < TOLERANCE


def test_chunks_end_full() -> None:
    assert list(chunks(17, 7)) == [14, 7, 0]
    assert list(chunks(14, 7)) == [7, 0]
    assert list(chunks(0, 7)) == []


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_recurrent_states_are_refused_by_class(family: str) -> None:
    make, name = RECURRENT_FAMILIES[family]
    with pytest.raises(UsageError, match=f"model 'that': .*{name}.* cannot be rewound"):
        check_cache(make(), "that", rewinds=True)


def test_plain_decoding_refuses_a_model_that_does_not_go_on_from_a_cache() -> None:
    """Its memory is another than the cache that it is given, which it takes without a word."""
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    from decode.decoder import SpeculativeDecoder
    from tests.fixtures import loaded, strengthen

    config = OpenAIGPTConfig(vocab_size=48, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(UsageError, match="OpenAIGPTLMHeadModel does not go on from a cache"):
        SpeculativeDecoder(loaded(strengthen(OpenAIGPTLMHeadModel(config), 0, 0.4)))


def test_plain_decoding_takes_states_that_cannot_be_rewound() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    from decode.backends import with_backend
    from decode.config import DecodeConfig
    from decode.decoder import SpeculativeDecoder
    from tests.fixtures import greedy_reference, loaded, random_prompt, strengthen

    config = MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=None)
    model = strengthen(MambaForCausalLM(config), 0, 0.3).float()
    prompt = random_prompt(7)
    answer = SpeculativeDecoder(with_backend(loaded(model))).generate(prompt, DecodeConfig(12))[0]
    assert answer.ids == greedy_reference(model, prompt, 12)
