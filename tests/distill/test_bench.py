"""The bench command: names of methods, mistakes, and real runs on tiny models."""

import csv
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.draft import Draft, Verdict
from decode.errors import UsageError
from decode.laws import Law
from decode.verifiers import VERIFIERS
from distill.cli.main import main
from distill.results.bench_names import MethodName, method_names
from tests.draft_files import make_draft, save_target, write_rows
from tests.fixtures import byte_tokenizer, tiny_llama

METHODS = [
    *("transformers", "transformers-assisted", "transformers-assisted:2", "transformers-prompt-lookup"),
    *("fixed:2", "fixed:2/token@eager", "heuristic:4", "confidence", "entropy", "cost_model"),
]


def test_names_say_length_verifier_and_backend() -> None:
    names = method_names(["fixed:3/block@prepacked", "transformers-assisted:4", "plain@eager", "cost_model@lean"])
    assert names == [
        MethodName("plain", "plain"),  # speedups are over it
        MethodName("fixed:3/block@prepacked", "fixed", 3, "block", "prepacked"),
        MethodName("transformers-assisted:4", "transformers-assisted", 4),
        MethodName("plain@eager", "plain", backend="eager"),
        MethodName("cost_model@lean", "cost_model", backend="lean"),
    ]
    assert [name.text for name in method_names(["transformers", "plain"])] == ["transformers", "plain"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fixd:3", "'fixd:3' is not legal; expected NAME[:LENGTH][/VERIFIER][@BACKEND], such as fixed:3@eager; names: "
                   "plain, fixed, heuristic, confidence, entropy, cost_model, transformers, transformers-assisted, "
                   "transformers-prompt-lookup, flashspec"),
        ("", "'' is not legal; expected NAME"),
        ("fixed:", "'fixed:' is not legal; expected NAME"),
        ("fixed:0", "'fixed:0': length 0 is not legal; expected from 1 to 64"),
        ("plain:2", "'plain:2': length 2 is not legal; expected none"),
        ("fixed:2/blok", "verifier blok is not legal; expected one of auto, token, block"),
        ("plain/token", "verifier token is not legal; expected none"),
        ("fixed:2@gpu", "backend gpu is not legal; expected one of auto, eager, "),
        ("transformers@eager", "backend eager is not legal; expected none"),
    ],
)  # fmt: skip
def test_a_name_that_means_nothing_is_refused_with_what_is_legal(name: str, line: str) -> None:
    with pytest.raises(UsageError) as error:
        method_names([name])
    assert str(error.value).startswith("methods: ") and line in str(error.value)


