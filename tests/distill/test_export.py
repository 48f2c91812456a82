"""Exported drafts: plain folders that plain transformers loads to the same model, or nothing at all."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from decode.config import DecodeConfig, ModelConfig
from decode.decoder import SpeculativeDecoder
from decode.errors import DraftsmithError, UsageError
from decode.models import LoadedModel, load_model
from distill import clean_reload, reload_check
from distill.checkpoint_files import load_draft
from distill.config import ExportConfig
from distill.draft_vocab import pin_guard_channel
from distill.export import export
from tests.draft_files import EOS, narrowed, save_target, write_checkpoint
from tests.fixtures import byte_tokenizer, random_prompt, tiny_llama, with_noise

CONFIG = ModelConfig(device="cpu", backend="eager")
VOCAB = 259
KEPT = torch.tensor([i for i in range(VOCAB) if i % 6 or i == EOS])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose own channel 0 is constant, so that a draft near it can reserve that channel."""
    model = tiny_llama(3, vocab_size=VOCAB)
    pin_guard_channel(model)
    return save_target(tmp_path_factory.mktemp("target") / "t", model)


@pytest.fixture(scope="module")
def loaded_target(target: Path) -> LoadedModel:
    return load_model(str(target), CONFIG, role="target")


@pytest.fixture(scope="module")
def trained(loaded_target: LoadedModel) -> LoadedModel:
    """A draft near the target, with most of its vocabulary."""
    model = with_noise(loaded_target.model, 0.05)
    pin_guard_channel(model)
    return narrowed(LoadedModel(model, loaded_target.tokenizer, "near"), KEPT)


