"""What fit refuses, by name and before the costly work: changed settings, wrong options, unfit data."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig
from decode.draft_vocab import DRAFT_VOCAB_FILE
from decode.errors import UsageError
from distill.config import DataConfig, JudgeConfig, LossConfig, OptimizerConfig, TeacherConfig
from distill.runs import plain
from distill.training.resume import Record, Standing, refuse_changes
from distill.training.trainer_options import PASSED_ON
from tests.draft_files import save_target
from tests.fit_runs import fit_config, run_fit, tree, write_id_rows
from tests.fixtures import byte_tokenizer, tiny_gpt2, tiny_llama

CHANGES: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 12},
    "data.batch_size": {"data": {"batch_size": 3}},
    "data.max_length": {"data": {"max_length": 31}},
    "optimizer.accumulate": {"optimizer": OptimizerConfig(accumulate=1)},
    "optimizer.learning_rate": {"optimizer": OptimizerConfig(accumulate=2, learning_rate=1e-3)},
    "loss.temperature": {"loss": LossConfig(temperature=2.0)},
    "teacher.kind": {"teacher": TeacherConfig(kind="online")},
    "teacher.top_k": {"teacher": TeacherConfig(kind="cached", top_k=4)},
    "judge.every_n_steps": {
        "judge": JudgeConfig(every_n_steps=3, num_prompts=2, decode=DecodeConfig(max_new_tokens=4))
    },
    "target": {"target": "elsewhere"},
    "draft": {"draft": "elsewhere"},
    "seed": {"seed": 1},
    "trainer.precision": {"trainer": {"log_every_n_steps": 1, "enable_progress_bar": False, "precision": "64-true"}},
}


@pytest.mark.parametrize("key", CHANGES)
def test_r13_a_changed_setting_is_refused_by_name(key: str, finished_run: Path, fit_pair: Path) -> None:
    changes = dict(CHANGES[key])
    if isinstance(changes.get("data"), dict):
        changes["data"] = replace(fit_config(fit_pair).data, **changes["data"])
    before = tree(finished_run)
    with pytest.raises(UsageError) as caught:
        run_fit(fit_pair, finished_run, **changes)
    message = str(caught.value)
    assert message.startswith(f"{key}: ") and " before, " in message and "\n" not in message
    assert tree(finished_run) == before


@pytest.mark.usefixtures("stub_judging")
def test_r13_free_settings_are_honoured_with_a_notice_and_changed_rows_refused(
    fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes((fit_pair / "rows.jsonl").read_bytes())
    data = DataConfig(train=[str(rows)], max_length=32, batch_size=2, validation_fraction=0.2)
    run_fit(fit_pair, tmp_path / "run", data=data, max_steps=4)
    (tmp_path / "run" / "checkpoints" / "step-000004.ckpt").unlink()
    quiet = {"log_every_n_steps": 2, "enable_progress_bar": False}
    report = run_fit(fit_pair, tmp_path / "run", data=data, max_steps=4, trainer=quiet)
    assert report.resumed_from == 2 and report.complete
    assert "trainer.log_every_n_steps: continues with 2, was 1" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoints" / "step-000004.ckpt").unlink()
    write_id_rows(rows, seed=9)
    with pytest.raises(UsageError, match=r"data.train.*changed since the run's checkpoint step-000002.ckpt"):
        run_fit(fit_pair, tmp_path / "run", data=data, max_steps=4)


@pytest.mark.parametrize("before, now", [({"seconds": 0}, None), ("00:01:00:00", {"hours": 1}), ({"days": 1}, "0")])
def test_r13_the_time_of_a_start_may_change_in_whatever_form_it_is_given(before: Any, now: Any, tmp_path: Path) -> None:
    configs = [fit_config(tmp_path, trainer={"max_time": value}) for value in (before, now)]
    said: list[str] = []
    refuse_changes(Standing(tmp_path, 2, Record(plain(configs[0]), 6, ""), []), configs[1], said.append)
    assert said and all(line.startswith("trainer.max_time") and ": continues with " in line for line in said)


def copy_pair(pair: Path, folder: Path) -> Path:
    return Path(shutil.copytree(pair, folder))


def replace_target(pair: Path, prompts: Path) -> None:
    save_target(pair / "target", tiny_llama(9, vocab_size=len(byte_tokenizer())))


def replace_draft_vocab(pair: Path, prompts: Path) -> None:
    file = pair / "draft" / DRAFT_VOCAB_FILE
    content = json.loads(file.read_text())
    unused = next(i for i in range(256) if i not in content["vocab_ids"])
    content["vocab_ids"] = sorted([unused, *content["vocab_ids"][1:]])
    file.write_text(json.dumps(content))


def replace_prompts(pair: Path, prompts: Path) -> None:
    write_id_prompts(prompts, "another")


def write_id_prompts(file: Path, text: str) -> None:
    file.write_text("".join(json.dumps({"prompt": f"{text} {i}"}) + "\n" for i in range(3)))


@pytest.mark.usefixtures("stub_judging")
@pytest.mark.parametrize("kind", ["online", "cached"])
@pytest.mark.parametrize(
    "change, told",
    [
        (replace_target, "target: its weights have changed"),
        (replace_draft_vocab, "draft: its draft_vocab.json has changed"),
        (replace_prompts, "judge.prompts: the prompts have changed"),
    ],
)
def test_r13_files_replaced_under_their_names_are_refused(
    change: Callable[[Path, Path], None], told: str, kind: Any, fit_pair: Path, tmp_path: Path
) -> None:
    pair, prompts = copy_pair(fit_pair, tmp_path / "pair"), tmp_path / "prompts.jsonl"
    write_id_prompts(prompts, "a prompt")
    settings = {
        "judge": JudgeConfig(every_n_steps=1, prompts=str(prompts), num_prompts=2),
        "teacher": TeacherConfig(kind=kind),
        "max_steps": 2,
    }
    run_fit(pair, tmp_path / "run", **settings)
    (tmp_path / "run" / "checkpoints" / "step-000002.ckpt").unlink()
    change(pair, prompts)
    before = tree(tmp_path / "run")
    with pytest.raises(UsageError, match=f"^{told} since the run's checkpoint step-000001.ckpt"):
        run_fit(pair, tmp_path / "run", **settings)
    assert tree(tmp_path / "run") == before


@pytest.mark.usefixtures("stub_judging")
def test_a_checkpoint_without_fingerprints_is_continued(fit_pair: Path, tmp_path: Path) -> None:
    run_fit(fit_pair, tmp_path / "run", max_steps=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-000004.ckpt").unlink()
    older = torch.load(checkpoints / "step-000002.ckpt", weights_only=True)
    for name in ("target_sha256", "draft_vocab_sha256", "judge_prompts_sha256"):
        del older[name]
    torch.save(older, checkpoints / "step-000002.ckpt")
    assert run_fit(fit_pair, tmp_path / "run", max_steps=4).resumed_from == 2


@pytest.mark.parametrize("name, value", [("top_k", 4), ("cache_dir", "elsewhere"), ("batch_size", 2)])
def test_settings_of_a_cache_are_refused_where_there_is_none(
    name: str, value: Any, fit_pair: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"^teacher.{name}: .*{value}.* no effect with teacher.kind online"):
        run_fit(fit_pair, tmp_path / "run", teacher=TeacherConfig(**{name: value}))
    assert not (tmp_path / "run").exists()


def test_t23_a_draft_with_another_number_of_ids_is_refused_with_both_sizes(fit_pair: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    save_target(tmp_path / "draft", tiny_llama(1, vocab_size=size + 5), tokenizer)
    with pytest.raises(UsageError, match=rf"vocab_size {size + 5}, target .* {size}; they must be equal"):
        run_fit(fit_pair, tmp_path / "run", draft=str(tmp_path / "draft"))


MISTAKES = {
    "devicess": ("trainer.devicess: unknown", "did you mean trainer.devices?"),
    "accumulate_grad_batchs": ("trainer.accumulate_grad_batchs: unknown", "did you mean optimizer.accumulate?"),
    "max_epochs": ("trainer.max_epochs: set max_epochs instead",),
    "gradient_clip_val": ("set optimizer.gradient_clip instead",),
    "callbacks": ("trainer.callbacks: is fixed",),
    "strategy": ("trainer.strategy: 'x'", "ddp"),
    "logger": ("trainer.logger: 'x'", "tensorboard"),
    "precision": ("trainer.precision: 'x'", "bf16-mixed"),
    "log_every_n_steps": ("trainer.log_every_n_steps: 'x'",),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_b01_a_wrong_trainer_option_is_refused_by_name(name: str, fit_pair: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run_fit(fit_pair, tmp_path / "run", trainer={name: "x"}, teacher=TeacherConfig())
    assert all(part in str(caught.value) for part in MISTAKES[name])
    assert "\n" not in str(caught.value)


def test_every_option_of_the_trainer_is_passed_on_or_refused_by_name() -> None:
    import inspect

    from lightning import Trainer

    from distill.training.trainer_options import FIXED, OUR_KEYS

    assert {*PASSED_ON, *FIXED, *OUR_KEYS} == set(inspect.signature(Trainer.__init__).parameters) - {"self"}


def test_examples_beyond_the_drafts_positions_are_refused_before_training(fit_pair: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    save_target(tmp_path / "draft", tiny_gpt2(vocab_size=len(tokenizer), positions=8), tokenizer)
    with pytest.raises(UsageError, match=r"data.max_length: .*rows.jsonl:\d+ has \d+ tokens, the draft .* takes 8"):
        run_fit(fit_pair, tmp_path / "run", draft=str(tmp_path / "draft"))


def test_judge_has_no_prompt_is_refused(fit_pair: Path, tmp_path: Path) -> None:
    rows = tmp_path / "promptless.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [i, i + 1], "mask": [1, 1]}) + "\n" for i in range(9)))
    data = DataConfig(train=[str(fit_pair / "rows.jsonl")], validation=[str(rows)], max_length=32, batch_size=2)
    with pytest.raises(UsageError, match=r"judge.prompts: the validation rows have no prompt"):
        run_fit(fit_pair, tmp_path / "run", data=data)
