"""`draftsmith cache`: what it makes, killed anywhere too, and how damage and wrong laws are told."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decode.errors import DraftsmithError, UsageError
from distill.cache import verify
from distill.cli import main as cli
from distill.config import CacheConfig, TeacherConfig
from distill.runs import config_yaml
from distill.teacher import scoring
from distill.teacher.store import read_index, sha256_of
from tests.distill.cache_samples import MODEL, change_weights, config_of, copied, damage, made, rewrite, shards_in
from tests.fit_runs import run_fit


@pytest.fixture(scope="module")
def whole(fit_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the rows of `fit_pair`, in several shards: read only."""
    folder = tmp_path_factory.mktemp("cache") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "SHARD_POSITIONS", 40)
        assert made(fit_pair, folder).size.shards > 3
        yield folder


def test_the_command_tells_what_lies_where_and_does_nothing_twice(
    fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"cache --target {fit_pair / 'target'} --data.train {fit_pair / 'rows.jsonl'} --data.max_length 32"
    words += f" --top_k 8 --draft {fit_pair / 'draft'} --model.device cpu --output {tmp_path / 'c'}"
    assert cli.main(words.split()) == 0
    said = capsys.readouterr()
    assert re.search(r"c: \d+ tokens of 30 examples, \d+ bytes each, in 1 shards; \d+ scored now, \d+ tok", said.out)
    assert f"next: draftsmith fit --target {fit_pair / 'target'} --teacher.kind cached --teacher.cache" in said.out
    assert re.search(r"scored (\d+)/\1 tokens, \d+/s, \d+ bytes each", said.err)
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").glob("*.safetensors")}
    assert cli.main(words.split()) == 0
    assert "scored now" not in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in (tmp_path / "c").glob("*.safetensors")} == before
    assert cli.main(["cache", "--verify", str(tmp_path / "c"), "--model.device", "cpu"]) == 0
    assert re.search(
        r"c: whole; .* \d+ positions scored again; a probability differs by .*e-0\d", capsys.readouterr().out
    )


@pytest.mark.parametrize("kind", ["cut", "flipped", "gone"])
def test_a15_a_damaged_shard_is_named_by_verify_and_fit_and_made_again_by_cache(
    kind: str, fit_pair: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(whole, tmp_path / "c")
    name = damage(kind, folder)
    assert cli.main(["cache", "--verify", str(folder)]) == 1
    assert f"damaged: {name};" in capsys.readouterr().err
    with pytest.raises(UsageError, match=rf"^teacher.cache: .*: damaged: {name};"):
        run_fit(fit_pair, tmp_path / "run", teacher=TeacherConfig(kind="cached", top_k=8, cache=str(folder)))
    made(fit_pair, folder)
    assert f"{name} is damaged and is made again" in capsys.readouterr().err
    assert shards_in(folder) == shards_in(whole)


def test_verify_tells_laws_of_wrong_shape_or_of_another_target(whole: Path, fit_pair: Path, tmp_path: Path) -> None:
    short = copied(whole, tmp_path / "short")
    name = rewrite(short, lambda table: {**table, "log_tail": table["log_tail"][:-1]})
    with pytest.raises(DraftsmithError, match=rf": damaged: {name};"):
        verify(CacheConfig(verify=str(short), model=MODEL))
    other = copied(whole, tmp_path / "other")
    rewrite(other, lambda table: {**table, "log_probs": table["log_probs"] - 0.1})
    with pytest.raises(DraftsmithError, match=r"its laws are not those of .*; a probability differs by"):
        verify(CacheConfig(verify=str(other), model=MODEL, verify_positions=10_000))
    changed = copied(fit_pair / "target", tmp_path / "target")
    change_weights(changed)
    with pytest.raises(UsageError, match=r"^target: .* has the weights \w{12}, the cache was scored with \w{12}"):
        verify(CacheConfig(verify=str(whole), target=str(changed), model=MODEL))
    assert verify(CacheConfig(verify=str(whole), model=MODEL)).compared.differences.max() < 1e-4


KILLED = """
import os, signal, sys
from distill.cli.main import main
from distill.runs import config_yaml
from distill.teacher import scoring
scoring.SHARD_POSITIONS = 40
write, left = scoring.Store.write, [int(sys.argv[1])]
def dies(store, name, table):
    if not left[0]:
        store.path(name).with_suffix(".tmp").write_bytes(b"half a shard")
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    write(store, name, table)
scoring.Store.write = dies
main(sys.argv[2:])
"""


def test_a15_killed_at_40_percent_and_continued_it_is_the_same_to_the_byte(
    fit_pair: Path, whole: Path, tmp_path: Path
) -> None:
    killed, settings = tmp_path / "killed", tmp_path / "cache.yaml"
    settings.write_text(config_yaml(config_of(fit_pair, killed)))
    count = round(0.4 * len(shards_in(whole)))
    command = [sys.executable, "-c", KILLED, str(count), "cache", "--config", str(settings)]
    threads = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums are split among threads
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=threads, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(shards_in(killed)) == count > 0
    report = made(fit_pair, killed)
    assert 0 < report.num_scored < report.size.positions
    assert shards_in(killed) == shards_in(whole)
    assert not list(killed.glob("*.tmp")) and read_index(killed) == read_index(whole)


MISTAKES = {
    "--top_k 99999": "top_k: 99999 is not legal; expected at most the target's",
    "--sampled 4": "top_k: 8 is not legal; expected 32, the default, beside sampled",
    "--draft nowhere": "draft: 'nowhere' is not legal; expected the directory of a draft",
    "--model.backend lean": "model.backend: 'lean' is not legal; expected auto, eager or prepacked",
    "--verify_positions 3": "verify_positions: 3 is not legal; expected 256, the default, without verify",
    "--verify c": "output: ",
    "--temperature 0": "temperature: 0.0 is not legal; expected a number from 0.01 to 1000",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_told_in_a_line_and_leave_nothing(
    words: str, fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"cache --target {fit_pair / 'target'} --data.train {fit_pair / 'rows.jsonl'} --top_k 8"
    assert cli.main([*command.split(), "--output", str(tmp_path / "c"), *words.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"draftsmith cache: {MISTAKES[words]}")
    assert not (tmp_path / "c").exists()


def test_a_cache_needs_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "--target", "t"]) == 2
    assert "output: none is given; `cache` needs target, output and data.train, or verify" in capsys.readouterr().err


def test_checksums_are_of_whole_files(whole: Path) -> None:
    index = read_index(whole)
    assert index and all(sha256_of(whole / f"{name}.safetensors") == told for name, told in index["shards"].items())
