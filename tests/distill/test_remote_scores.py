"""A server's top-k laws equal those of the target itself, and what a server can't tell is refused by name."""

import math
from typing import Any

import pytest
import torch

from decode.config import SamplingConfig
from decode.errors import DraftsmithError, UsageError
from decode.models import LoadedModel
from distill.config import GenerateConfig, ServerConfig
from distill.config.server import check_can_be_asked
from distill.data.examples import Example
from distill.remote.protocol import completion_request, scoring_request, top_log_probs
from distill.remote.scores import SMALLEST_TAIL, RemoteScorer, log_tail_of
from distill.teacher.scoring import TargetScorer
from tests.distill.openai_server import serving
from tests.fixtures import random_prompt

VOCAB = 259
EXAMPLES = [
    Example(
        random_prompt(length, VOCAB, seed=length), [n >= first and n % 3 != 1 for n in range(length)], f"row {length}"
    )
    for length, first in ((9, 4), (30, 0), (2, 1), (14, 13))
]


@pytest.mark.parametrize("top_k", [1, 8, 32])
def test_the_laws_of_a_server_are_those_of_the_target(loaded_target: LoadedModel, top_k: int) -> None:
    members = [2, 0, 3, 1]
    here = TargetScorer(loaded_target.model, top_k).score_batch(members, EXAMPLES)
    with serving(loaded_target) as server:
        scorer = RemoteScorer(ServerConfig(server.url, concurrency=2), top_k, 1.0, VOCAB)
        there = scorer.score_batch(members, EXAMPLES)
        assert len(server.requests) == 4 and server.most_at_once <= 2
    assert there.keys() >= here.keys() and torch.equal(here["ids"], there["ids"].long())
    for name in ("log_probs", "log_tail"):  # fp32 on both sides, summed in another order
        torch.testing.assert_close(there[name], here[name], atol=2e-5, rtol=0)
    assert not torch.equal(there["ids"], there["ids"].flip(0))  # the comparison has something to tell apart


