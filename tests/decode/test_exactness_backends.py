"""Every backend over every kind of cache: greedy output is the cache-free reference, a seed gives one text whatever
runs it, and sampled output follows the target's law. Caches that are broken fail the same checks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.backends import with_backend
from decode.backends.base import Forward
from decode.backends.compiled import CompiledForward
from decode.backends.cuda_graph import GraphForward
from decode.backends.eager import TransformersForward
from decode.backends.lean import LeanForward
from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.draft_length import DRAFT_LENGTHS
from decode.dynamic_session import CachedRow, DynamicSession
from decode.laws import Law
from decode.loop import decode_rounds
from decode.models import LoadedModel
from decode.proposers import PROPOSERS, Setup
from decode.session import DraftingSession, new_session
from decode.slots import Slots
from decode.theory import Costs
from decode.verifiers import VERIFIERS
from tests.decode.session_fixtures import CACHE_FAMILIES, MIXED, SLOT_FAMILIES, tiny
from tests.decode.test_joint_law import COUNT, DRAFT_ROWS, TARGET_ROWS, law_p
from tests.fixtures import greedy_reference, loaded, markov_law, random_prompt, with_noise
from tests.tables import chi_square_p, table_row

# Tied embeddings, scaled, would make a random Gemma repeat its last token.
GEMMA = {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED, "tie_word_embeddings": False}
FAMILIES = {**SLOT_FAMILIES, **CACHE_FAMILIES, "gemma3": lambda: tiny("Gemma3", "Gemma3Text", **GEMMA)}
FORWARDS: dict[str, Callable[[Any], Forward]] = {
    "lean": LeanForward,
    "graph": lambda model: GraphForward(LeanForward(model), torch.device("cpu")),
    "graph_own": lambda model: GraphForward(TransformersForward(model), torch.device("cpu")),
    "compiled": lambda model: CompiledForward(TransformersForward(model), torch.device("cpu")),
}
BACKENDS = {
    "llama": ("eager", "dynamic", "compiled", "lean", "graph"),
    "mistral": ("eager", "dynamic", "lean", "graph"),
    "gemma3": ("eager", "dynamic", "graph_own"),
    "gpt2": ("eager", "graph_own", "compiled"),
    "lfm2": ("dynamic",),
}
PAIRS = [(family, backend) for family, backends in BACKENDS.items() for backend in backends]
PROMPTS = [random_prompt(length, seed=length) for length in (6, 13, 1)]
TOKENS, WIDTH = 8, 4
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, top_k=12)


@pytest.fixture(autouse=True)
def seams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler would be given runs as it is; costs are not measured, for lengths must not depend on the day."""
    costs = Costs(draft_ms=0.1, verify_ms=(1.0,) * (WIDTH + 1), round_ms=0.1)
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    monkeypatch.setattr("decode.decoder.pair_costs", lambda *_: costs)


@pytest.fixture
def decoder(family: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> SpeculativeDecoder:
    """Target and draft of a family on one backend; "dynamic": over transformers' own caches."""
    if backend == "dynamic":
        monkeypatch.setattr("decode.decoder.new_session", lambda own, rows, _: DynamicSession(own.model, rows, 5))
    return pair_of(family, backend)


@cache
def models_of(family: str) -> tuple[Any, Any]:
    target = FAMILIES[family]()
    return target, with_noise(target, 0.15)


def run_by(backend: str, model: Any) -> LoadedModel:
    return replace(loaded(model), forward=FORWARDS[backend](model) if backend in FORWARDS else None)


@cache
def pair_of(family: str, backend: str) -> SpeculativeDecoder:
    return SpeculativeDecoder(*(run_by(backend, model) for model in models_of(family)))


@cache
def references(family: str) -> tuple[list[list[int]], int]:
    """Greedy texts without any cache, up to an id that ends them."""
    whole = [greedy_reference(models_of(family)[0], prompt, TOKENS) for prompt in PROMPTS]
    assert len({token for ids in whole for token in ids}) > 8, "the fixture has lost its power"
    eos = whole[1][5]
    return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in whole], eos