@pytest.fixture(scope="module")
def run(trained: LoadedModel, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    figures = {"expected_acceptance": 0.4321, "draft_acceptance_rate": 0.321, "speedup": 1.234}
    write_checkpoint(folder, 700, trained, target, **figures)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Through a clean process, as users get it; the other tests reload in this process, which is faster."""
    output = tmp_path_factory.mktemp("out") / "exported"
    assert export(ExportConfig(draft=str(run), target=str(target), output=str(output))) == output
    return output


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reload in this process."""

    def run_here(folder: Path, request: dict[str, Any]) -> Any:
        logits, account = reload_check.reload(str(folder), request)
        return logits, json.loads(json.dumps(account))

    monkeypatch.setattr(clean_reload, "run_clean", run_here)
    yield


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
        ours.append(decoder.generate(prompt, DecodeConfig(max_new_tokens=60, num_speculative_tokens=4))[0])
        assert ours[-1].ids == assisted[0, len(prompt) :].tolist()
    rate = sum(a.stats.num_accepted_draft_tokens for a in ours) / sum(a.stats.num_draft_tokens for a in ours)
    assert 0.2 < rate < 0.99
    assert sum(accepted) / sum(drafted) == pytest.approx(rate, abs=0.01)


def test_our_decoder_takes_the_exported_folder_as_it_took_the_checkpoint(
    exported: Path, run: Path, loaded_target: LoadedModel
) -> None:
    config = DecodeConfig(max_new_tokens=40, num_speculative_tokens=4)
    rounds = []
    for path in (exported, run / "checkpoints" / "step-000700.ckpt"):
        draft = load_draft(path, loaded_target, CONFIG)
        rounds.append(SpeculativeDecoder(loaded_target, draft).generate([5, 6, 7], config)[0].rounds)
    assert rounds[0] == rounds[1]


def test_the_model_card_tells_what_was_measured_and_how_to_use_it(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for words in ("| 0.432 |", "| 1.234 |", "teacher-forced", "assistant_model=draft", "draftsmith run", "Licence"):
        assert words in card
    assert f"{len(KEPT)} of the {VOCAB} tokens" in card


def test_figures_of_eval_are_in_the_card(run: Path, target: Path, tmp_path: Path, here: None) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "eval").mkdir()
    row = {"path": str(copy / "checkpoints" / "step-000700.ckpt"), "speedup_over_transformers": 2.345}
    decode = {"sampling": {"temperature": 0.0}, "max_new_tokens": 64, "num_speculative_tokens": 3}
    report = {"settings": {"num_prompts": 5, "decode": decode}, "versions": {"threads": 2}, "drafts": [row]}
    (copy / "eval" / "metrics.json").write_text(json.dumps(report))
    output = export(ExportConfig(draft=str(copy), target=str(target), output=str(tmp_path / "out")))
    card = (output / "README.md").read_text()
    assert "5 prompts, greedy, at most 64 new tokens, 3 drafted a round, 2 CPU threads" in card
    assert "| speedup over transformers' generate | 2.345 |" in card


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_x06_weights_are_cast_once_from_fp32(
    dtype: str, run: Path, target: Path, trained: LoadedModel, tmp_path: Path, here: None, capsys: Any
) -> None:
    output = export(ExportConfig(str(run), str(target), str(tmp_path / "out"), dtype=dtype))  # type: ignore[arg-type]
    written, meant = load_file(output / "model.safetensors"), trained.model.state_dict()
    kind = getattr(torch, dtype)
    for name, value in written.items():
        value = value[KEPT] if name == "lm_head.weight" else value
        assert torch.equal(value, meant[name].to(kind)), name
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype
    assert f"weights in {dtype}: the cast moved logits by at most" in capsys.readouterr().err
    whole = AutoModelForCausalLM.from_pretrained(output)
    assert torch.isin(whole(input_ids=torch.tensor([random_prompt(30, VOCAB)])).logits.argmax(-1), KEPT).all()


def test_x01_a_tied_draft_stays_tied_and_keeps_its_own_type(target: Path, tmp_path: Path, here: None) -> None:
    tied = save_target(tmp_path / "tied", tiny_llama(1, vocab_size=VOCAB, tie_word_embeddings=True).bfloat16())
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16)
    model.save_pretrained(tied)
    output = export(ExportConfig(str(tied), str(target), str(tmp_path / "out")))
    ours, theirs = load_file(output / "model.safetensors"), load_file(tied / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = AutoModelForCausalLM.from_pretrained(output)
    assert again.config.tie_word_embeddings
    assert again.generation_config.num_assistant_tokens == 3


def test_x10_views_into_larger_tensors_are_saved_alone(
    run: Path, target: Path, exported: Path, tmp_path: Path, here: None
) -> None:
    file = Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints" / "step-000700.ckpt"
    content = torch.load(file, weights_only=True)
    for name, value in content["state_dict"].items():
        parent = torch.zeros(2, *value.shape[::-1])
        parent[1] = value.permute(*range(value.ndim)[::-1])
        content["state_dict"][name] = parent[1].permute(*range(value.ndim)[::-1])  # transposed, and half of its storage
    torch.save(content, file)
    output = export(ExportConfig(str(file), str(target), str(tmp_path / "out")))
    assert (output / "model.safetensors").stat().st_size == (exported / "model.safetensors").stat().st_size
    before, after = (load_file(p / "model.safetensors") for p in (exported, output))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_x11_nothing_asks_the_network(
    run: Path, target: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    export(ExportConfig(str(run), str(target), str(tmp_path / "out")))


def test_x12_training_settings_are_not_exported(run: Path, target: Path, tmp_path: Path, here: None) -> None:
    file = Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints" / "step-000700.ckpt"
    content = torch.load(file, weights_only=True)
    content["draft_config"]["use_cache"] = False
    torch.save(content, file)
    output = export(ExportConfig(str(file), str(target), str(tmp_path / "out"), num_assistant_tokens=7))
    assert json.loads((output / "config.json").read_text())["use_cache"] is True
    assert json.loads((output / "generation_config.json").read_text())["num_assistant_tokens"] == 7


def test_a_folder_that_does_not_give_the_logits_back_is_not_left_and_the_earlier_one_stays(
    run: Path, target: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExportConfig(str(run), str(target), str(tmp_path / "out"))
    export(config)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    run_here = clean_reload.run_clean

    def lose_a_tensor(folder: Path, request: dict[str, Any]) -> Any:
        logits, account = run_here(folder, request)
        logits[0] = logits[0] + 0.01
        return logits, account

    monkeypatch.setattr(clean_reload, "run_clean", lose_a_tensor)
    with pytest.raises(DraftsmithError, match=r"logits differ from the draft's by 0\.01"):
        export(config)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    monkeypatch.setattr(clean_reload, "run_clean", run_here)
    export(config)  # an earlier export is replaced


def test_a_clean_process_that_fails_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('first line\\nlast line')")
    monkeypatch.setattr(reload_check, "__file__", str(script))
    with pytest.raises(DraftsmithError, match="plain transformers cannot load the folder: last line") as caught:
        clean_reload.run_clean(tmp_path, {"input_ids": [[1]], "texts": [], "messages": []})
    assert "\n" not in str(caught.value)


def test_hidden_states_too_large_for_the_guard_are_refused(
    trained: LoadedModel, target: Path, tmp_path: Path, here: None
) -> None:
    model = with_noise(trained.model, 0) if trained.vocab_ids is None else LlamaForCausalLM(trained.model.config)
    draft = narrowed(LoadedModel(model.eval().requires_grad_(False), None, "large"), KEPT)
    draft.model.load_state_dict(trained.model.state_dict())
    draft.model.model.embed_tokens.weight.mul_(1e6)
    pin_guard_channel(draft.model)
    file = write_checkpoint(tmp_path / "run", 1, draft, target)
    with pytest.raises(DraftsmithError, match="tokens outside the draft's vocabulary get"):
        export(ExportConfig(str(file), str(target), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_mistakes_are_refused_before_anything_is_written(run: Path, target: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    other = save_target(tmp_path / "other", tiny_llama(0, vocab_size=VOCAB), byte_tokenizer(swap=(65, 66)))
    larger = save_target(tmp_path / "larger", tiny_llama(0, vocab_size=264))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"output": str(tmp_path / "mine")}, "`draftsmith export` did not make"),
        ({"draft": str(tmp_path / "mine")}, "no checkpoint, no run folder and no model folder"),
        ({"draft": str(tmp_path / "gone.ckpt")}, "there is no checkpoint"),
        ({"target": str(other)}, "id 65 is"),
        ({"target": str(larger)}, "vocab_size"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens: 0"),
        ({"target": str(tmp_path / "nowhere")}, "no such directory"),
    ]
    for change, words in cases:
        options = {"draft": str(run), "target": str(target), "output": str(tmp_path / "out"), **change}
        with pytest.raises(UsageError, match=words):
            export(ExportConfig(**options))
        assert not (tmp_path / "out").exists()
