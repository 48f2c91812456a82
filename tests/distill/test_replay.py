"""Rejected positions count more: in texts that fit decodes, and in traces of a user's own traffic."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig, SamplingConfig
from decode.decoder import SpeculativeDecoder
from decode.draft import Round
from decode.errors import UsageError
from distill.config import ReplayConfig
from distill.data.examples import Example
from distill.on_policy.sources import Pair, replays
from distill.on_policy.texts import replayed
from distill.on_policy.traces import read_traces
from tests.distill.training import distil, mean_loss
from tests.fit_runs import QUIET, distance, examples_of, feed_of, weights_of
from tests.fixtures import loaded, tiny_llama, with_noise

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

ROUNDS = [Round(2, [5, 6, 7], 1, [5, 9]), Round(4, [1, 2], 2, [1, 2, 3]), Round(7, [4, 8], 1, [4])]


def test_only_the_token_in_place_of_a_rejected_one_counts_more() -> None:
    text = replayed([10, 11], ROUNDS, 3.0, 100, "made")
    assert text.input_ids == [10, 11, 5, 9, 1, 2, 3, 4]
    assert text.mask == [False, False, True, True, True, True, True, True]
    assert text.weights == [1, 1, 1, 3.0, 1, 1, 1, 1]  # a bonus is no rejection, nor is an end inside a block
    assert text.total_weight == 8.0
    cut = replayed([10, 11], ROUNDS, 3.0, 4, "made")
    assert (cut.input_ids, cut.mask, cut.weights) == ([10, 11, 5, 9], [False, False, True, True], [1, 1, 1, 3.0])


def test_texts_of_a_making_follow_the_target_and_weights_its_rejections() -> None:
    target = tiny_llama()
    draft = with_noise(target, 0.3)
    config = ReplayConfig(fraction=0.5, num_texts=4, max_new_tokens=12, weight=5.0, sampling=SamplingConfig())
    made = replays(config, 64)(Pair(loaded(target), loaded(draft), "eager"), [[3], [4, 5], [6], [7]], "seed")
    decoder = SpeculativeDecoder(loaded(target), loaded(draft))
    settings = DecodeConfig(12, 4, "fixed", sampling=SamplingConfig(), eos_token_ids=[], verifier="token")
    found = decoder.generate([[3], [4, 5], [6], [7]], settings, trace=True)
    rejected = 0
    for example, prompt, answer in zip(made, [[3], [4, 5], [6], [7]], found, strict=True):
        assert example.input_ids == [*prompt, *answer.ids]
        heavy = [at for at, weight in enumerate(example.weights or []) if weight == 5.0]
        with torch.no_grad():
            choice = draft(input_ids=torch.tensor([example.input_ids])).logits[0].argmax(-1).tolist()
        # greedy on both sides: a rejected proposal is the draft's own choice at a position where the target's differs
        assert all(choice[at - 1] != example.input_ids[at] for at in heavy)
        assert len(heavy) == sum(done.kind == "recovered" for done in answer.rounds)
        rejected += len(heavy)
    assert rejected > 3


@pytest.mark.parametrize(
    "split", [{"batch_size": 3}, {"batch_size": 1, "accumulate": 3}, {"batch_size": 2, "accumulate": 2}]
)
def test_t14_a_windows_loss_is_the_weighted_mean_however_it_is_split(split: dict[str, Any]) -> None:
    plain = examples_of([2, 5, 9])
    weights = [[1.0] * 2 + [4.0, 1.0], [1.0] * 4 + [4.0, 1.0, 1.0, 4.0], [4.0] * 11]
    examples = [Example(e.input_ids, e.mask, "made", w) for e, w in zip(plain, weights, strict=True)]
    draft, expected, target = tiny_llama(seed=1), tiny_llama(seed=1), tiny_llama()
    distil(draft, target, feed_of(examples, **split))
    total, mass = torch.zeros((), dtype=torch.float64), 0.0
    for example, own in zip(examples, weights, strict=True):
        for at, supervised in enumerate(example.mask):
            if supervised:
                single = Example(example.input_ids, [place == at for place in range(len(own))], "made")
                total, mass = total + own[at] * mean_loss(expected, target, [0], [single]), mass + own[at]
    grads = torch.autograd.grad(total / mass, list(expected.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(expected.parameters(), grads, strict=True):
            parameter -= 0.1 * grad
    assert distance(weights_of(draft), weights_of(expected)) < 1e-7
    unweighted = tiny_llama(seed=1)
    distil(unweighted, target, feed_of(plain, **split))
    assert distance(weights_of(unweighted), weights_of(expected)) > 1e-4


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_traces_of_several_texts_become_examples_with_weights(tmp_path: Path) -> None:
    target = tiny_llama()
    decoder = SpeculativeDecoder(loaded(target), loaded(with_noise(target, 0.3)))
    settings = DecodeConfig(10, 3, "fixed", sampling=SamplingConfig(temperature=1.0), eos_token_ids=[], seed=3)
    prompts = [[3, 4, 5], [6]]
    found = decoder.generate(prompts, settings, trace=True)
    rows = [row for prompt, answer in zip(prompts, found, strict=True) for row in answer.trace(prompt)]
    texts = read_traces(write(tmp_path / "t.jsonl", rows), 2.0, 64, 48)
    assert [text.input_ids for text in texts] == [[*p, *a.ids] for p, a in zip(prompts, found, strict=True)]
    expected = [replayed(p, a.rounds, 2.0, 64, "") for p, a in zip(prompts, found, strict=True)]
    assert [text.weights for text in texts] == [text.weights for text in expected]
    assert any(2.0 in (text.weights or []) for text in texts)
    assert texts[1].source == f"{tmp_path / 't.jsonl'}:{len(found[0].rounds) + 1}"


GOOD = {"prompt_ids": [1, 2], "context_length": 2, "drafted": [3, 4], "num_accepted": 1, "emitted": [3, 5]}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({**GOOD, "prompt_ids": None}, r"t.jsonl:1: prompt_ids is not a list of the target's token ids, below 48"),
        ({k: v for k, v in GOOD.items() if k != "prompt_ids"}, r"t.jsonl:1: it has no prompt_ids"),
        ({**GOOD, "drafted": [48, 4]}, r"t.jsonl:1: drafted is not a list"),
        ({**GOOD, "num_accepted": 3}, r"t.jsonl:1: drafted, num_accepted and emitted make no round"),
        ({**GOOD, "emitted": [9, 5]}, r"t.jsonl:1: drafted, num_accepted and emitted make no round"),
        ({**GOOD, "context_length": 3}, r"t.jsonl:1: context_length is 3; 2 tokens come before it"),
        ([1], r"t.jsonl:1: it is no object"),
        ({**GOOD, "emitted": [], "num_accepted": 0}, r"has no text with a new token"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(row: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^replay.log: .*{told}") as caught:
        read_traces(write(tmp_path / "t.jsonl", [row]), 2.0, 64, 48)
    assert "\n" not in str(caught.value)
    assert read_traces(write(tmp_path / "t.jsonl", [GOOD]), 2.0, 64, 48)[0].weights == [1, 1, 1, 2.0]
    with pytest.raises(UsageError, match=r"replay.log: .*gone.jsonl cannot be read"):
        read_traces(str(tmp_path / "gone.jsonl"), 2.0, 64, 48)
