"""The eval command, end to end on a tiny run: one table for a whole training and an export."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.errors import UsageError
from decode.models import LoadedModel, load_model
from distill.drafts.load import load_draft
from distill.results.candidates import find_candidates
from distill.results.config import EvalConfig
from distill.results.evaluate import busy_share, evaluate
from distill.results.report import EvalReport
from distill.training.history import metrics_table
from tests.draft_files import make_draft, save_target, write_checkpoint
from tests.fixtures import tiny_llama, with_noise

CONFIG = ModelConfig(device="cpu", backend="eager")
DECODE = DecodeConfig(max_new_tokens=12, draft_length="fixed", num_speculative_tokens=3)
VOCAB = 259


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, an untrained draft, a run with two checkpoints (the later one is the target itself), prompts."""
    home = tmp_path_factory.mktemp("home")
    target = save_target(home / "target", tiny_llama(4, vocab_size=VOCAB))
    loaded = load_model(str(target), CONFIG, role="target")
    origin = make_draft(target, home / "untrained")
    near = LoadedModel(with_noise(loaded.model, 0.05), None, "near")
    write_checkpoint(home / "run", 50, near, origin, expected_acceptance=0.4, greedy_acceptance=0.5)
    write_checkpoint(home / "run", 100, loaded, origin, expected_acceptance=1.0, greedy_acceptance=0.9)
    table = metrics_table(home / "run")
    table.append({"step": 0, "tokens_seen": 0, "val/expected_acceptance": 0.001, "val/greedy_acceptance": 0.002})
    table.append({"step": 50, "tokens_seen": 4_000, "val/expected_acceptance": 0.4, "val/greedy_acceptance": 0.5})
    prompts = [json.dumps({"prompt": text}) for text in ("One.", "Another one.", "A third.")]
    (home / "prompts.jsonl").write_text("\n".join(prompts))
    return home


@pytest.fixture(scope="module")
def report(home: Path) -> EvalReport:
    return evaluate(config_of(home, home / "eval"))


def config_of(home: Path, output: Path, **changes: object) -> EvalConfig:
    options = {"drafts": [str(home / "run")], "num_prompts": 2, "decode": DECODE, "model": CONFIG, **changes}
    return EvalConfig(str(home / "target"), prompts=str(home / "prompts.jsonl"), output=str(output), **options)  # type: ignore[arg-type]


def test_every_checkpoint_has_a_row_and_the_untrained_draft_is_the_first(report: EvalReport) -> None:
    rows = report.drafts
    assert [row["name"] for row in rows] == ["untrained", "50", "100"]
    assert [row["tokens_seen"] for row in rows] == [0, 4_000, None]
    assert [row["expected_acceptance"] for row in rows] == [0.001, 0.4, 1.0]
    assert rows[0]["draft_acceptance_rate"] < 0.1
    assert rows[2]["draft_acceptance_rate"] == 1  # the target drafts for itself
    assert all(row["mismatches"] == 0 for row in rows)


def test_counts_add_up(report: EvalReport) -> None:
    plain = report.baselines[0]
    for row in report.drafts:
        assert row["total_tokens"] == plain["total_tokens"] == row["num_output_tokens"]
        assert sum(row["acceptance_histogram"]) == row["num_spec_steps"]
        assert row["num_accepted_draft_tokens"] == sum(k * n for k, n in enumerate(row["acceptance_histogram"]))
        assert row["speedup_over_plain"] == pytest.approx(plain["total_seconds"] / row["total_seconds"])
        assert row["speedup_over_transformers"] == pytest.approx(
            row["tokens_per_second"] / report.baselines[1]["tokens_per_second"]
        )