def test_a_tail_is_one_less_what_is_kept_as_a_float64_sum_tells() -> None:
    logits = torch.randn(50, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    full = logits.log_softmax(-1).sort(descending=True).values
    exact = torch.tensor([math.log(math.fsum(math.exp(x) for x in row[8:])) for row in full.tolist()])
    torch.testing.assert_close(log_tail_of(full[:, :8], complete=False).float(), exact, atol=1e-5, rtol=0)
    rounded = full[:, :8].float().double()  # as a server gives them: off by an ulp of each
    off = (log_tail_of(rounded, complete=False).exp() - exact.double().exp()).abs().max()
    assert 1e-9 < float(off) < 5e-7
    certain = torch.tensor([[0.0, -20.0], [1e-9, -1e-3]], dtype=torch.float64)  # sums of 1 and more
    assert log_tail_of(certain, complete=False).tolist() == [math.log(SMALLEST_TAIL)] * 2
    assert log_tail_of(certain, complete=True).tolist() == [-math.inf] * 2


def test_what_a_server_cannot_tell_is_refused_by_name(loaded_target: LoadedModel) -> None:
    server = ServerConfig("http://127.0.0.1:9/v1")  # refused before it is asked
    with pytest.raises(UsageError, match=r"temperature: 2\.0 is not legal; expected 1 with server\.url"):
        RemoteScorer(server, 4, 2.0, VOCAB)
    with pytest.raises(UsageError, match=r"server\.url: the tail of a draft with a reduced vocabulary \(3 ids\)"):
        RemoteScorer(server, 4, 1.0, VOCAB, torch.tensor([1, 2, 3]))
    with pytest.raises(UsageError, match="top_k: 260 is not legal"):
        RemoteScorer(server, 260, 1.0, VOCAB)


@pytest.mark.parametrize("fault", ["none", "short", "few", "other id", "logits", "nan", "prompt"])
def test_scores_that_are_not_of_these_ids_are_refused(fault: str) -> None:
    request = scoring_request("tiny", [1, 2, 3], 2)
    laws: Any = [None, *({str(i): {"logprob": -1.0 - i, "rank": i} for i in (1, 2, 3)} for _ in range(2))]
    choice: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "prompt_logprobs": laws}
    kept = top_log_probs({"choices": [choice]}, request, VOCAB)
    assert kept == [{1: -2.0, 2: -3.0}] * 2
    if fault == "none":
        choice["prompt_logprobs"] = None
    elif fault == "short":
        laws.pop()
    elif fault == "few":
        laws[2] = {"3": {"logprob": -1.0}}
    elif fault == "other id":
        del laws[1]["2"]
    elif fault == "prompt":
        choice["prompt_token_ids"] = [1, 2]
    else:
        laws[1]["1"]["logprob"] = 3.5 if fault == "logits" else math.nan
    with pytest.raises(DraftsmithError, match="server: ") as refused:
        top_log_probs({"choices": [choice]}, request, VOCAB)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (SamplingConfig(1.0, typical_p=0.9), "sampling.typical_p: 0.9"),
        (SamplingConfig(no_repeat_ngram_size=2), "sampling.no_repeat_ngram_size: 2"),
        (SamplingConfig(bad_words_ids=[[3]]), r"sampling.bad_words_ids: \[\[3\]\]"),
        (SamplingConfig(presence_penalty=2.5), "sampling.presence_penalty: 2.5"),
        (SamplingConfig(logit_bias={"3": 101.0}), "sampling.logit_bias: 101.0"),
        (SamplingConfig(0.001), "sampling.temperature: 0.001"),
        (SamplingConfig(1.0, min_p=0.1, top_p=0.9), "sampling.min_p: 0.1"),
    ],
)
def test_sampling_that_a_server_would_change_is_refused(sampling: SamplingConfig, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_can_be_asked(sampling)
    GenerateConfig("t", "p.jsonl", "o.jsonl", sampling=sampling)  # legal without a server
    with pytest.raises(UsageError, match=named):
        GenerateConfig("t", "p.jsonl", "o.jsonl", sampling=sampling, server=ServerConfig("http://h/v1"))


def test_every_sampling_setting_is_sent_or_refused() -> None:
    """One that is added later has to be looked at here."""
    plain = completion_request("m", [1], SamplingConfig(1.0), 5, [2], 0)
    changed: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.5, "repetition_penalty": 2.0,
        "frequency_penalty": 1.0, "presence_penalty": 1.0, "no_repeat_ngram_size": 2, "bad_words_ids": [[1]],
        "logit_bias": {"1": 2.0}, "allowed_ids": [1], "min_new_tokens": 2,
    }  # fmt: skip
    assert changed.keys() == vars(SamplingConfig()).keys()
    for key, value in changed.items():
        sampling = SamplingConfig(**{"temperature": 1.0, key: value})
        try:
            check_can_be_asked(sampling)
        except UsageError:
            continue
        assert completion_request("m", [1], sampling, 5, [2], 0) != plain, key
    assert completion_request("m", [1], SamplingConfig(1e-9), 5, [2], 0)["temperature"] == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": "127.0.0.1:8000/v1"}, "server.url: '127.0.0.1:8000/v1' is not legal; expected the base of an API"),
        ({"url": "ftp://h/v1"}, "server.url: 'ftp://h/v1' is not legal"),
        ({"url": "http://h:port/v1"}, "server.url: it is no url"),
        ({"url": "http://me:secret@h/v1"}, "server.url: it holds credentials or a query"),
        ({"url": "http://h/v1?key=secret"}, "server.url: it holds credentials or a query"),
        ({"url": "http://h/v1", "api_key_env": "sk-secret"}, "server.api_key_env: expected the name of an environment"),
        ({"url": "http://h/v1", "concurrency": 0}, "server.concurrency: 0"),
        ({"url": "http://h/v1", "retries": -1}, "server.retries: -1"),
        ({"url": "http://h/v1", "timeout": 0.0}, "server.timeout: 0.0"),
        ({"concurrency": 3}, "server.concurrency: 3 has no effect without server.url"),
        ({"api_key_env": "secret"}, "server.api_key_env: has no effect without server.url"),
    ],
)
def test_settings_of_a_server(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as refused:
        ServerConfig(**options)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("extra", [{"batch_size": 8}, {"model": {"dtype": "float16"}}, {"model": {"device": "cpu"}}])
def test_what_concerns_weights_is_refused_with_a_server(extra: dict[str, Any]) -> None:
    from decode.config import ModelConfig

    options = {key: ModelConfig(**value) if key == "model" else value for key, value in extra.items()}
    with pytest.raises(UsageError, match=r"^(batch_size|model\.(dtype|device)): \S+ is not legal"):
        GenerateConfig("t", "p.jsonl", "o.jsonl", server=ServerConfig("http://h/v1"), **options)
    GenerateConfig("t", "p.jsonl", "o.jsonl", **options)
