"""generate with a server in the target's place: the same rows as here, whatever the order in which answers arrive."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.config import ModelConfig, SamplingConfig
from decode.errors import DraftsmithError, UsageError
from decode.models import LoadedModel, load_model
from distill.cli import main as cli
from distill.config import GenerateConfig, ServerConfig
from distill.data.rows import read_rows
from distill.generate import GenerateReport, answer, generate
from distill.remote import client
from tests.distill.openai_server import OpenAIServer, Reply, serving, slow_first

NUM_ROWS = 11  # of which rows 2 and 7 are bad
SAMPLED = SamplingConfig(temperature=1.0)
Served = tuple[OpenAIServer, GenerateConfig]


@pytest.fixture
def served(target: Path, loaded_target: LoadedModel, tmp_path: Path) -> Iterator[Served]:
    """A server of the tiny target, and settings that ask it."""
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "x" * (1 + n % 4)} if n not in (2, 7) else {"bad": n} for n in range(NUM_ROWS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(loaded_target) as server:
        asked = ServerConfig(server.url, concurrency=4, retries=2)
        output = str(tmp_path / "a.jsonl")
        yield server, GenerateConfig(str(target), str(source), output, 6, SAMPLED, server=asked)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)


def read(config: GenerateConfig) -> bytes:
    return Path(config.output).read_bytes()


def here(config: GenerateConfig, target: LoadedModel) -> tuple[bytes, GenerateReport]:
    """What the target itself writes, a row at a time."""
    output = str(Path(config.output).with_name("here.jsonl"))
    plain = replace(config, output=output, batch_size=1, server=ServerConfig(), model=ModelConfig(backend="eager"))
    report = answer(list(read_rows(config.prompts)), target, plain)
    return Path(output).read_bytes(), report


def num_kept(config: GenerateConfig) -> int:
    """Answers in the output or beside it."""
    rows = [json.loads(line) for line in read(config).splitlines()]
    kept = {tuple(row["input_ids"][row["mask"].index(1) :]) for row in rows}
    early = Path(config.output).with_name("a.early.jsonl")
    lines = early.read_text().split("\n")[:-1] if early.exists() else []
    return len(kept | {tuple(json.loads(line)["ids"]) for line in lines})


def left_behind(config: GenerateConfig) -> list[str]:
    return sorted(p.name for p in Path(config.output).parent.iterdir() if p.name.startswith("a."))


@pytest.mark.parametrize("sampling", [SAMPLED, SamplingConfig(), SamplingConfig(0.7, top_k=9, top_p=0.8)])
def test_a_server_gives_the_rows_that_the_target_gives_here(
    served: Served, loaded_target: LoadedModel, sampling: SamplingConfig
) -> None:
    server, config = served
    config = replace(config, sampling=sampling)
    report = generate(config)
    there, expected = here(config, loaded_target)
    assert read(config) == there and there.count(b"\n") == 9
    counts = ("num_rows", "num_written", "num_errors", "num_skipped", "num_tokens")
    assert all(getattr(report, key) == getattr(expected, key) for key in counts)
    assert left_behind(config) == ["a.errors.jsonl", "a.jsonl", "a.jsonl.meta.json"]
    assert 1 < server.most_at_once <= 4


@pytest.mark.parametrize("concurrency", [1, 32])
def test_the_order_in_which_answers_arrive_shows_in_no_byte(
    served: Served, loaded_target: LoadedModel, concurrency: int
) -> None:
    server, config = served
    server.fault = slow_first(0.02)
    generate(replace(config, server=replace(config.server, concurrency=concurrency)))
    assert read(config) == here(config, loaded_target)[0]
    assert server.most_at_once <= concurrency


def test_t31_every_sampling_setting_is_sent_for_a_server_fills_gaps_from_the_models_own(served: Served) -> None:
    server, config = served
    generate(replace(config, limit=1, sampling=SamplingConfig(0.5, 7, 0.9, min_new_tokens=2, allowed_ids=[5, 258])))
    (request,) = server.requests
    assert {key: request[key] for key in ("temperature", "top_k", "top_p", "min_p", "min_tokens", "n")} == {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.0, "min_tokens": 2, "n": 1
    }  # fmt: skip
    assert request["repetition_penalty"] == 1 and request["allowed_token_ids"] == [5, 258]
    assert request["frequency_penalty"] == request["presence_penalty"] == 0
    assert request["stop_token_ids"] == [258] and request["ignore_eos"] and not request["add_special_tokens"]


@pytest.mark.parametrize("failed", [1, 5])
def test_what_was_answered_before_a_failure_is_kept_and_not_asked_again(
    served: Served, loaded_target: LoadedModel, failed: int
) -> None:
    server, config = served
    config = replace(config, server=replace(config.server, concurrency=9))
    broken: list[int] = []

    def fault(number: int, body: dict[str, Any]) -> Reply | None:
        if number == failed:
            broken.append(body["seed"])
        if body["seed"] not in broken:
            return None
        while num_kept(config) < 8:
            time.sleep(0.01)
        return Reply(500, {"error": {"message": "boom"}})

    server.fault = fault
    with pytest.raises(DraftsmithError, match=r"server http://127\S+: 500 Internal Server Error: boom \(3 tries\)"):
        generate(config)
    server.fault, server.requests = (lambda number, body: None), []
    generate(config)
    assert len(server.requests) == len(broken) == 1
    assert read(config) == here(config, loaded_target)[0]
    assert "a.early.jsonl" not in left_behind(config)


@pytest.mark.parametrize("share", [0.2, 0.999])
def test_cut_at_any_byte(served: Served, share: float) -> None:
    server, config = served
    generate(config)
    whole = read(config)
    os.truncate(config.output, int(share * len(whole)))
    server.requests = []
    report = generate(config)
    assert read(config) == whole
    assert len(server.requests) == 9 - report.num_resumed


@pytest.mark.parametrize("first", [1, 5])
def test_a_raised_limit_extends_the_output(served: Served, first: int) -> None:
    server, config = served
    generate(replace(config, limit=first))
    generate(config)
    assert len(server.requests) == 9  # none was asked twice
    extended = read(config)
    Path(config.output).unlink()
    generate(config)
    assert read(config) == extended


def test_what_made_it_is_recorded_and_another_server_or_target_is_refused(
    served: Served, loaded_target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, config = served
    server.key = "sk-very-secret"
    monkeypatch.setenv("TINY_KEY", server.key)
    config = replace(config, server=replace(config.server, api_key_env="TINY_KEY", model="tiny"))
    generate(config)
    meta = json.loads(Path(config.output + ".meta.json").read_text())
    assert (meta["server"], meta["server_model"], meta["server_version"]) == (server.url, "tiny", "0.0.test")
    assert meta["config"]["server"]["api_key_env"] == "TINY_KEY"
    assert not any(b"secret" in p.read_bytes() for p in Path(config.output).parent.iterdir() if p.is_file())
    whole = read(config)
    with serving(loaded_target, name="other") as other:
        elsewhere = replace(config, server=replace(config.server, url=other.url, model=None))
        with pytest.raises(UsageError, match=r"a\.jsonl was made with server 'http://127\S+', not 'http://127"):
            generate(elsewhere)
    local = replace(config, server=ServerConfig(), model=ModelConfig(backend="eager"))
    with pytest.raises(UsageError, match=r"a\.jsonl was made with server 'http://127\S+', not None"):
        generate(local)
    with pytest.raises(UsageError, match="was made with seed 0, not 3"):
        generate(replace(config, seed=3))
    assert read(config) == whole


def test_prompts_have_to_fit_in_the_servers_context_too(served: Served) -> None:
    server, config = served
    server.max_model_len = 27
    report = generate(config)
    assert report.skipped == {"the prompt is longer than 21 tokens": 3} and report.num_written == 6


def test_a_file_of_early_answers_that_is_not_ours_is_left_alone(served: Served) -> None:
    server, config = served
    early = Path(config.output).with_name("a.early.jsonl")
    for content in ('{"prompt": "mine"}\n', '{"prompt": "mine"}', "[]\n"):
        early.write_text(content)
        with pytest.raises(UsageError, match=r"a\.early\.jsonl was not written by generate"):
            generate(config)
        assert early.read_text() == content and not server.requests
    early.write_text('{"request": "no such", "ids": [1]}\n{"requ')  # of a killed run
    generate(config)
    assert len(server.requests) == 9 and not early.exists()


def test_the_command_line_takes_a_server_and_loads_no_weights(
    served: Served, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, config = served
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    words = ["--target", str(bare), "--prompts", config.prompts, "--output", config.output, "--max-new-tokens", "6"]
    assert cli.main(["generate", *words, "--server.url", server.url, "--server.concurrency", "2"]) == 0
    assert "9 answers to 11 rows (2 bad rows, 0 skipped)" in capsys.readouterr().out
    with pytest.raises(UsageError):
        load_model(str(bare), ModelConfig(), role="target")