def test_files_hold_what_the_report_says(report: EvalReport, home: Path) -> None:
    output = home / "eval"
    found = json.loads((output / "metrics.json").read_text())
    assert found["drafts"] == report.drafts
    assert found["baselines"] == report.baselines
    assert found["settings"]["decode"]["max_new_tokens"] == 12
    assert found["versions"]["transformers"]
    with (output / "perf_results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 2  # methods times prompts
    assert {(r["prompt"], r["prompt_tokens"]) for r in rows} == {("0", "23"), ("1", "31")}
    assert sum(int(r["tokens"]) for r in rows if r["method"] == "plain decoding") == report.baselines[0]["total_tokens"]
    with (output / "acceptance.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = [float(r["rate"]) for r in rows if r["step"] == "100"]
    assert last == report.drafts[2]["per_position_acceptance_rate"]
    assert [int(r["position"]) for r in rows if r["step"] == "100"] == [1, 2, 3]
    for name in ("acceptance_over_training.png", "acceptance_by_position.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    assert {"config.yaml", "versions.json", "command.txt"} <= {p.name for p in output.iterdir()}


def test_e06_both_baselines_decode_the_same_tokens(report: EvalReport) -> None:
    plain, transformers = report.baselines
    assert (plain["name"], transformers["name"]) == ("plain decoding", "transformers' generate")
    assert plain["total_tokens"] == transformers["total_tokens"] == 24
    assert transformers["mismatches"] == 0


def test_the_table_is_printed_with_names_that_tell_the_acceptances_apart(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(config_of(home, tmp_path / "out", num_prompts=1))
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "untrained",
        " 4000 ",
        "¹ teacher-forced",
        "lower bound where the teacher is cached; the columns to its right come from decoding",
        "×",
        "greedy, at most 12 new tokens",
    ):
        assert words in printed
    assert "warning: untrained: 0.0% of the drafted tokens are accepted" in printed


def test_e04_plain_decoding_only_gives_null_rates_and_valid_json(home: Path, tmp_path: Path) -> None:
    decode = replace(DECODE, num_speculative_tokens=0)
    report = evaluate(config_of(home, tmp_path / "out", drafts=[str(home / "untrained")], decode=decode))
    (row,) = report.drafts
    assert (row["num_draft_tokens"], row["draft_acceptance_rate"]) == (0, None)
    assert row["per_position_acceptance_rate"] == []
    assert row["speedup_over_plain"] > 0
    assert "NaN" not in (tmp_path / "out" / "metrics.json").read_text()
    assert (tmp_path / "out" / "acceptance.csv").read_text() == "draft,step,position,rate\n"
    assert not (tmp_path / "out" / "acceptance_by_position.png").exists()


def test_sampling_compares_no_texts(home: Path, tmp_path: Path) -> None:
    decode = replace(DECODE, sampling=SamplingConfig(temperature=1.0), seed=3)
    report = evaluate(config_of(home, tmp_path / "out", drafts=[str(home / "untrained")], decode=decode))
    assert report.drafts[0]["mismatches"] is None


def test_sampling_without_a_seed_takes_seed_0_and_says_so(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = replace(DECODE, sampling=SamplingConfig(temperature=1.0))
    options = {"drafts": [str(home / "untrained")], "decode": decode}
    first, second = (evaluate(config_of(home, tmp_path / name, **options)) for name in ("a", "b"))
    assert "decode.seed: none is given; sampling with seed 0" in capsys.readouterr().err
    assert first.settings["decode"]["seed"] == 0
    assert first.drafts[0]["acceptance_histogram"] == second.drafts[0]["acceptance_histogram"]


def test_the_judges_prompts_are_left_out_and_the_real_number_is_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"drafts": [str(home / "untrained")], "num_prompts": 8}
    report = evaluate(config_of(home, tmp_path / "out", skip_prompts=1, **options))
    assert {t["prompt_tokens"] for t in report.timings} == {31, 27}
    assert "2 prompts, greedy" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"skip_prompts: 3 leaves no prompt; .* has 3, so expected at most 2"):
        evaluate(config_of(home, tmp_path / "out", skip_prompts=3, **options))


def test_the_untrained_draft_is_found_from_any_folder_or_its_lack_is_told(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_model(str(home / "target"), CONFIG, role="target")
    shutil.copytree(home / "untrained", tmp_path / "drafts" / "first")
    draft = load_draft(home / "untrained", target, CONFIG)
    run = tmp_path / "runs" / "a"
    write_checkpoint(run, 50, draft, Path("drafts/first"))
    settings = {"draft": "drafts/first", "output": "runs/a"}
    (run / "config.yaml").write_text(json.dumps(settings))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert [c.name for c in find_candidates(["../runs/a"])] == ["untrained", "50"]
    shutil.rmtree(tmp_path / "drafts")
    report = evaluate(config_of(home, tmp_path / "out", drafts=["../runs/a"]))
    assert [row["name"] for row in report.drafts] == ["50"]
    assert any(line.startswith("../runs/a: its untrained draft has no row") for line in report.warnings)


def test_the_temperature_of_the_loss_goes_with_the_acceptance(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    file = run / "checkpoints" / "step-000100.ckpt"
    content = torch.load(file, weights_only=True)
    content["config"]["loss"] = {"temperature": 0.7}
    torch.save(content, file)
    assert [c.temperature for c in find_candidates([str(run)])] == [0.7] * 3
    assert find_candidates([str(file)])[0].temperature == 0.7


def test_prompts_are_looked_for_before_the_target_is_loaded(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.results.evaluate.load_model", None)
    with pytest.raises(UsageError, match=r"gone\.jsonl: no such file or folder"):
        evaluate(replace(config_of(home, tmp_path / "out"), prompts=str(tmp_path / "gone.jsonl")))
    assert not (tmp_path / "out").exists()


def test_names_of_drafts_tell_them_apart(home: Path, tmp_path: Path) -> None:
    target = load_model(str(home / "target"), CONFIG, role="target")
    write_checkpoint(tmp_path / "run2", 50, load_draft(home / "untrained", target, CONFIG), home / "untrained")
    both = find_candidates([str(home / "run"), str(tmp_path / "run2")])
    assert [c.name for c in both] == ["run: untrained", "run: 50", "run: 100", "run2: 50"]
    files = [str(p / "checkpoints" / "step-000050.ckpt") for p in (home / "run", tmp_path / "run2")]
    assert [c.name for c in find_candidates(files)] == files
    assert [c.name for c in find_candidates(files[:1] * 2)] == ["50"]


def test_a_wrong_draft_is_refused_before_the_target_is_loaded(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.results.evaluate.load_model", None)
    for draft, words in ((str(tmp_path / "no"), "no such directory"), (str(tmp_path / "no.ckpt"), "no checkpoint")):
        with pytest.raises(UsageError, match=words):
            evaluate(config_of(home, tmp_path / "out", drafts=[draft]))


def test_a_busy_machine_is_seen() -> None:
    share = busy_share(0.05)
    assert share is None or 0 <= share <= 1