def misses(decoder: SpeculativeDecoder, family: str, config: DecodeConfig) -> int:
    """Texts, alone and in a ragged batch whose rows leave apart, that are not what they must be: the reference where
    decoding is greedy, else what the model's own forward draws with this seed, one text after another."""
    if config.sampling == GREEDY:
        wanted, eos = references(family)
        config = replace(config, eos_token_ids=[eos])
    else:
        wanted = own_texts(family, config)
    found = texts(decoder, config, 1), texts(decoder, config, 3)
    return sum(ids != right for own in found for ids, right in zip(own, wanted[-len(own) :], strict=True))


def texts(decoder: SpeculativeDecoder, config: DecodeConfig, size: int) -> list[list[int]]:
    """Of all prompts in a batch, or of the last two alone."""
    prompts = PROMPTS[1 if size == 1 else 0 :]
    return [answer.ids for answer in decoder.generate(prompts, replace(config, batch_size=size))]


OWN_TEXTS: dict[Any, list[list[int]]] = {}


def own_texts(family: str, config: DecodeConfig) -> list[list[int]]:
    names = (family, config.draft_length, config.verifier)
    if names not in OWN_TEXTS:
        answers = pair_of(family, "eager").generate(PROMPTS, replace(config, batch_size=1))
        OWN_TEXTS[names] = [answer.ids for answer in answers]
    return OWN_TEXTS[names]


def settings_of(family: str, backend: str) -> Iterator[DecodeConfig]:
    """Every policy, under one of the rules, greedy or sampled; over all pairs under both rules and both ways."""
    place = PAIRS.index((family, backend))
    for at, policy in enumerate(DRAFT_LENGTHS, place):
        rule, sampling = list(VERIFIERS)[at % 2], (GREEDY, SAMPLED)[(at + place // 2) // 2 % 2]
        yield DecodeConfig(TOKENS, WIDTH, policy, verifier=rule, sampling=sampling, seed=11)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "backend"), PAIRS)
def test_d01_d24_d45_texts_are_the_same_everywhere(decoder: SpeculativeDecoder, family: str, backend: str) -> None:
    """fp64, where laws differ by rounding alone."""
    for config in settings_of(family, backend):
        assert misses(decoder, family, config) == 0, config


def test_every_policy_meets_every_rule_both_ways() -> None:
    met = {(c.draft_length, c.verifier, c.sampling == GREEDY) for pair in PAIRS for c in settings_of(*pair)}
    assert len(met) == 4 * len(DRAFT_LENGTHS)


@pytest.mark.parametrize("family", BACKENDS)
def test_prepacked_chains_equal_prepacked_plain_decoding(family: str) -> None:
    """fp32: what rounds otherwise is no reference."""
    packed = [with_backend(loaded(with_noise(model, 0.0).float()), "prepacked") for model in models_of(family)]
    assert [own.backend for own in packed] == ["prepacked"] * 2
    plain, chain = SpeculativeDecoder(packed[0]), SpeculativeDecoder(*packed)
    for policy, rule in (("heuristic", "block"), ("entropy", "token")):
        config = DecodeConfig(TOKENS, WIDTH, policy, verifier=rule, sampling=GREEDY)  # type: ignore[arg-type]
        wanted = [texts(plain, config, size) for size in (1, 3)]
        assert [texts(chain, config, size) for size in (1, 3)] == wanted and wanted[0] == wanted[1][1:]


def one_further(right: Callable[..., Tensor], slots: Slots, window: int | None, dtype: torch.dtype) -> Tensor:
    """A wrong mask: the slot after a token's own, which is stale or a later token's, is seen."""
    mask = right(slots, window, dtype).clone()
    after = (slots.positions + 1).clamp(max=mask.shape[-1] - 1)[:, None, :, None]
    return mask.scatter_(-1, after.expand(*mask.shape[:3], 1), 0.0)


