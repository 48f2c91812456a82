"""The estimate of memory: exact where weights are counted, compared with a real forward where it foresees one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from distill.cli import main as cli
from distill.config import OptimizerConfig, TeacherConfig
from distill.training import dry_run as dry
from distill.training.memory import (
    SHORT_LIVED,
    STATES_PER_WEIGHT,
    empty_model,
    kept_for_backward,
    loss_bytes,
    num_weights,
    target_forward,
    weight_bytes,
)
from distill.training.optimizer import make_optimizer
from distill.training.prepare import checkpoint_layers
from tests.fit_runs import fit_config, tree
from tests.fixtures import FAMILIES, tiny_llama

ROOT = Path(__file__).parents[2]
ROWS, WIDTH = 3, 40


def kept_in_truth(model: Any) -> int:
    """Bytes that autograd keeps of a real forward of packed rows, weights apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids, positions = torch.zeros(ROWS, WIDTH, dtype=torch.int64), torch.arange(WIDTH // 2).repeat(ROWS, 2)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)[0]
        assert hidden.requires_grad
        return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_optimiser_state_are_counted_exactly(family: str) -> None:
    model = FAMILIES[family]().requires_grad_(True)
    empty = empty_model(model.config, torch.float64)
    assert num_weights(empty) == sum(p.numel() for p in model.parameters())
    assert weight_bytes(empty) == 8 * num_weights(empty)
    optimizer = make_optimizer(model, OptimizerConfig(), fused=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim > 0]
    assert sum(s.numel() * s.element_size() for s in states) == STATES_PER_WEIGHT * weight_bytes(empty)


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_foreseen_within_a_twentieth(family: str) -> None:
    model = FAMILIES[family]().requires_grad_(True).train()
    foreseen = kept_for_backward(empty_model(model.config, torch.float64), ROWS, WIDTH, "64-true")
    # what differs is the mask: a real batch keeps it as bits, or several of its kind
    assert foreseen == pytest.approx(kept_in_truth(model), rel=0.05)


def test_checkpointed_layers_keep_less_and_autocast_too() -> None:
    empty = empty_model(tiny_llama(layers=6).config, torch.float32)
    plain = kept_for_backward(empty, ROWS, WIDTH, "32-true")
    assert kept_for_backward(empty, ROWS, WIDTH, "bf16-mixed") < 0.9 * plain
    checkpoint_layers(empty)
    assert kept_for_backward(empty, ROWS, WIDTH, "32-true") < 0.35 * plain
    assert empty.is_activation_checkpointing  # the caller's model is as it was


def test_sizes_follow_quantisation_widths_and_caps() -> None:
    empty = empty_model(tiny_llama().config, torch.float32)
    assert 0.2 < weight_bytes(empty, "int8") / weight_bytes(empty) < 0.6
    assert weight_bytes(empty, "bnb-4bit") < weight_bytes(empty, "int8")
    assert target_forward(empty, 4, WIDTH) == 4 * target_forward(empty, 1, WIDTH)
    chunked = loss_bytes(empty, 48, positions=10**7)
    empty.config.final_logit_softcapping = 30.0
    assert loss_bytes(empty, 48, positions=10**7) > 5 * chunked


def test_a_dry_run_tells_both_and_writes_nothing(fit_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(fit_pair)
    words = f"--target {fit_pair}/target --draft {fit_pair}/draft --output {fit_pair}/never --max_steps 3"
    words += f" --data.train {fit_pair}/rows.jsonl --model.device cpu --data.max_length 32 --dry-run"
    assert cli.main(["fit", *words.split()]) == 0
    told = capsys.readouterr().out
    for line in ("examples", "run: 3 steps", "target ", "gradients", "optimiser state", "activations", "in all"):
        assert line in told, told
    assert tree(fit_pair) == before
    assert cli.main(["fit", *words.split(), "--trainer.strategy", "x"]) == 2


def test_what_processes_share_is_divided(fit_pair: Path) -> None:
    def needs(**changes: Any) -> dict[str, int]:
        config = fit_config(fit_pair, dry_run=True, teacher=TeacherConfig(kind="online"), **changes)
        found: dict[str, int] = {}

        def keep(config: Any, needs: Any, *_: Any) -> list[str]:
            found.update({need.name.partition(",")[0]: need.num_bytes for need in needs})
            return []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dry, "_told", keep)
            dry.dry_run(config)
        return found

    one, shared = needs(), needs(trainer={"devices": 2, "strategy": "fsdp2"})
    for name in ("draft", "gradients", "optimiser state"):
        assert shared[name] == one[name] // 2
    assert shared["target"] == one["target"]
    assert shared["draft's activations"] < one["draft's activations"]


MEASURE = """
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
from distill.training.memory import empty_model, kept_for_backward

config = LlamaConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, vocab_size=99)
model = LlamaForCausalLM(config).train()
ids = torch.zeros(8, 512, dtype=torch.int64)
model.get_decoder()(input_ids=ids[:1, :8], use_cache=False)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
hidden = model.get_decoder()(input_ids=ids, use_cache=False)[0]
measured = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(measured, kept_for_backward(empty_model(config, torch.float32), 8, 512, "32-true"))
"""


@pytest.mark.slow
def test_a_process_grows_by_activations_and_up_to_half_as_much() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, cwd=ROOT, check=True)
    measured, foreseen = map(int, done.stdout.split())
    assert measured > 5e8
    assert 0.95 * foreseen < measured < (1 + SHORT_LIVED) * foreseen
