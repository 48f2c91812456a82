"""Ragged batches: every method's rows are those of solo runs, tokens are counted as ids, and times are those passed."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from decode import timing
from decode.errors import UsageError
from decode.models import LoadedModel
from distill.results.bench_batches import BatchMethod, batch_methods, measure_batches
from tests.draft_files import make_draft, save_target
from tests.fixtures import greedy_reference, loaded, random_prompt, tiny_gpt2, tiny_llama, with_noise

PROMPTS = [random_prompt(n, seed=n) for n in (3, 17, 9, 5)]
SCRIPT = Path(__file__).parents[2] / "scripts" / "batch_throughput.py"


def pair(model: Any, noise: float = 0.1) -> tuple[LoadedModel, LoadedModel]:
    return loaded(model), loaded(with_noise(model, noise))


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_d45_every_methods_rows_are_those_of_solo_runs(make: Any) -> None:
    """d47: transformers' batches are padded on the left with an id that is also in a prompt."""
    target = make(0)
    first = greedy_reference(target, PROMPTS[0], 12)
    eos = first[4]
    target.generation_config.eos_token_id = eos
    prompts = [*PROMPTS[:-1], [*PROMPTS[-1], eos, 7]]
    expected = [greedy_reference(target, prompt, 12, [eos]) for prompt in prompts]
    assert len({len(ids) for ids in expected}) > 1, "no row ends before the others"
    names = ["transformers", "plain", "fixed:3", "cost_model"]
    for method in batch_methods(names, *pair(target), backend="eager"):
        assert method.run(prompts, 12) == expected, method.name
    results = measure_batches(batch_methods(names, *pair(target), backend="eager"), loaded(target), prompts, [1, 4], 12)
    assert [(row.batch_size, row.method) for row in results] == [(size, name) for size in (1, 4) for name in names]
    assert {row.num_tokens for row in results} == {sum(map(len, expected))}
    assert all(row.mismatches == [] for row in results)


class Clock:
    """Time that passes only where a method says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_e06_rates_are_ids_over_the_least_time_and_methods_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    target, clock, calls = tiny_llama(0), Clock(), []
    monkeypatch.setattr(timing, "time", clock)

    def stub(name: str, *seconds: float) -> BatchMethod:
        left = iter([100.0, *seconds])  # the first call is slow

        def run(prompts: list[list[int]], count: int) -> list[list[int]]:
            calls.append((name, len(prompts[0])))
            clock.now += next(left)
            return [greedy_reference(target, prompt, count) for prompt in prompts]

        return BatchMethod(name, run)

    methods = [stub("transformers", 4.0, 4.0, 8.0, 4.0), stub("ours", 2.0, 1.0, 4.0, 9.0)]
    theirs, ours = measure_batches(methods, loaded(target), PROMPTS, [2], 5, repeats=2)
    assert (theirs.num_tokens, theirs.seconds, theirs.tokens_per_second) == (20, 8.0, 2.5)
    assert (ours.seconds, ours.tokens_per_second) == (3.0, 20 / 3)
    assert ours.over_transformers is not None and ours.over_transformers.median == 2.0
    assert ours.over_transformers.count == 4
    timed = [name for name, _ in calls[2:]]
    assert timed == ["transformers", "ours", "ours", "transformers"] * 2
    assert [length for _, length in calls[2:]] == [3, 3, 9, 9] * 2


def test_e08_a_row_that_differs_is_a_fault_in_any_repeat() -> None:
    target = tiny_llama(0)
    left = iter([0, 0, 1])  # the first call, and two repeats

    def run(prompts: list[list[int]], count: int) -> list[list[int]]:
        texts = [greedy_reference(target, prompt, count) for prompt in prompts]
        texts[2][3] += next(left)
        return texts

    (found,) = measure_batches([BatchMethod("broken", run)], loaded(target), PROMPTS, [4], 6, repeats=2)
    assert (found.num_differences, len(found.mismatches), found.mismatches[0].position) == (1, 1, 3)
    assert found.over_transformers is None


@pytest.mark.parametrize(
    ("names", "sizes", "count", "line"),
    [
        (["transformers-assisted"], [1], 4, "methods: 'transformers-assisted' is not legal; expected plain, "),
        (["fixed:3@eager"], [1], 4, "methods: 'fixed:3@eager' is not legal"),
        (["plain"], [3], 4, "batch_sizes: 3 is not legal; expected a divisor of 4"),
        (["plain"], [0], 4, "batch_sizes: 0 is not legal"),
        (["plain"], [1], 0, "max_new_tokens: 0 is not legal"),
    ],
)
def test_what_cannot_be_measured_is_refused(names: list[str], sizes: list[int], count: int, line: str) -> None:
    target, draft = pair(tiny_llama(0))
    with pytest.raises(UsageError) as error:
        measure_batches(batch_methods(names, target, draft, "eager"), target, PROMPTS, sizes, count)
    assert str(error.value).startswith(line)


def test_the_script_prints_a_row_for_each_size_and_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = save_target(tmp_path / "target", tiny_llama(4, vocab_size=259)), tmp_path / "draft"
    make_draft(target, draft)
    files = []
    for name, texts in {"short": ["One.", "Two."], "long": ["A much longer question.", "Another."]}.items():
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("batch_throughput", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(str(target), str(draft), files, 4, (1, 2), ("transformers", "fixed:2"), 4, 1, "eager", "cpu")
    printed = capsys.readouterr().out
    assert printed.startswith("4 prompts of ")
    assert len(re.findall(r"│ [12] +│ (?:transformers|fixed:2) +│ 16 +│", printed)) == 4
