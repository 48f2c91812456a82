"""Drafting in one run draws what drafting token after token draws, on the CPU by the code that a GPU captures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode.backends import with_backend
from decode.backends.cuda_graph import MOST_LOOPS, GraphForward
from decode.backends.eager import TransformersForward
from decode.backends.lean import LeanForward
from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.draft import Round
from decode.laws import Law
from decode.models import LoadedModel, narrow_head
from decode.session import DraftingSession, SlotSession, new_session
from decode.vocabulary import Vocabulary
from tests.fixtures import greedy_reference, loaded, random_prompt, tiny_gpt2, tiny_llama, with_noise

CPU = torch.device("cpu")
WARM = SamplingConfig(temperature=1.0)
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "plain": WARM,
    "temperature": SamplingConfig(temperature=0.7),
    "top_k": SamplingConfig(temperature=1.0, top_k=5),
    "top_p": SamplingConfig(temperature=1.0, top_p=0.8),
    "min_p": SamplingConfig(temperature=1.0, min_p=0.1),
    "typical_p": SamplingConfig(temperature=1.0, typical_p=0.7),
}


def in_one_run(model: Any, vocab_ids: torch.Tensor | None = None, base: Any = LeanForward) -> LoadedModel:
    """`model` on the static path of captured graphs, uncaptured."""
    return replace(loaded(model, vocab_ids=vocab_ids), forward=GraphForward(base(model), CPU), backend="cuda_graph")


def by_steps(model: Any, vocab_ids: torch.Tensor | None = None, base: Any = LeanForward) -> LoadedModel:
    return replace(loaded(model, vocab_ids=vocab_ids), forward=base(model), backend="lean")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every draft that was made in one run."""
    found: list[int] = []
    right = DraftingSession.draft_steps

    def counted(self: Any, context: Any, uniforms: Any, *rest: Any) -> tuple[torch.Tensor, list[Law]]:
        found.append(len(uniforms))
        return right(self, context, uniforms, *rest)

    monkeypatch.setattr(DraftingSession, "draft_steps", counted)
    return found


def fixed(tokens: int, width: int, sampling: SamplingConfig = WARM, **settings: Any) -> DecodeConfig:
    return DecodeConfig(tokens, width, **{"draft_length": "fixed", "sampling": sampling, "seed": 5, **settings})


def rounds_of(decoder: SpeculativeDecoder, prompt: Sequence[int], config: DecodeConfig) -> list[Round]:
    rounds = decoder.generate(list(prompt), config, trace=True)[0].rounds
    return [replace(done, draft_seconds=0, target_seconds=0) for done in rounds]


def check_equal(target: Any, draft: Any, config: DecodeConfig, length: int = 9, **settings: Any) -> list[Round]:
    """The rounds, which are those of drafting token after token, and of the same seed again."""
    prompt, one_run = random_prompt(length), SpeculativeDecoder(loaded(target), in_one_run(draft, **settings))
    wanted = rounds_of(SpeculativeDecoder(loaded(target), by_steps(draft, **settings)), prompt, config)
    assert rounds_of(one_run, prompt, config) == rounds_of(one_run, prompt, config) == wanted
    return wanted


@pytest.mark.parametrize("eps", [0.0, 0.05, 0.5])
def test_greedy_equals_the_reference_and_each_draft_its_own(eps: float, runs: list[int]) -> None:
    """d04: full and partial acceptance; each proposal is recomputed without a cache."""
    target = tiny_llama(2)
    draft = with_noise(target, eps)
    decoder = SpeculativeDecoder(loaded(target), in_one_run(draft))
    for length, width in ((1, 4), (7, 1), (20, 6)):
        prompt = random_prompt(length)
        rounds = rounds_of(decoder, prompt, fixed(33, width, SamplingConfig()))
        text = prompt + [token for done in rounds for token in done.emitted]
        assert text[length:] == greedy_reference(target, prompt, 33)
        assert wrong_drafts(draft, text, rounds) == 0
        assert len(runs) == sum(bool(done.drafted) for done in rounds)
        runs.clear()


