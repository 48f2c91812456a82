"""Runs of fit on tiny models: in memory through the Trainer, and on disk as the command makes them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from torch.optim import SGD, Optimizer

from decode.config import DecodeConfig, ModelConfig
from decode.evaluate import Judgement
from decode.stats import Stats
from distill.config import DataConfig, FitConfig, JudgeConfig, OptimizerConfig, TeacherConfig
from distill.data.examples import Example
from distill.data.module import DraftDataModule
from distill.training.fit import FitReport, fit
from distill.training.module import Distillation
from tests.fixtures import random_prompt

QUIET = (
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*",
    "ignore:.*in eval mode at the start.*",
)
"""What Lightning says of a run that is as it should be; fit hides it from users too."""


def examples_of(counts: Sequence[int], vocab_size: int = 48) -> list[Example]:
    """One document per count: a prompt of 2 or 3 tokens, then so many supervised ones."""
    made = []
    for number, count in enumerate(counts):
        prompt = 2 + number % 2
        ids = random_prompt(prompt + count, vocab_size, seed=number)
        made.append(Example(ids, [False] * prompt + [True] * count, f"made:{number}"))
    return made


def feed_of(train: list[Example], validation: list[Example] | None = None, **options: Any) -> DraftDataModule:
    """The data module of a run; options: batch_size, accumulate, every, packing, max_length, max_steps, max_epochs."""
    length = {"max_epochs": 1} if "max_steps" not in options and "max_epochs" not in options else {}
    steps: dict[str, Any] = {name: options.get(name, length.get(name)) for name in ("max_steps", "max_epochs")}
    config = FitConfig(
        target="t",
        draft="d",
        output="o",
        data=DataConfig(
            train=["x"],
            batch_size=options.get("batch_size", 4),
            packing=options.get("packing", False),
            max_length=options.get("max_length", 64),
        ),
        optimizer=OptimizerConfig(accumulate=options.get("accumulate", 1)),
        judge=JudgeConfig(every_n_steps=options.get("every", 1000)),
        **steps,
    )
    return DraftDataModule(train, validation or train[:1], config)


class PlainDescent(Distillation):
    """With SGD, so that a step shows the gradient itself."""

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.draft.parameters(), lr=1.0)


CONSTANT = OptimizerConfig(learning_rate=0.1, warmup_fraction=0.0, final_fraction=1.0)


def run(module: Distillation, feed: DraftDataModule, callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    """Train through the whole of `feed`, as fit's trainer would."""
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "precision": "64-true", "logger": False, **options},
        max_epochs=feed.num_segments,
        accumulate_grad_batches=feed.schedule.accumulate,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=feed)
    return trainer


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def write_id_rows(file: Path, count: int = 30, vocab_size: int = 256, seed: int = 0) -> Path:
    """Rows of exact ids: prompts of 1 to 6 tokens, answers of 1 to 12."""
    draw = random.Random(seed)
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(1, 6))]
            answer = [draw.randrange(vocab_size) for _ in range(draw.randint(1, 12))]
            mask = [0] * len(prompt) + [1] * len(answer)
            out.write(json.dumps({"row": number, "input_ids": prompt + answer, "mask": mask}) + "\n")
    return file


def fit_config(folder: Path, **changes: Any) -> FitConfig:
    """Six steps on the pair and the rows that lie in `folder`, a checkpoint every second; into <folder>/run."""
    settings: dict[str, Any] = {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "output": str(folder / "run"),
        "data": DataConfig(train=[str(folder / "rows.jsonl")], max_length=32, batch_size=2, validation_fraction=0.2),
        "teacher": TeacherConfig(kind="cached", top_k=8),
        "optimizer": OptimizerConfig(accumulate=2),
        "judge": JudgeConfig(every_n_steps=2, num_prompts=2, decode=DecodeConfig(max_new_tokens=4)),
        "max_steps": 6,
        "model": ModelConfig(device="cpu", backend="eager"),
        "trainer": {"log_every_n_steps": 1, "enable_progress_bar": False},
    }
    return FitConfig(**{**settings, **changes})


def run_fit(pair: Path, output: Path, **changes: Any) -> FitReport:
    return fit(fit_config(pair, output=str(output), **changes))


JUDGED: list[str] = []


def stub_judge(speedups: list[float]) -> Any:
    """A judge whose speedups are given in the order of its calls; it notes the mode of the draft that it sees."""
    left = list(speedups)

    def judge(target: Any, draft: Any, prompts: Any, config: Any) -> Judgement:
        JUDGED.append("training" if draft.model.training else "eval")
        return Judgement(Stats(), left.pop(0), 2.0, 1.0, 0)

    return judge


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file of a folder, locks apart."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }
