"""Making untrained drafts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

from decode.config import ModelConfig
from decode.errors import DraftsmithError, UsageError
from decode.models import LoadedModel, load_model
from distill.drafts.load import load_draft
from distill.drafts.shapes import Shape
from tests.draft_files import EOS, make_draft, save_target, write_rows
from tests.fixtures import byte_tokenizer, tiny_gpt2, tiny_llama

CONFIG = ModelConfig(device="cpu", backend="eager")


def test_a_draft_has_the_targets_tokenizer_vocabulary_context_and_rotary_base(target: Path, draft: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(draft), AutoTokenizer.from_pretrained(draft)
    theirs = AutoTokenizer.from_pretrained(target)
    assert model.config.model_type == "llama"
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (len(theirs), 256)
    assert model.config.rope_parameters["rope_theta"] == 5e4
    assert not model.config.tie_word_embeddings
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert tokenizer.chat_template == theirs.chat_template
    assert model.generation_config.eos_token_id == EOS
    assert (model.dtype, model.config.hidden_size, model.config.num_hidden_layers) == (torch.float32, 32, 2)


def test_several_end_tokens_of_the_target_are_kept(tmp_path: Path) -> None:
    target = save_target(tmp_path / "t", eos_token_id=[0, EOS], temperature=0.5, do_sample=False)
    loaded = load_model(str(make_draft(target, tmp_path / "d")), CONFIG, role="draft")
    assert loaded.eos_token_ids == {0, EOS}


def test_projected_embeddings_are_the_targets_with_equal_variances(target: Path, draft: Path, tmp_path: Path) -> None:
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"].double()
    ours = load_file(draft / "model.safetensors")["model.embed_tokens.weight"].double()
    centred = theirs - theirs.mean(dim=0)
    fitted = centred @ torch.linalg.lstsq(centred, ours).solution
    assert torch.allclose(fitted, ours, atol=1e-4)  # as wide as the target: a linear map of it, nothing lost
    assert torch.allclose(ours.T.cov(), torch.eye(32, dtype=torch.float64), atol=1e-4)
    random = load_file(make_draft(target, tmp_path / "r", embeddings="random") / "model.safetensors")
    assert not torch.equal(random["model.embed_tokens.weight"].double(), ours)


def test_a_draft_wider_than_the_target_is_filled_up(target: Path, tmp_path: Path) -> None:
    ours = load_file(make_draft(target, tmp_path / "d", hidden_size=64) / "model.safetensors")
    assert (ours["model.embed_tokens.weight"].std(dim=0) > 0.1).all()


def test_the_same_seed_gives_the_same_draft_and_leaves_random_state_alone(target: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first, second = (load_file(make_draft(target, tmp_path / n) / "model.safetensors") for n in "ab")
    other = load_file(make_draft(target, tmp_path / "c", seed=1) / "model.safetensors")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], other["model.layers.0.mlp.up_proj.weight"])


def test_quickstart_may_run_twice_and_other_folders_are_never_replaced(
    target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (draft / "model.safetensors").stat().st_mtime_ns
    assert make_draft(target, draft) == draft
    assert "there already" in capsys.readouterr().err
    assert (draft / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match="made with seed 0, not 3"):
        make_draft(target, draft, seed=3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds files that `draftsmith init` did not make"):
        make_draft(target, tmp_path / "notes")
    with pytest.raises(UsageError, match="is a file"):
        make_draft(target, tmp_path / "notes" / "mine.txt")


def test_changed_data_is_not_taken_for_the_same(target: Path, reduced: Path, rows: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reduced, tmp_path / "copy"))
    other = write_rows(tmp_path / "rows.jsonl", byte_tokenizer(), ["Quite another text."])
    record = json.loads((folder / "draftsmith.json").read_text())
    record["settings"]["data"] = [str(other)]
    (folder / "draftsmith.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match="other contents of data"):
        make_draft(target, folder, draft_vocab_size=20, data=[str(other)])


def test_nothing_is_left_when_saving_fails(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        make_draft(target, tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_run_are_removed(target: Path, tmp_path: Path) -> None:
    dead = 2**22 + 1  # beyond the largest process id
    (tmp_path / f".d.{dead}.tmp").mkdir()
    (tmp_path / f".other.{dead}.tmp").mkdir()
    make_draft(target, tmp_path / "d")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".other.{dead}.tmp", "d"]


def test_weights_can_be_read_by_other_users(draft: Path) -> None:
    assert (draft / "model.safetensors").stat().st_mode == (draft / "config.json").stat().st_mode


def test_a_reduced_draft_is_a_plain_folder_and_loads_narrow(reduced: Path, loaded_target: LoadedModel) -> None:
    plain, narrow = AutoModelForCausalLM.from_pretrained(reduced), load_draft(reduced, loaded_target, CONFIG)
    assert narrow.vocab_ids is not None
    assert len(narrow.vocab_ids) == 20
    assert EOS in narrow.vocab_ids
    ids = torch.tensor([[1, 70, 200, 258]])
    whole, part = plain(input_ids=ids).logits, narrow.model(input_ids=ids).logits
    torch.testing.assert_close(whole[..., narrow.vocab_ids], part)
    assert torch.isin(whole.argmax(-1), narrow.vocab_ids).all()


def test_more_draft_tokens_than_real_ones_are_refused(rows: Path, tmp_path: Path) -> None:
    padded = save_target(tmp_path / "t", tiny_llama(vocab_size=272))
    with pytest.raises(UsageError, match=r"draft_vocab_size: 265 .*at most 259, the real tokens"):
        make_draft(padded, tmp_path / "d", draft_vocab_size=265, data=[str(rows)])


def test_a_tokenizer_without_chat_template_and_learned_positions_work(tmp_path: Path) -> None:
    target = save_target(tmp_path / "t", tiny_gpt2(vocab_size=259), byte_tokenizer(chat_template=None))
    model = AutoModelForCausalLM.from_pretrained(make_draft(target, tmp_path / "d"))
    assert (model.config.max_position_embeddings, model.config.rope_parameters["rope_theta"]) == (128, 10_000)


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    T5Config(vocab_size=259).save_pretrained(tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    with pytest.raises(UsageError, match="t5 is an encoder-decoder"):
        make_draft(tmp_path / "t5", tmp_path / "d")


def test_cost_ratio_measures_and_takes_the_largest_shape_within(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {64: 0.1, 96: 0.2, 128: 0.15, 192: 0.4, 256: 0.5}
    sizes: list[int] = []

    def seconds(loaded: LoadedModel) -> float:
        size = loaded.model.config.hidden_size
        sizes.append(size)
        return costs.get(size, 1.0)

    monkeypatch.setattr("distill.drafts.fit_cost.step_seconds", seconds)
    folder = make_draft(target, tmp_path / "d", hidden_size=None, fit_cost_ratio=0.2, num_layers=1)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 128
    assert sizes == [32, 64, 96, 128, 192, 256]
    assert "costs 0.150 of it" in capsys.readouterr().err


def test_step_seconds_goes_through_a_session(loaded_target: LoadedModel) -> None:
    from distill.drafts.step_cost import step_seconds

    assert step_seconds(loaded_target) > 0


def test_num_parameters_counts_what_the_model_has(target: Path, draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    body = sum(t.numel() for name, t in tensors.items() if "embed" not in name and "lm_head" not in name)
    assert Shape(32, 2).num_parameters == body


def test_a_target_of_nan_weights_makes_no_draft(tmp_path: Path) -> None:
    model = tiny_llama(0, vocab_size=259)
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] = float("nan")
    target = save_target(tmp_path / "t", model)
    with pytest.raises(DraftsmithError, match="target: its logits are NaN or infinite"):
        make_draft(target, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_an_output_that_cannot_be_made_is_refused_before_the_target_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=r"output: .*file is no folder"):
        make_draft(Path("no/such/target"), tmp_path / "file" / "d")


def test_a_record_of_another_shape_is_no_draft_of_these_settings(target: Path, tmp_path: Path) -> None:
    folder = make_draft(target, tmp_path / "d")
    (folder / "draftsmith.json").write_text('{"made_by": "draftsmith init", "settings": [1]}')
    with pytest.raises(UsageError, match="holds a draft made with target None"):
        make_draft(target, folder)
