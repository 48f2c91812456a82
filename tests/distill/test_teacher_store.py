"""What a cache keeps and how exactly: in every form a perfect draft has loss 0, and the files stay where they are."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import LossConfig
from distill.data.batches import collate
from distill.heads import supervised_logits
from distill.laws import Columns, FullLaw, TopKLaw, align
from distill.losses import LOSSES, Pair, forward_kl
from distill.teacher import scoring
from distill.teacher.cached import score_laws
from distill.teacher.store import Store, read_index
from tests.distill.teacher_samples import PACKS, K, batches, cached, make_examples
from tests.fit_runs import CONSTANT, QUIET, PlainDescent, distance, examples_of, feed_of, run, weights_of
from tests.fixtures import loaded, tiny_llama

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

KEPT: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-6),
    "float16": ({"store": "float16"}, 2e-6),  # as TeacherConfig.store says
    "all ids": ({"top_k": 48}, 1e-6),
    "all ids, float16": ({"top_k": 48, "store": "float16"}, 2e-6),
    "drawn": ({"top_k": 32, "sampled": 6}, 1e-6),
    "drawn, float16": ({"top_k": 32, "sampled": 6, "store": "float16"}, 4e-6),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("vocab_ids", [None, torch.arange(0, 48, 3)], ids=["all", "reduced"])
def test_t02_t24_a_perfect_draft_has_loss_and_gradient_zero_in_every_kept_form(
    kept: str, vocab_ids: Any, tmp_path: Path
) -> None:
    settings, tolerance = KEPT[kept]
    model, examples = tiny_llama(), make_examples()
    batch, columns = batches(examples, "padded")[0], Columns(48, vocab_ids)
    teacher = cached(model, examples, tmp_path, vocab_ids=vocab_ids, **settings)
    logits = supervised_logits(model, batch, apart=True)[:, columns.ids].detach().requires_grad_()
    losses = LOSSES["forward_kl"](Pair(teacher.law(batch), logits, columns, batch.next_ids[batch.supervised]))
    (gradient,) = torch.autograd.grad(losses.mean(), logits)
    assert losses.abs().max() < tolerance
    assert gradient.abs().max() * len(losses) < (1e-3 if "float16" in kept else 1e-5)


@pytest.mark.parametrize("kept", ["float16", "drawn"])
def test_t02_draft_equal_to_target_does_not_move(kept: str, tmp_path: Path) -> None:
    settings, tolerance = KEPT[kept]
    target, draft, examples = tiny_llama(), tiny_llama(), examples_of([1, 3, 9, 12])
    before = weights_of(draft)
    module = PlainDescent(
        loaded(draft),
        cached(target, examples, tmp_path, **settings),
        num_steps=1,
        loss=LossConfig(),
        optimizer=CONSTANT,
    )
    run(module, feed_of(examples, batch_size=2, accumulate=2))
    assert abs(module.window_loss or 0.0) < tolerance
    assert distance(before, weights_of(draft)) < (1e-4 if kept == "float16" else 1e-6)


def test_float16_costs_what_is_stated_and_halves_the_log_probs(tmp_path: Path) -> None:
    """log p rounds by at most |log p| / 2048, so KL is sum p (log p / 2048)^2 / 2: largest, and here computed."""
    model, examples = tiny_llama(std=0.8), make_examples()
    batch = batches(examples, "padded")[0]
    exact, half = (cached(model, examples, tmp_path, store=store).law(batch) for store in ("float32", "float16"))
    assert isinstance(exact, TopKLaw) and isinstance(half, TopKLaw)
    assert torch.equal(exact.ids, half.ids) and torch.equal(exact.log_tail, half.log_tail)
    off = (half.log_probs - exact.log_probs).abs()
    assert (off <= exact.log_probs.abs() / 2048 + 1e-7).all() and off.max() > 1e-4
    logits = supervised_logits(model, batch, apart=True)
    columns = Columns(48)
    assert forward_kl(*align(half, logits, columns)).max() < 2e-6
    overlaps = [torch.minimum(*align(law, 0.5 * logits, columns)).exp().sum(-1) for law in (exact, half)]
    assert (overlaps[0] - overlaps[1]).abs().max() < 1e-3
    sizes = [sum(p.stat().st_size for p in f.glob("*.safetensors")) for f in sorted(tmp_path.iterdir())]
    assert max(sizes) - min(sizes) == pytest.approx(2 * K * len(exact.log_tail), abs=64)  # headers are padded


def test_most_entropy_bounds_what_float16_can_cost() -> None:
    """33 buckets as top 32 makes them: no law of them makes sum p (log p)^2 / 2048^2 / 2 larger than is stated."""
    logits = torch.randn(20_000, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits *= torch.linspace(0, 8, 20_000, dtype=torch.float64)[:, None]
    log_p = logits.log_softmax(-1)
    assert ((log_p.exp() * log_p**2).sum(-1) / 2048**2 / 2).max() < 2e-6
    assert ((log_p.exp() * log_p.abs()).sum(-1) / 2048 / 2).max() < 1e-3 and math.log(33) / 2048 / 2 < 1e-3


def test_shards_with_ids_of_other_widths_give_the_ids_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SHARD_POSITIONS", 40)
    model, examples = tiny_llama(), make_examples()
    before = cached(model, examples, tmp_path)
    folder = next(tmp_path.iterdir())
    store = Store(folder, (read_index(folder) or {})["key"])
    first = store.read("shard-00000")
    assert first["ids"].dtype == torch.uint16
    store.write("shard-00000", {k: v.int() if k == "ids" else v.clone() for k, v in first.items()})
    after = cached(model, examples, tmp_path)
    for batch in batches(examples, "packed"):
        assert all(
            torch.equal(a, b)
            for a, b in zip(vars(before.law(batch)).values(), vars(after.law(batch)).values(), strict=True)
        )


@pytest.mark.parametrize("layout", PACKS)
def test_t26_laws_scored_in_memory_are_those_of_a_cache(layout: str, tmp_path: Path) -> None:
    model, examples = tiny_llama(), [*make_examples(), make_examples()[3]]  # one of them twice
    kept = cached(model, examples, tmp_path)
    held = score_laws(model, examples, top_k=K, batch_size=3)
    for batch in batches(examples, layout):
        for mine, other in zip(vars(held.law(batch)).values(), vars(kept.law(batch)).values(), strict=True):
            assert mine.dtype == other.dtype and torch.allclose(mine, other, atol=1e-6)
    twice = collate([[3], [20]], examples, normaliser=1)
    law = held.law(twice)
    assert isinstance(law, TopKLaw)
    assert torch.equal(law.part(0, len(law.ids) // 2).ids, law.part(len(law.ids) // 2, len(law.ids)).ids)


def test_laws_stay_in_their_files(tmp_path: Path) -> None:
    """A map is of a file, so what is looked at can be dropped again; a copy would hold all of it."""
    model, examples = tiny_llama(), make_examples()
    cached(model, examples, tmp_path)
    folder = next(tmp_path.iterdir())
    table = Store(folder, (read_index(folder) or {})["key"]).read("shard-00000")
    address = table["log_probs"].data_ptr()
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("no /proc here")
    spans = [line.split() for line in maps.read_text().splitlines() if "shard-00000.safetensors" in line]
    assert any(int(s[0].split("-")[0], 16) <= address < int(s[0].split("-")[1], 16) for s in spans)


def test_full_law_is_the_limit(tmp_path: Path) -> None:
    model, examples = tiny_llama(), make_examples(6)
    batch = collate([[i] for i in range(6)], examples, normaliser=1)
    whole = FullLaw(supervised_logits(model, batch, apart=True).log_softmax(-1))
    logits = supervised_logits(tiny_llama(seed=3), batch, apart=True)
    exact = forward_kl(*align(whole, logits, Columns(48)))
    law = cached(model, examples, tmp_path, top_k=48, store="float16").law(batch)
    assert torch.allclose(forward_kl(*align(law, logits, Columns(48))), exact, rtol=2e-3)