def wrong_drafts(draft: Any, text: list[int], rounds: list[Round]) -> int:
    """How many rounds drafted what a draft without a cache would not have."""
    return sum(
        done.drafted != greedy_reference(draft, text[: done.context_length], len(done.drafted)) for done in rounds
    )


def test_control_a_draft_that_missed_a_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fully accepted round the last drafted token is forgotten instead of fed."""
    target, prompt = tiny_llama(2), random_prompt(9)
    decoder = SpeculativeDecoder(loaded(target), in_one_run(with_noise(target, 0.0)))
    right = DraftingSession.draft_steps

    def forgetful(self: Any, context: torch.Tensor, *rest: Any) -> Any:
        self._seen = [len(context) - 1 if self._seen[0] else 0]
        return right(self, context, *rest)

    monkeypatch.setattr(DraftingSession, "draft_steps", forgetful)
    rounds = rounds_of(decoder, prompt, fixed(33, 4, SamplingConfig()))
    text = prompt + [token for done in rounds for token in done.emitted]
    assert text[9:] == greedy_reference(target, prompt, 33), "the output never shows it"
    assert wrong_drafts(target, text, rounds) > 1


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("policy", ["fixed", "heuristic"])
def test_a_seed_gives_the_text_of_single_steps(name: str, policy: str, runs: list[int]) -> None:
    target = tiny_llama(3)
    for eps in (0.0, 0.05):
        config = fixed(30, 4, SAMPLINGS[name], draft_length=policy)
        rounds = check_equal(target, with_noise(target, eps), config)
        assert len(runs) == 2 * sum(bool(done.drafted) for done in rounds)
        all_accepted = {done.num_accepted == len(done.drafted) for done in rounds[:-1]}
        assert all_accepted == ({True} if eps == 0 else {True, False})
        runs.clear()


def test_settings_do_not_share_a_run_and_texts_do() -> None:
    target = tiny_llama(3)
    draft = in_one_run(with_noise(target, 0.2))
    single = by_steps(draft.model)
    for sampling in (*SAMPLINGS.values(), *SAMPLINGS.values()):
        found = [
            rounds_of(SpeculativeDecoder(loaded(target), own), random_prompt(5), fixed(12, 3, sampling))
            for own in (draft, single)
        ]
        assert found[0] == found[1]
    session = new_session(draft, 1, 64)
    assert isinstance(session, DraftingSession)
    store = session._slots.store  # type: ignore[attr-defined]
    assert len({key for _, key in store.loops}) == len(SAMPLINGS)
    for steps in range(1, MOST_LOOPS + 9):
        draft.forward.draft_loop(session._slots, lambda *_: None, steps, "other")
    assert len(store.loops) == MOST_LOOPS and (MOST_LOOPS + 8, "other") in store.loops


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARM], ids=["greedy", "sampled"])
def test_budgets_and_ends_of_text_cut_alike(sampling: SamplingConfig, runs: list[int]) -> None:
    target = tiny_llama(4)
    for budget in (1, 2, 3, 7):
        rounds = check_equal(target, with_noise(target, 0.1), fixed(budget, 5, sampling))
        assert max(runs, default=0) < budget
        assert sum(len(done.emitted) for done in rounds) == budget
        runs.clear()
    whole = [token for done in check_equal(target, target, fixed(20, 5, sampling)) for token in done.emitted]
    rounds = check_equal(target, target, fixed(20, 5, sampling, eos_token_ids=[whole[8]]))
    assert [token for done in rounds for token in done.emitted] == whole[: whole.index(whole[8]) + 1]


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARM], ids=["greedy", "sampled"])
def test_past_the_drafts_context_nothing_is_drafted(sampling: SamplingConfig, runs: list[int]) -> None:
    """d08: learned positions, of which there are 24; the last token that is drafted needs none."""
    target, draft = tiny_gpt2(1, positions=64), tiny_gpt2(1, positions=24)
    weights = with_noise(target, 0.1).state_dict()
    draft.load_state_dict({name: w[:24] if "wpe" in name else w for name, w in weights.items()})
    rounds = check_equal(target, draft, fixed(40, 5, sampling), base=TransformersForward)
    ends = [done.context_length + len(done.drafted) for done in rounds if done.drafted]
    assert max(ends) <= 25 and rounds[-1].context_length > 26 and not rounds[-2].drafted
    assert runs


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARM, SAMPLINGS["top_k"]], ids=["greedy", "sampled", "top_k"])
def test_a_narrowed_head_drafts_alike(sampling: SamplingConfig, runs: list[int]) -> None:
    target = tiny_llama(5)
    draft, vocab_ids = with_noise(target, 0.1), torch.arange(0, 48, 2)
    narrow_head(draft, vocab_ids)
    rounds = check_equal(target, draft, fixed(40, 4, sampling), vocab_ids=vocab_ids)
    assert runs and {token for done in rounds for token in done.drafted} <= set(vocab_ids.tolist())
    assert sum(done.num_accepted for done in rounds) > 0


def test_ids_that_no_token_has_are_never_drafted(runs: list[int]) -> None:
    target, vocabulary = tiny_llama(6), Vocabulary(40, torch.arange(0, 40, 3))
    found = []
    for draft in (in_one_run(with_noise(target, 0.5)), by_steps(with_noise(target, 0.5))):
        decoder = SpeculativeDecoder(loaded(target), draft)
        rounds_of(decoder, [1, 2, 4], fixed(30, 4))  # the runs of a whole vocabulary do not serve
        decoder.vocabulary = vocabulary
        found.append(rounds_of(decoder, [1, 2, 4], fixed(30, 4)))
    assert found[0] == found[1] and runs
    drafted = {token for done in found[0] for token in done.drafted}
    assert len(drafted) > 5 and all(token < 40 and token % 3 for token in drafted)


@pytest.mark.parametrize(
    "settings",
    [{"draft_length": "confidence"}, {"draft_length": "entropy"}, {"sampling": replace(WARM, frequency_penalty=0.5)}],
)
def test_what_needs_the_host_on_the_way_goes_step_by_step(settings: Any, runs: list[int]) -> None:
    target = tiny_llama(3)
    check_equal(target, with_noise(target, 0.1), replace(fixed(20, 4), **settings))
    assert not runs


def test_a_batch_goes_step_by_step_and_each_row_as_alone(runs: list[int]) -> None:
    target = tiny_llama(3)
    decoder = SpeculativeDecoder(loaded(target), in_one_run(with_noise(target, 0.1)))
    prompts = [random_prompt(length) for length in (3, 9, 14)]
    together = decoder.generate(prompts, fixed(20, 4, batch_size=3))
    assert not runs
    assert [answer.ids for answer in together] == [answer.ids for answer in decoder.generate(prompts, fixed(20, 4))]
    assert runs


def test_a_session_of_one_row_offers_it_and_wants_a_new_token() -> None:
    draft = in_one_run(tiny_llama())
    assert type(new_session(draft, 2, 64)) is SlotSession
    session = new_session(draft, 1, 64)
    assert isinstance(session, DraftingSession)
    context = torch.tensor(random_prompt(9))
    session.extend([context], [1])
    with pytest.raises(ValueError, match="1 logits of 0 new tokens"):
        session.draft_steps(context, torch.zeros(2, dtype=torch.float64), lambda *_: None, "key")  # type: ignore


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLINGS)
def test_captured_drafts_equal_single_steps(name: str) -> None:
    target = tiny_llama(3).cuda()  # fp64: no rounding decides
    for eps in (0.0, 0.2):
        draft = loaded(with_noise(target, eps).cuda())
        decoders = [
            SpeculativeDecoder(loaded(target), with_backend(draft, backend)) for backend in ("cuda_graph", "lean")
        ]
        for seed in (1, 2):
            config = fixed(30, 4, SAMPLINGS[name], seed=seed)
            graph, single = (rounds_of(decoder, random_prompt(9), config) for decoder in decoders)
            assert graph == single
