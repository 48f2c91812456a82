"""Static slots, and the forwards that are compiled or captured for them, against the model's own logits."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decode.backends import with_backend
from decode.backends.compiled import CompiledForward
from decode.backends.cuda_graph import DraftLoop, Draw, GraphForward, call, capture_graph
from decode.backends.eager import TransformersForward
from decode.backends.lean import LeanForward
from decode.backends.static import LEAST_LENGTH, SlotPool, StaticSlots
from decode.config import SamplingConfig
from decode.draws import draw_from
from decode.laws import Law
from decode.sampling import law_of
from decode.session import DraftingSession, new_session
from tests.decode.backend_checks import LEAN, Feeder, check_rows, check_text, own_logits
from tests.fixtures import loaded, random_prompt, tiny_llama, tiny_mistral

CPU = torch.device("cpu")
SAMPLED = SamplingConfig(temperature=1.0, top_k=20)


@pytest.mark.parametrize("base", [LeanForward, TransformersForward])
@pytest.mark.parametrize("family", ["llama", "mistral window", "qwen2 mixed windows"])
def test_the_captured_path_equals_the_models_own(base: Callable, family: str) -> None:
    model = LEAN[family]()
    forward = GraphForward(base(model), CPU)
    check_text(forward, model, atol=1e-9)
    check_rows(forward, model, atol=1e-9)
    check_text(forward, model, atol=1e-9)  # the same memory again


def test_steps_are_padded_to_few_widths_and_made_ready_once() -> None:
    model = tiny_llama()
    forward = GraphForward(LeanForward(model), CPU)
    assert [forward.pad_width(width) for width in (1, 2, 3, 5, 16, 17)] == [1, 2, 4, 8, 16, 17]
    feeder = Feeder(forward, 1)
    assert isinstance(feeder.slots, StaticSlots)
    for start, width in ((0, 3), (3, 1), (4, 4), (8, 30), (38, 1)):
        feeder.feed([start], [random_prompt(width)])
    assert set(feeder.slots.store.runs) == {1, 2, 4, 8, 16}  # made when the forward was
    feeder = Feeder(forward, 1, 600)
    for start, width in ((0, 3), (3, 1), (4, 4), (8, 30), (38, 1)):
        feeder.feed([start], [random_prompt(width)])
    assert set(feeder.slots.store.runs) == {1, 4}


def test_memory_is_lent_to_one_text_at_a_time_and_forgets() -> None:
    pool = SlotPool()
    first, second = pool.lend(10), pool.lend(10)
    assert first.store is not second.store
    assert pool.lend(LEAST_LENGTH + 1).length == 4 * LEAST_LENGTH
    keys = torch.full((1, 1, 1, 2), float("nan"))
    first.aim([3], [1], CPU)
    first.update(0, keys, keys)
    store = first.store
    first.keep_rows([])
    del first
    gc.collect()
    again = pool.lend(10)
    assert again.store is store
    assert store.buffers[0][0].shape == (1, 1, LEAST_LENGTH + 1, 2)
    assert store.buffers[0][0].isfinite().all()


def draw_by(sampling: SamplingConfig) -> Draw:
    def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Law]:
        law = law_of(logits, sampling)
        return draw_from(law, uniform), law

    return draw


def draft_one_by_one(forward: GraphForward, prompt: list[int], uniforms: Tensor, sampling: SamplingConfig) -> list[int]:
    """Drafting with a step for each token, read by the host."""
    feeder, text = Feeder(forward, 1), list(prompt)
    feeder.feed([0], [prompt[:-1]])
    for uniform in uniforms:
        logits = feeder.feed([len(text) - 1], [text[-1:]])[0]
        text.append(int(draw_from(law_of(logits, sampling), uniform.unsqueeze(0))))
    return text[len(prompt) :]


def drafted(forward: GraphForward, prompt: list[int], uniforms: Tensor, sampling: SamplingConfig) -> list[int]:
    """The same by the loop, which reads nothing."""
    feeder = Feeder(forward, 1)
    assert isinstance(feeder.slots, StaticSlots)
    feeder.feed([0], [prompt[:-1]])
    device = uniforms.device
    loop = forward.draft_loop(feeder.slots, draw_by(sampling), len(uniforms), sampling.temperature)
    last = torch.tensor([prompt[-1]], device=device), torch.tensor([len(prompt) - 1], device=device)
    tokens, laws = loop(*last, uniforms)
    assert [float(law.probs.sum()) for law in laws] == pytest.approx([1.0] * len(uniforms))
    return tokens.tolist()


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", [tiny_llama, tiny_mistral])
def test_the_draft_loop_draws_what_single_steps_draw(model: Callable, sampling: SamplingConfig) -> None:
    forward = GraphForward(LeanForward(model()), CPU)
    for seed in range(4):  # the loop is made for the first text and serves the others
        prompt = random_prompt(9 + seed, seed=seed)
        uniforms = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        got = drafted(forward, prompt, uniforms, sampling)
        assert got == draft_one_by_one(forward, prompt, uniforms, sampling)


def test_the_draft_loop_leaves_the_slots_ready_to_go_on() -> None:
    model, prompt = tiny_llama(), random_prompt(8)
    forward = GraphForward(LeanForward(model), CPU)
    feeder = Feeder(forward, 1)
    feeder.feed([0], [prompt[:-1]])
    assert isinstance(feeder.slots, StaticSlots)
    loop = DraftLoop(LeanForward(model), feeder.slots, draw_by(SamplingConfig()), 3, call)
    tokens, _ = loop(torch.tensor([prompt[-1]]), torch.tensor([7]), torch.zeros(3, dtype=torch.float64))
    text = prompt + tokens.tolist()
    got = feeder.feed([10], [text[10:]])[0]
    torch.testing.assert_close(got, own_logits(model, text)[10:], atol=1e-9, rtol=0)


def test_a_loop_whose_capture_fails_draws_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def fails(run: Callable) -> Callable:
        raise RuntimeError("no graph")

    found, uniforms = [], torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for capture in (call, fails):
        feeder = Feeder(GraphForward(LeanForward(tiny_llama()), CPU), 1)
        feeder.feed([0], [[1, 2, 3]])
        assert isinstance(feeder.slots, StaticSlots)
        loop = DraftLoop(feeder.forward, feeder.slots, draw_by(SAMPLED), 3, capture)
        found += [loop(torch.tensor([4]), torch.tensor([3]), uniforms)[0].tolist() for _ in range(2)]
    assert found == [found[0]] * 4
    assert caplog.messages == ["a draft of 3 tokens runs step by step, as its capture fails: RuntimeError: no graph"]


def test_a_run_reads_nothing_but_what_lies_in_its_memory() -> None:
    """A replayed graph sees only what was copied into its tensors: so does the called one, its mask included."""
    model, text = tiny_llama(), random_prompt(12)
    feeder = Feeder(GraphForward(LeanForward(model), CPU), 1)
    feeder.feed([0], [text[:10]])
    feeder.feed([10], [text[10:11]])
    assert isinstance(feeder.slots, StaticSlots)
    store = feeder.slots.store
    with torch.inference_mode():
        for moved in (store.steps[1][0], store.steps[1][2]):
            moved.fill_(11)
        got = store.runs[1](torch.tensor([text[11:]]))[0]
    torch.testing.assert_close(got, own_logits(model, text)[11:], atol=1e-9, rtol=0)


@pytest.mark.slow  # a minute of compiling on one core
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compiled_logits_equal_the_models_own() -> None:
    model = tiny_mistral(window=6).float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward = CompiledForward(TransformersForward(model), CPU, widths=(1, 4))
    check_text(forward, model, atol=2e-3)  # fp32 rounding of logits of size ~30
    check_rows(forward, model, atol=2e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_compiling_that_fails_falls_back_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)
    small = loaded(tiny_llama().float())
    assert with_backend(small, "compiled") is small
    assert "CompiledForward fails: RuntimeError: no compiler" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("base", [LeanForward, TransformersForward])
def test_captured_graphs_equal_the_models_own(base: Callable) -> None:
    model = tiny_llama().float().cuda()
    forward = GraphForward(base(model), torch.device("cuda"))
    text = torch.tensor([random_prompt(40)], device="cuda")
    wanted = model(input_ids=text, use_cache=False).logits[0]
    for _ in range(2):  # the second text runs on the first one's graphs
        slots = forward.new_slots(1, 64)
        with torch.inference_mode():
            for start, end in ((0, 20), (20, 21), (21, 22), (22, 26), (24, 28), (28, 29)):
                slots.aim([start], [end - start], text.device)
                got = forward(text[:, start:end], slots, end - start)[0]
                # fp32 with another order of sums, logits of size ~30; a GPU may shorten factors
                torch.testing.assert_close(got, wanted[start:end], atol=5e-2, rtol=0)
        del slots
        gc.collect()


@pytest.mark.gpu
def test_the_captured_draft_loop_draws_what_the_called_one_draws() -> None:
    model = tiny_llama().cuda()  # fp64: no rounding decides
    prompt, device = random_prompt(9), torch.device("cuda")
    found = []
    for capture in (call, capture_graph):
        slots = SlotPool().lend(64)
        base = LeanForward(model)
        with torch.inference_mode():
            slots.aim([0], [8], device)
            base(torch.tensor([prompt[:8]], device=device), slots, 1)
            loop = DraftLoop(base, slots, draw_by(SAMPLED), 5, capture)
            last = torch.tensor([prompt[8]], device=device), torch.tensor([8], device=device)
            for seed in (0, 1):
                uniforms = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
                found.append(loop(*last, uniforms.to(device))[0].tolist())
    assert found[:2] == found[2:]


@pytest.mark.gpu
def test_a_captured_draft_does_not_wait_for_the_device() -> None:
    session = new_session(with_backend(loaded(tiny_llama().cuda()), "cuda_graph"), 1, 64)
    assert isinstance(session, DraftingSession)
    text = torch.tensor(random_prompt(20), device="cuda")
    uniforms = torch.full((4,), 0.3, dtype=torch.float64, device="cuda")
    session.draft_steps(text[:9], uniforms, draw_by(SAMPLED), "key")  # captures
    session.rewind([10])
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.draft_steps(text[:12], uniforms, draw_by(SAMPLED), "key")  # one that was missed is fed before
    finally:
        torch.cuda.set_sync_debug_mode("default")
