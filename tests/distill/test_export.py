"""Exported drafts as other programs see them: plain folders, loaded by plain transformers."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from decode.config import DecodeConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import UsageError
from decode.models import LoadedModel
from distill.drafts.load import load_draft
from distill.export import clean_reload
from distill.export.config import ExportConfig
from distill.export.evaluation import find_evaluation
from distill.export.export import export
from distill.export.model_card import measured_lines
from tests.distill.export_fixtures import CONFIG, KEPT, VOCAB, exported, here, loaded_target, run, target, trained
from tests.draft_files import EOS
from tests.fixtures import random_prompt

__all__ = ["exported", "here", "loaded_target", "run", "target", "trained"]


def test_x08_the_folder_has_all_that_engines_read_and_nothing_of_the_trainer(exported: Path, target: Path) -> None:
    names = {p.name for p in exported.iterdir()}
    assert names == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "draft_vocab.json",
        "draftsmith.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["vocab_size"], config["use_cache"]) == (VOCAB, True)
    assert config.keys() <= LlamaConfig().to_dict().keys() | {"architectures", "dtype", "transformers_version"}
    ours, theirs = AutoTokenizer.from_pretrained(exported), AutoTokenizer.from_pretrained(target)
    for text in clean_reload.TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    chat = [clean_reload.MESSAGES] * 2
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_generation_config_says_how_many_tokens_to_draft(exported: Path) -> None:
    settings = AutoModelForCausalLM.from_pretrained(exported).generation_config
    assert (settings.num_assistant_tokens, settings.num_assistant_tokens_schedule) == (4, "constant")
    assert settings.assistant_confidence_threshold == 0
    assert settings.eos_token_id == EOS


def test_exported_logits_are_those_of_the_draft_in_memory(exported: Path, trained: LoadedModel) -> None:
    ids = torch.tensor([random_prompt(20, VOCAB)])
    whole = AutoModelForCausalLM.from_pretrained(exported)(input_ids=ids).logits
    torch.testing.assert_close(whole[..., KEPT], trained.model(input_ids=ids).logits)
    law = torch.zeros_like(whole)
    law[..., KEPT] = trained.model(input_ids=ids).logits.softmax(-1)
    torch.testing.assert_close(whole.softmax(-1), law, rtol=0, atol=1e-6)


def test_x09_tensor_names_are_those_of_the_base_class(exported: Path) -> None:
    config = AutoConfig.from_pretrained(exported)
    assert load_file(exported / "model.safetensors").keys() == LlamaForCausalLM(config).state_dict().keys()


def test_exported_draft_assists_plain_transformers_with_the_targets_own_output(
    exported: Path, target: Path, loaded_target: LoadedModel, trained: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output equals the target's greedy output; the acceptance is that of our decoder, within a point."""
    big, small = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (target, exported))
    drafted, accepted = [], []
    own = AssistedCandidateGenerator.update_candidate_strategy

    def count(self: Any, input_ids: Any, scores: Any, num_matches: int) -> None:
        drafted.append(scores.shape[1] - 1)
        accepted.append(int(num_matches))
        own(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", count)
    decoder = SpeculativeDecoder(loaded_target, trained)
    ours = []
    for seed in range(6):
        prompt = random_prompt(5 + seed, VOCAB, seed)
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 60, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assisted = big.generate(ids, assistant_model=small, **options)
        assert torch.equal(assisted, big.generate(ids, **options))
        ours.append(decoder.generate(prompt, DecodeConfig(60, 4, "fixed"))[0])
        assert ours[-1].ids == assisted[0, len(prompt) :].tolist()
    rate = sum(a.stats.num_accepted_draft_tokens for a in ours) / sum(a.stats.num_draft_tokens for a in ours)
    assert 0.2 < rate < 0.99
    assert sum(accepted) / sum(drafted) == pytest.approx(rate, abs=0.01)


def test_our_decoder_takes_the_exported_folder_as_it_took_the_checkpoint(
    exported: Path, run: Path, loaded_target: LoadedModel
) -> None:
    config = DecodeConfig(40, 4, "fixed")
    rounds = []
    for path in (exported, run / "checkpoints" / "step-000700.ckpt"):
        draft = load_draft(path, loaded_target, CONFIG)
        answer = SpeculativeDecoder(loaded_target, draft).generate([5, 6, 7], config, trace=True)[0]
        rounds.append([(done.drafted, done.emitted) for done in answer.rounds])
    assert rounds[0] == rounds[1] != []


def test_the_model_card_tells_what_was_measured_and_how_to_use_it(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for words in ("| 0.432 |", "| 1.234 |", "teacher-forced", "assistant_model=draft", "--target TARGET", "Licence"):
        assert words in card
    assert f"{len(KEPT)} of the {VOCAB} tokens" in card


def write_report(folder: Path, draft: str, speedup: float) -> None:
    """metrics.json as eval writes it, with one row."""
    folder.mkdir(parents=True, exist_ok=True)
    decode = {"sampling": {"temperature": 0.0}, "max_new_tokens": 64, "num_speculative_tokens": 3}
    row = {"path": draft, "speedup_over_transformers": speedup}
    report = {"settings": {"num_prompts": 5, "decode": decode}, "versions": {"threads": 2}, "drafts": [row]}
    (folder / "metrics.json").write_text(json.dumps(report))


CHECKPOINT = "checkpoints/step-000700.ckpt"


@pytest.mark.parametrize("place", ["runs/quickstart/eval", "runs/quickstart/fit/eval"])
def test_figures_of_eval_are_in_the_card_in_the_layout_of_the_quick_start(
    place: str, run: Path, target: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "runs/quickstart/fit")
    write_report(Path(place), f"runs/quickstart/fit/{CHECKPOINT}", 2.345)
    write_report(Path("runs/quickstart/other"), f"runs/other/fit/{CHECKPOINT}", 9.876)
    export(ExportConfig("runs/quickstart/fit", str(target), "runs/quickstart/draft"))
    card = Path("runs/quickstart/draft/README.md").read_text()
    assert "5 prompts, greedy, at most 64 new tokens, 3 drafted a round, 2 CPU threads" in card
    assert "| speedup over transformers' generate | 2.345 |" in card


def test_the_newest_evaluation_that_measured_this_draft_is_taken_wherever_it_was_called(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "work" / "run"))
    draft = copy / CHECKPOINT
    for age, (name, path) in enumerate({"new": f"run/{CHECKPOINT}", "old": str(draft), "stale": str(draft)}.items()):
        write_report(tmp_path / "work" / name, path, float(age))
        when = draft.stat().st_mtime + 150 - 100 * age
        os.utime(tmp_path / "work" / name / "metrics.json", (when, when))
    monkeypatch.chdir(tmp_path)
    for speedup, name in enumerate(("new", "old")):
        found = find_evaluation(draft, None)
        assert found is not None and found["speedup_over_transformers"] == speedup
        shutil.rmtree(tmp_path / "work" / name)
    assert find_evaluation(draft, None) is None  # what is older than the draft measured another


def test_a_named_evaluation_is_taken_or_refused(run: Path, target: Path, tmp_path: Path) -> None:
    draft = run / CHECKPOINT
    write_report(tmp_path / "mine", str(draft), 1.5)
    found = find_evaluation(draft, str(tmp_path / "mine"))
    assert found is not None and found["speedup_over_transformers"] == 1.5
    write_report(tmp_path / "other", "other.ckpt", 1.5)
    for name, words in (("other", "has no row of"), ("gone", "holds no metrics.json")):
        config = ExportConfig(str(run), str(target), str(tmp_path / "out"), evaluation=str(tmp_path / name))
        with pytest.raises(UsageError, match=f"evaluation: .*{words}"):
            export(config)
        assert not (tmp_path / "out").exists()


def test_acceptance_in_the_card_keeps_its_bounds_and_its_temperature() -> None:
    metrics = {"val/expected_acceptance": 0.4, "val/expected_acceptance_upper": 0.45, "val/greedy_acceptance": 0.5}
    card = "\n".join(measured_lines(metrics, 0.7, None))
    assert "(teacher-forced), at temperature 0.7, a lower bound where the teacher is cached | 0.400 to 0.450 |" in card
    assert "where the teacher is cached | 0.500 |" in card
