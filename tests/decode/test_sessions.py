"""Every session against logits without any cache, over random lives of ragged batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.backends.eager import TransformersForward, why_not_slots
from decode.dynamic_session import DynamicSession
from decode.model_facts import context_limit, input_device, layer_windows
from decode.models import LoadedModel
from decode.session import Session, SlotSession, check_cache, new_session
from decode.slots import Slots
from tests.decode.session_fixtures import (
    CACHE_FAMILIES,
    RAGGED,
    SLOT_FAMILIES,
    TOLERANCE,
    Life,
    dynamic_session,
    plain_logits,
    prompts,
    slot_session,
    worst_gap,
)
from tests.fixtures import tiny_gpt2, tiny_llama, tiny_mistral


@pytest.mark.parametrize("family", SLOT_FAMILIES)
def test_d45_d47_d28_slots_equal_plain_logits_in_ragged_batches(family: str) -> None:
    """D45, D47 (every id is a token, none is padding) and D28 (windows of 8 in mistral, gemma2 and gemma3)."""
    model = SLOT_FAMILIES[family]()
    assert why_not_slots(model) is None
    assert Life(slot_session(model, 4), model, prompts(*RAGGED), seed=0).run(4) < TOLERANCE
    assert Life(slot_session(model, 1), model, prompts(3), seed=1).run(5) < TOLERANCE


@pytest.mark.parametrize("make", [slot_session, dynamic_session])
def test_long_prompts_are_fed_in_chunks(make: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.session.PREFILL_CHUNK", 7)
    model = tiny_mistral()
    widths: list[int] = []
    handle = model.register_forward_pre_hook(lambda *a: widths.append(a[2]["input_ids"].shape[1]), with_kwargs=True)
    session, contexts = make(model, 3), prompts(33, 5, 20)
    logits = session.extend(contexts, [3, 1, 2])
    handle.remove()
    assert max(widths) == 7
    for ours, context in zip(logits, contexts, strict=True):
        assert float((ours - plain_logits(model, context, len(ours))).abs().max()) < TOLERANCE
    assert worst_gap(session, model, [torch.cat([c, c[:9]]) for c in contexts], [9, 5, 1]) < TOLERANCE


@pytest.mark.parametrize("make", [slot_session, dynamic_session])
def test_logits_of_tokens_already_seen_are_refused(make: Callable[..., Session]) -> None:
    session, (context,) = make(tiny_llama(), 1), prompts(9)
    session.extend([context[:8]], [1])
    with pytest.raises(ValueError, match="2 logits of 1 new tokens"):
        session.extend([context], [2])


def test_sessions_agree_bit_for_bit_with_themselves_when_a_row_leaves() -> None:
    model = tiny_llama()
    contexts = prompts(9, 4, 20)
    both, alone = slot_session(model, 3), slot_session(model, 1)
    both.extend(contexts, [1, 1, 1])
    both.keep_rows([1])
    alone.extend([contexts[1]], [1])
    longer = torch.cat([contexts[1], contexts[0]])
    assert torch.equal(both.extend([longer], [9])[0], alone.extend([longer], [9])[0])


def test_rows_of_equal_length_are_written_without_indices() -> None:
    for family in ("llama", "gpt2", "gemma3"):
        model = SLOT_FAMILIES[family]()
        session, contexts = slot_session(model, 3), prompts(12, 12, 12)
        assert worst_gap(session, model, contexts, [1, 2, 3]) < TOLERANCE
        assert worst_gap(session, model, [torch.cat([c, c[:2]]) for c in contexts], [2, 2, 1]) < TOLERANCE


def test_idle_rows_are_not_fed_and_cost_no_head_rows() -> None:
    model, contexts = tiny_llama(), prompts(9, 4)
    for session in (slot_session(model, 2), dynamic_session(model, 2)):
        assert [tuple(part.shape) for part in session.extend(contexts, [0, 2])] == [(0, 48), (2, 48)]
        assert [len(part) for part in session.extend(contexts, [0, 0])] == [0, 0]
        session.rewind([9, 4])
        longer = torch.cat([contexts[1], contexts[0]])
        assert worst_gap(session, model, [contexts[0], longer], [1, 0]) < TOLERANCE
        assert worst_gap(session, model, [torch.cat([contexts[0], longer]), longer], [13, 9]) < TOLERANCE


def test_d31_d32_a_row_at_the_models_last_position_may_idle() -> None:
    """A padding column of a full row takes a position that the model has."""
    model = tiny_gpt2(positions=16)
    session, contexts = slot_session(model, 2, 16), prompts(16, 3)
    assert session.capacity == 16
    assert worst_gap(session, model, contexts, [2, 1]) < TOLERANCE
    longer = [contexts[0], torch.cat([contexts[1], contexts[0][:5]])]
    assert worst_gap(session, model, longer, [0, 5]) < TOLERANCE


@pytest.mark.parametrize("make", [slot_session, dynamic_session])
def test_d33_d29_what_configs_say_of_caches_does_not_matter(make: Callable[..., Session]) -> None:
    model = tiny_llama()
    model.config.use_cache = False
    model.generation_config.use_cache = False
    model.generation_config.cache_implementation = "static"
    widths: list[int] = []
    handle = model.register_forward_pre_hook(lambda *a: widths.append(a[2]["input_ids"].shape[1]), with_kwargs=True)
    session, (context,) = make(model, 1), prompts(7)
    session.extend([context], [1])
    logits = session.extend([torch.cat([context, context[:2]])], [2])[0]
    handle.remove()
    assert widths == [7, 2]
    assert float((logits - plain_logits(model, torch.cat([context, context[:2]]), 2)).abs().max()) < TOLERANCE


def test_buffers_grow_with_the_text_and_serve_longer_ones_than_asked_for() -> None:
    model = tiny_llama()
    session, (context,) = slot_session(model, 2, 5), prompts(240)
    assert worst_gap(session, model, [context[:4], context[:5]], [1, 1]) < TOLERANCE
    assert worst_gap(session, model, [context[:230], context[:9]], [3, 1]) < TOLERANCE
    assert worst_gap(session, model, [context, context[:12]], [10, 3]) < TOLERANCE


def test_fixed_shapes_give_the_same_logits() -> None:
    """What compiled forwards run on: whole buffers, writes by index, steps padded to a width that was made ready."""

    class Padded(TransformersForward):
        def new_slots(self, rows: int, length: int) -> Slots:
            return Slots(rows, length, fixed_shapes=True)

        def pad_width(self, width: int) -> int:
            return -(-width // 8) * 8

    for family in ("llama", "gemma2"):
        model = SLOT_FAMILIES[family]()
        for lengths in ((3,), RAGGED):
            session = SlotSession(Padded(model), model, len(lengths), 256)
            assert Life(session, model, prompts(*lengths), seed=2).run(4) < TOLERANCE


def test_a_mask_that_hides_nothing_may_be_left_out() -> None:
    slots, cpu = Slots(2, 40), torch.device("cpu")
    for starts, widths in (([7, 7], [1, 1]), ([7, 5], [1, 1]), ([0, 0], [3, 3]), ([7, 7], [1, 0])):
        slots.aim(starts, widths, cpu)
        for window in (None, 3, 8):
            assert slots.hides_nothing(window) == bool((slots.mask(window, torch.float32) == 0).all())


class Deaf(Slots):
    """Slots that show stale tokens, or windows one too wide."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window is not None:
            return super().mask(window + 1, dtype)
        return super().mask(None, dtype).clone().fill_(0.0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_control_a_wrong_mask_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SLOT_FAMILIES[family]()
    monkeypatch.setattr(TransformersForward, "new_slots", lambda self, rows, length: Deaf(rows, length))
    assert Life(slot_session(model, 4), model, prompts(*RAGGED), seed=0).run(2) > 1e-3


def test_control_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check sees it too, and the model is then run over its own cache."""
    model, aim = tiny_gpt2(), Slots.aim

    def off_by_one(self: Slots, *args: Any) -> None:
        aim(self, *args)
        self._positions = self.positions + (self.positions > 0)

    monkeypatch.setattr(Slots, "aim", off_by_one)
    assert Life(slot_session(model, 1), model, prompts(5), seed=0).run(2) > 1e-3
    assert "differ" in str(why_not_slots(model))
    assert isinstance(new_session(LoadedModel(model, None, "tiny"), 1, 64), DynamicSession)


@pytest.mark.parametrize("family", [*SLOT_FAMILIES, *CACHE_FAMILIES])
def test_the_session_is_chosen_by_what_the_model_can(family: str) -> None:
    model = {**SLOT_FAMILIES, **CACHE_FAMILIES}[family]()
    check_cache(model, family, rewinds=True)
    session = new_session(LoadedModel(model, None, family), 2, 64)
    assert isinstance(session, SlotSession if family in SLOT_FAMILIES else DynamicSession)
    assert session.capacity == context_limit(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_fail_the_self_check(dtype: torch.dtype) -> None:
    for family in ("llama", "gpt2", "gemma2", "qwen2"):
        assert why_not_slots(SLOT_FAMILIES[family]().to(dtype)) is None


def test_what_a_model_says_of_itself() -> None:
    assert layer_windows(tiny_llama()) == {"full_attention": None}
    assert layer_windows(SLOT_FAMILIES["gemma2"]()) == {"sliding_attention": 8, "full_attention": None}
    assert layer_windows(CACHE_FAMILIES["lfm2"]()) is None
    assert context_limit(tiny_gpt2(positions=16)) == 16
    assert context_limit(CACHE_FAMILIES["bloom"]()) == 2**31 - 1  # it states none


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_models_spread_by_accelerate_decode_alike(place: str, tmp_path: Any) -> None:
    """`device_map` with layers in files: weights come to the device when they are used."""
    from transformers import LlamaForCausalLM

    plain = tiny_llama(layers=3)
    plain.save_pretrained(tmp_path / "model")
    device_map = {"model.layers.1": place, "model.layers.2": place, "model.embed_tokens": "cpu", "model.norm": "cpu",
                  "model.rotary_emb": "cpu", "lm_head": place, "model.layers.0": "cpu"}  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload", dtype=torch.float64
    ).eval()
    assert (next(model.lm_head.parameters()).device.type == "meta") == (place == "disk")
    assert input_device(model) == torch.device("cpu")
    assert why_not_slots(model) is None
    assert Life(slot_session(model, 3), plain, prompts(3, 9, 20), seed=3).run(3) < TOLERANCE
    assert Life(dynamic_session(model, 2), plain, prompts(3, 9), seed=3).run(2) < TOLERANCE
