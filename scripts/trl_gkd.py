#!/usr/bin/env python
"""TRL's side of train_throughput.py: GKDTrainer on given batches of its data set, in an environment that has trl.

Reads a JSON file with target, draft, batches (examples of input_ids and mask) and prints the seconds of each step.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.gkd import GKDConfig, GKDTrainer


class StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right, as the trainer's own collator gives them."""
    width = max(len(row["ids"]) for row in rows)
    ids = [row["ids"] + [0] * (width - len(row["ids"])) for row in rows]
    seen = [[1] * len(row["ids"]) + [0] * (width - len(row["ids"])) for row in rows]
    labels = [
        [token if bit else -100 for token, bit in zip(row["ids"], row["mask"], strict=True)]
        + [-100] * (width - len(row["ids"]))
        for row in rows
    ]
    named = {"input_ids": ids, "attention_mask": seen, "labels": labels, "prompts": ids, "prompt_attention_mask": seen}
    return {name: torch.tensor(values) for name, values in named.items()}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rows = [{"ids": ids, "mask": mask} for batch in spec["batches"] for ids, mask in batch]
    size, clock = len(spec["batches"][0]), StepClock()
    with tempfile.TemporaryDirectory() as folder:
        args = GKDConfig(
            folder,
            lmbda=0.0,  # the data's own text, nothing generated
            beta=0.0,  # forward KL
            temperature=1.0,
            per_device_train_batch_size=size,
            max_steps=len(spec["batches"]),
            learning_rate=4e-3,
            gradient_checkpointing=False,
            bf16=spec["bf16"],
            use_cpu=spec["use_cpu"],
            report_to=[],
            save_strategy="no",
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
            disable_tqdm=True,
        )
        load = {"dtype": torch.float32}
        trainer = GKDTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["draft"], **load),
            teacher_model=AutoModelForCausalLM.from_pretrained(spec["target"], **load),
            args=args,
            data_collator=collate,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(spec["target"]),
            callbacks=[clock],
        )
        trainer.train()
    print("marks " + json.dumps(clock.marks))


if __name__ == "__main__":
    main()
