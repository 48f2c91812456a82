"""The LightningModule's modes, randomness, precision and memory, and what it trains and saves."""

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback

from decode.config import ModelConfig
from decode.models import narrow_head
from distill.config import OptimizerConfig, TeacherConfig
from distill.data.batches import Batch
from distill.drafts.vocab import pin_guard_channel
from distill.laws import Columns, FullLaw, align
from distill.losses import forward_kl
from distill.teacher import choose
from distill.teacher.online import OnlineTeacher
from distill.training.module import Distillation, noise_seed
from distill.training.optimizer import make_optimizer
from distill.weights import weights_sha256
from tests.distill.training import Probe, distil, mean_loss
from tests.fit_runs import CONSTANT, QUIET, PlainDescent, distance, examples_of, feed_of, run, run_fit, weights_of
from tests.fixtures import loaded, tiny_gpt2, tiny_llama

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]


def test_t19_only_the_draft_is_trained_saved_and_counted() -> None:
    target, draft = tiny_gpt2(seed=2), tiny_llama(seed=1)
    for module in target.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    before = weights_sha256(target)
    seen: list[torch.Tensor] = []

    class Watch(Probe):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, *_: Any) -> None:
            seen.append(module.teacher.law(fixed).log_probs)

    feed = feed_of(examples_of([3, 4, 5, 6]), batch_size=1, every=2)
    fixed = next(iter(feed.segment(0)))
    decay = OptimizerConfig(learning_rate=0.1, weight_decay=0.1)
    module = distil(draft, target, feed, Watch(), kind=Distillation, optimizer=decay)
    assert weights_sha256(target) == before
    assert all(torch.equal(seen[0], later) for later in seen)
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in draft.parameters())
    assert set(module.state_dict()) == {f"student.model.{name}" for name in draft.state_dict()}


def test_t27_dropout_is_on_in_training_and_off_in_validation() -> None:
    draft, probe = tiny_gpt2(seed=1), Probe()
    feed = feed_of(examples_of([3] * 6), batch_size=1, every=2)
    distil(draft, tiny_llama(), feed, probe)
    assert [kind for kind, _ in probe.modes] == ["train", "train", "validate"] * 3
    assert all(training == (kind == "train") for kind, training in probe.modes)


def test_r04_dropout_is_drawn_from_the_micro_batchs_number_alone() -> None:
    assert len({noise_seed(s, b, r) for s in range(3) for b in range(3) for r in range(3)}) == 27
    runs = []
    for noise in (1, 2):
        draft, probe = tiny_gpt2(seed=1), Probe()
        torch.manual_seed(noise)  # whatever was drawn before
        feed = feed_of(examples_of([3] * 8), batch_size=1, accumulate=2, every=2)
        distil(draft, tiny_llama(), feed, probe, seed=5)
        runs.append(weights_of(draft))
        assert len(set(probe.seeds)) == 8  # none twice
    assert distance(*runs) == 0
    other = tiny_gpt2(seed=1)
    distil(other, tiny_llama(), feed, seed=6)
    assert distance(runs[0], weights_of(other)) > 0


def test_reduced_vocabulary_trains_its_rows_and_keeps_the_guard_channel() -> None:
    draft, target, ids = tiny_llama(seed=1), tiny_llama(), torch.arange(0, 48, 3)
    pin_guard_channel(draft)
    narrow_head(draft, ids)
    feed = feed_of(examples_of([3, 4, 5, 6]), batch_size=2)
    module = Distillation(loaded(draft, vocab_ids=ids), OnlineTeacher(target), num_steps=2)
    before = weights_of(draft)
    batch = next(iter(feed.segment(0)))
    logits = draft(input_ids=batch.input_ids).logits[batch.supervised]
    log_p = target(input_ids=batch.input_ids).logits[batch.supervised].log_softmax(-1)
    expected = forward_kl(*align(FullLaw(log_p), logits, Columns(48, ids))).mean()
    probe = Probe()
    run(module, feed, [probe])
    assert probe.losses[0] == pytest.approx(expected.item(), abs=1e-9)
    after = weights_of(draft)
    assert distance(before, after) > 1e-4
    assert (after["model.embed_tokens.weight"][:, 0] == 1).all()
    assert (after["model.layers.0.mlp.down_proj.weight"][0] == 0).all()
    assert after["lm_head.weight"].shape == (16, 32)


def test_clipping_counts_no_gradient_of_the_pinned_guard_channel() -> None:
    draft, ids = tiny_llama(seed=1), torch.arange(0, 48, 3)
    pin_guard_channel(draft)
    narrow_head(draft, ids)
    feed = feed_of(examples_of([3, 4, 5, 6]))
    module = PlainDescent(loaded(draft, vocab_ids=ids), OnlineTeacher(tiny_llama()), num_steps=1, optimizer=CONSTANT)
    before = weights_of(draft)
    run(module, feed, gradient_clip_val=1e-3)
    moved = sum(float((after - before[name]).square().sum()) for name, after in weights_of(draft).items()) ** 0.5
    # All of the clipped gradient moves weights; 1e-3: the clip adds 1e-6 to the norm that it divides by
    assert moved == pytest.approx(0.1 * 1e-3, rel=1e-3)
    assert (draft.model.embed_tokens.weight[:, 0] == 1).all()


def test_weight_decay_spares_embeddings_and_norms() -> None:
    model = tiny_llama().requires_grad_(True)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1), fused=True)
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert {id(p) for p in others} == {id(p) for n, p in model.named_parameters() if "norm" in n or "embed" in n}
    assert len(decayed) + len(others) == len(list(model.parameters()))


def test_t13_under_bf16_autocast_the_loss_is_still_taken_in_fp32() -> None:
    draft, target, probe = tiny_llama(seed=1).float(), tiny_llama().float(), Probe()
    examples = examples_of([5, 6, 7, 8])
    expected = mean_loss(tiny_llama(seed=1), tiny_llama(), [0, 1, 2, 3], examples).item()
    seen: list[torch.dtype] = []

    feed = feed_of(examples)
    module = Distillation(loaded(draft), OnlineTeacher(target), num_steps=feed.num_steps)
    draft.model.layers[0].mlp.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    module.student.register_forward_hook(lambda _, inputs, outcome: seen.append(outcome.losses.dtype))
    run(module, feed, [probe], precision="bf16-mixed")
    assert seen[:2] == [torch.bfloat16, torch.float32]
    assert probe.losses[0] == pytest.approx(expected, rel=0.02)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in draft.parameters())


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize(
    "kept", [{"dtype": "bfloat16"}, pytest.param({"quantization": "int8"}, marks=pytest.mark.slow)], ids=str
)
def test_the_target_may_be_smaller_than_the_draft_is_precise(kept: Any, fit_pair: Path, tmp_path: Path) -> None:
    if "quantization" in kept:
        pytest.importorskip("torchao")
    model = ModelConfig(device="cpu", backend="eager", **kept)
    found: dict[str, Any] = {}

    class Look(OnlineTeacher):
        def law(self, batch: Batch) -> Any:
            law = super().law(batch)
            found["law"] = law.part(0, 1).log_probs.dtype
            found["weights"] = self.model.get_decoder().layers[0].mlp.down_proj.weight
            return law

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "OnlineTeacher", Look)
        teacher = TeacherConfig(kind="online")
        report = run_fit(fit_pair, tmp_path / "run", model=model, teacher=teacher, max_steps=2)
    assert report.complete and found["law"] == torch.float32
    assert found["weights"].dtype == torch.bfloat16 or "Int8" in type(found["weights"]).__name__
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.slow
def test_t29_memory_does_not_grow_with_steps() -> None:
    marks: list[tuple[int, int]] = []

    class Weigh(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in (100, 600):
                gc.collect()
                alive = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
                marks.append((alive, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))

    feed = feed_of(examples_of([3] * 8), batch_size=2, max_steps=600, every=50)
    draft = tiny_llama(seed=1)
    run(Distillation(loaded(draft), OnlineTeacher(tiny_llama()), num_steps=600), feed, [Weigh()])
    (first, memory), (last, later) = marks
    assert last <= first
    assert later - memory < 5 * 1024  # kB