def test_a_method_is_named_once() -> None:
    with pytest.raises(UsageError, match="methods: fixed:2 is given twice"):
        method_names(["fixed:2", "plain", "fixed:2"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--decode.draft_length", "fixed"], "decode.draft_length: 'fixed' is not legal; expected 'cost_model'"),
        (["--decode.num_speculative_tokens", "3"], "decode.num_speculative_tokens: 3 is not legal; expected None"),
        (["--decode.verifier", "block"], "decode.verifier: 'block' is not legal"),
        (["--decode.stop_strings", "x"], "decode.stop_strings: ['x'] is not legal"),
        (["--decode.batch_size", "2"], "decode.batch_size: 2 is not legal"),
        (["--decode.max_new_tokens", "null"], "decode.max_new_tokens: None is not legal; expected an integer >= 1"),
        (["--repeats", "0"], "repeats: 0 is not legal"),
        (["--methods", "fixd"], "methods: 'fixd' is not legal"),
        (["--prompts", "gone.jsonl"], "gone.jsonl: no such file"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_loaded(
    options: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "One."}\n')
    words = ["bench", "--target", "no", "--draft", "no", "--output", str(tmp_path / "o")]
    words += ["--prompts", str(tmp_path / "p.jsonl")] if "--prompts" not in options else []
    assert main([*words, *options]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, an untrained draft with a reduced vocabulary, two files of prompts."""
    home = tmp_path_factory.mktemp("home")
    save_target(home / "target", tiny_llama(4, vocab_size=259))
    write_rows(home / "rows.jsonl", byte_tokenizer(), ["The fox sat.", "A fox ran far."])
    make_draft(home / "target", home / "draft", draft_vocab_size=20, data=[str(home / "rows.jsonl")])
    for name, texts in {"short": ["One.", "Two.", "Three."], "long": ["A much longer question.", "Another."]}.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return home


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Callable[..., int]:
    def bench(*options: str) -> int:
        words = ["--target", str(home / "target"), "--draft", str(home / "draft"), "--output", str(tmp_path / "out")]
        words += ["--prompts", str(home / "short.jsonl"), str(home / "long.jsonl"), "--num_prompts", "1"]
        fixed = ["--model.device", "cpu", "--model.backend", "eager", "--decode.max_new_tokens", "6"]
        return main(["bench", *words, *fixed, *options])

    return bench


def found_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "metrics.json").read_text()))


def test_a_whole_comparison(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--methods", *METHODS, "--repeats", "2") == 0
    found = found_in(tmp_path / "out")
    assert [r["method"] for r in found["rows"]] == ["plain", *METHODS] * 3
    assert list(dict.fromkeys(r["domain"] for r in found["rows"])) == ["short", "long", "all"]
    for each in found["rows"]:
        count = 2 if each["domain"] == "all" else 1
        assert (each["num_prompts"], each["total_tokens"]) == (count, 6 * count)
        assert each["mismatches"]["differences"] == 0 or each["method"].startswith("transformers-")
        assert each["first_token_ms"] > 0
    assert found["failures"] == []
    assert found["circumstances"]["warm_up_seconds"].keys() == {"plain", *METHODS}
    assert {"load target", "load draft", "backend eager"} == found["circumstances"]["seconds"].keys()
    assert found["textbook"]["estimates"][0][0] == pytest.approx(4 / 3)
    assert found["theory"][0]["domain"] == "short"
    with (tmp_path / "out" / "perf_results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == (1 + len(METHODS)) * 2 * 2  # methods, prompts, repeats
    assert {line["domain"] for line in lines} == {"short", "long"}
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {"config.yaml", "versions.json", "command.txt"} <= {p.name for p in (tmp_path / "out").iterdir()}
    printed = capsys.readouterr()
    assert "2 prompts, greedy, at most 6 new tokens, 2 repeats" in printed.out
    assert "cost_model" in printed.out and "bench.png" in printed.out


def test_sampled_methods_have_seeds_and_no_mismatches(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["transformers", "transformers-assisted:2", "fixed:2", "fixed:2/token"]
    assert run("--methods", *methods, "--repeats", "2", "--decode.sampling.temperature", "1") == 0
    found = found_in(tmp_path / "out")
    assert found["settings"]["decode"]["seed"] == 0
    assert all(r["mismatches"] is None for r in found["rows"])
    assert found["mismatches"] == []
    assert "temperature 1, seeds from 0 on" in capsys.readouterr().out


def accept_all(draft: Draft, law: Law, generator: torch.Generator) -> Verdict:
    """A rule that verifies nothing."""
    last = law[len(law) - 1 :]
    return Verdict(torch.tensor(draft.width), last.token_of(last.probs.argmax(-1))[0])


def test_e08_a_decoder_that_does_not_verify_fails(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "token", accept_all)
    assert run("--methods", "fixed:2", "--repeats", "1") == 1
    printed = capsys.readouterr()
    assert "fixed:2: 2 greedy texts differ from plain decoding's, the first in prompt 0 at new token" in printed.err
    assert "metrics.json" in printed.err and len(printed.err.strip().splitlines()) == 1
    found = found_in(tmp_path / "out")  # all is written before the command fails
    assert {r["kind"] for r in found["mismatches"]} == {"difference"}


def test_files_that_cannot_be_told_apart_or_have_too_few_rows_are_refused(
    run: Callable[..., int], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.jsonl").write_text('{"prompt": "One."}\n')
    assert run("--prompts", str(home / "short.jsonl"), str(tmp_path / "short.jsonl")) == 2
    assert "prompts: the domain 'short' is there twice" in capsys.readouterr().err
    assert run("--skip_prompts", "2") == 2
    assert "skip_prompts: 2 leaves no prompt; " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(find_spec("flashspec") is not None, reason="the package is installed")
def test_a_package_that_is_not_installed_is_named(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--methods", "flashspec:2") == 2
    assert "methods: flashspec:2 needs the package flashspec, which is not installed" in capsys.readouterr().err


def test_an_unexported_draft_is_refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert run("--draft", str(tmp_path / "run")) == 2
    assert "is a run of fit; export it first" in capsys.readouterr().err