def not_cropped(row: CachedRow, surplus: int) -> None:
    """A wrong rewind: the tokens are forgotten, their states are not."""
    row._seen -= surplus
    row._floor = row._seen


BROKEN = [("llama", "eager"), ("mistral", "lean"), ("llama", "graph"), ("gemma3", "graph_own"), ("gpt2", "compiled")]
BROKEN += [("mistral", "dynamic"), ("lfm2", "dynamic")]


@pytest.mark.parametrize(("family", "backend"), BROKEN)
def test_control_stale_states_are_caught(
    decoder: SpeculativeDecoder, family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [DecodeConfig(TOKENS, WIDTH, "fixed", sampling=sampling, seed=11) for sampling in (GREEDY, SAMPLED)]
    assert references(family) and own_texts(family, settings[1])  # known before anything breaks
    right = Slots.mask
    monkeypatch.setattr(Slots, "mask", lambda *arguments: one_further(right, *arguments))
    monkeypatch.setattr(CachedRow, "_crop", not_cropped)
    assert all(misses(decoder, family, config) > 0 for config in settings)


# The laws of the joint test, each token possible: a model's logits are finite.
LAWS = [[tuple(0.94 * p + 0.01 for p in row) for row in rows] for rows in (TARGET_ROWS, DRAFT_ROWS)]
TARGET_LAW = torch.tensor(LAWS[0], dtype=torch.float64)
DRAWS = 1000


@cache
def markov_pair(backend: str) -> list[LoadedModel]:
    return [run_by(backend, markov_law(rows)) for rows in LAWS]


def decoded(backend: str, verifier: str, count: int, tokens: int, generator: torch.Generator) -> Tensor:
    """[count, tokens] drawn after token 0 by real sessions of `count` rows."""
    rows = [table_row(tokens, 3, generator) for _ in range(count)]
    target, draft = (new_session(model, count, tokens + 4) for model in markov_pair(backend))
    for _ in decode_rounds(rows, target, PROPOSERS["draft_model"](Setup(draft, 6)), VERIFIERS[verifier]):
        pass
    return torch.stack([row.context()[1:] for row in rows])


def batch_p(backend: str, verifier: str) -> float:
    """p-value of the first tokens of many rows under their joint law."""
    law = TARGET_LAW[0][:, None, None] * TARGET_LAW[:, :, None] * TARGET_LAW[None]
    places = decoded(backend, verifier, DRAWS, COUNT, torch.Generator().manual_seed(0)) @ torch.tensor([36, 6, 1])
    return law_p(places.bincount(minlength=6**COUNT), law.flatten())


def text_p(backend: str, count: int = 3) -> float:
    """p-value of each token given the one before it, along texts of one row each: the least of six, times six."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([decoded(backend, "block", 1, 240, generator) for _ in range(count)])
    places = (tokens[:, :-1] * 6 + tokens[:, 1:]).flatten()
    return 6 * min(map(chi_square_p, places.bincount(minlength=36).view(6, 6), TARGET_LAW))


@pytest.mark.parametrize(("backend", "verifier"), [("eager", "block"), ("lean", "token")])
def test_d16_joint_law_through_sessions_of_many_rows(backend: str, verifier: str) -> None:
    assert batch_p(backend, verifier) > 1e-4


def test_d16_law_of_texts_drafted_in_one_run() -> None:
    assert text_p("graph") > 1e-4


def test_control_logits_of_another_position_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LeanForward.__call__
    monkeypatch.setattr(LeanForward, "__call__", lambda *arguments: right(*arguments).roll(1, 1))
    assert batch_p("lean", "token") < 1e-4


def test_control_laws_of_another_step_of_the_run_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all steps wrote to one place."""
    right = DraftingSession.draft_steps

    def overwritten(*arguments: Any) -> tuple[Tensor, list[Law]]:
        tokens, laws = right(*arguments)
        return tokens, [laws[-1]] * len(laws)

    monkeypatch.setattr(DraftingSession, "draft_steps", overwritten)
    assert text_p("graph") < 1e-4
