"""Streamed rows: each once an epoch, a buffer of them in memory, the same order in every start."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer

from decode.errors import UsageError
from distill.config import DataConfig, FitConfig, JudgeConfig, OptimizerConfig
from distill.data import stream as stream_file
from distill.data.feed import make_feed
from distill.data.module import DraftDataModule
from distill.data.rows import read_rows
from distill.data.split import Data, load_data
from distill.data.stream_module import StreamedDataModule
from tests.distill.test_data_module import Recorder
from tests.fit_runs import QUIET
from tests.fixtures import byte_tokenizer

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

SHARDS = 4


def write_shards(folder: Path, count: int = 40) -> list[str]:
    """Rows 0 to count - 1 over four files of two kinds; a row's number is its first token, and its second prompt."""
    import pyarrow
    import pyarrow.parquet

    names = []
    for shard in range(SHARDS):
        rows = [
            {"input_ids": [n, 7, *[9] * (1 + n % 5)], "mask": [0, 0, *[1] * (1 + n % 5)]}
            for n in range(shard * count // SHARDS, (shard + 1) * count // SHARDS)
        ]
        if shard % 2:
            names.append(str(folder / f"{shard}.parquet"))
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), names[-1], row_group_size=3)
        else:
            names.append(str(folder / f"{shard}.jsonl"))
            Path(names[-1]).write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return names


def config_of(files: list[str], **options: Any) -> FitConfig:
    data = {"max_length": 16, "batch_size": 2, "shuffle_buffer": 10, "validation_fraction": 0.4}
    return FitConfig(
        target="t",
        draft="d",
        output="o",
        data=DataConfig(files, streaming=True, **{**data, **options.pop("data", {})}),
        optimizer=OptimizerConfig(accumulate=2),
        judge=JudgeConfig(every_n_steps=2),
        **{"max_steps": 40, **options},
    )


def opened(config: FitConfig) -> tuple[Data, DraftDataModule]:
    data = load_data(config.data, byte_tokenizer(), 259, config.seed)
    return data, make_feed(data, config)


def numbers(feed: DraftDataModule, start: int, stop: int) -> list[list[list[int]]]:
    """The rows of each sequence of each step, by their numbers."""
    return [
        [[examples[i].input_ids[0] for i in members] for micro_batch in window for members in micro_batch]
        for window, examples in feed.windows(start, stop)
    ]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [number for step in steps for members in step for number in members]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return write_shards(tmp_path)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("buffer", [1, 7, 10, 40, 1000])
def test_a18_every_row_comes_once_an_epoch_in_shuffled_order(files: list[str], packing: bool, buffer: int) -> None:
    data, feed = opened(config_of(files, data={"packing": packing, "shuffle_buffer": buffer, "validation": [files[0]]}))
    order = flat(numbers(feed, 0, 40))
    trained = set(range(10, 40))
    for epoch in range(len(order) // 30):
        part = order[epoch * 30 : (epoch + 1) * 30]
        assert set(part) == trained and len(part) == 30  # none is lost, none repeated
    assert len(order) > 60
    if buffer > 1:
        assert order[:30] != sorted(order[:30]) and order[:30] != order[30:60]
    assert {number // 10 for number in order[:4]} == {1} or buffer > 10  # not beyond the buffer
    assert data.stream and data.stream.report.dropped[stream_file.HELD_OUT] >= 10


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 15])
def test_a18_a_stream_goes_on_where_it_stopped(files: list[str], stop: int) -> None:
    config = config_of(files)
    whole = numbers(opened(config)[1], 0, 30)
    begun = opened(config)[1]
    first = numbers(begun, 0, stop)
    kept = json.loads(json.dumps(begun.state_dict()))
    _, resumed = opened(config)
    resumed.load_state_dict(kept)
    assert first + numbers(resumed, stop, 30) == whole
    assert resumed.tokens_seen(30) == opened(config)[1].tokens_seen(30)
    assert numbers(opened(config)[1], stop, 30) == whole[stop:]  # without the mark, from the beginning
    repeated = opened(config)[1]
    repeated.load_state_dict({**kept, "pack": 0, "row": 0})
    assert numbers(repeated, stop, 30) != whole[stop:] or (kept["pack"], kept["row"]) == (0, 0)


def test_r01_a_run_resumed_from_a_checkpoint_sees_what_an_uninterrupted_one_does(
    files: list[str], tmp_path: Path
) -> None:
    def train(segments: int, resume: Path | None = None) -> Recorder:
        recorder, (_, feed) = Recorder(), opened(config_of(files, max_steps=12))
        trainer = Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            max_epochs=segments,
            accumulate_grad_batches=2,
            reload_dataloaders_every_n_epochs=1,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(recorder, datamodule=feed, ckpt_path=resume, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{segments}.ckpt")
        return recorder

    whole = train(6).seen
    parts = [train(1).seen, train(3, tmp_path / "1.ckpt").seen, train(6, tmp_path / "3.ckpt").seen]
    assert [row for part in parts for row in part] == whole
    assert [len(part) for part in parts] == [4, 8, 12]


def test_a_resumed_stream_skips_rows_without_encoding_them(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, begun = opened(config_of(files))
    numbers(begun, 0, 3)
    _, resumed = opened(config_of(files))
    resumed.load_state_dict(begun.state_dict())
    assert isinstance(resumed, StreamedDataModule)
    made: list[int] = []
    make = resumed.stream.maker.make
    monkeypatch.setattr(resumed.stream.maker, "make", lambda row, report: made.append(row.index) or make(row, report))
    numbers(resumed, 3, 4)
    assert 0 < len(made) <= 20


def test_no_more_than_a_buffer_of_rows_is_read_ahead(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = Counter[str]()

    def counting(name: str, first: int = 0, streaming: bool = False) -> Iterator[Any]:
        for row in read_rows(name, first, streaming):
            pulled[name] += 1
            yield row

    monkeypatch.setattr(stream_file, "read_rows", counting)
    big = write_shards(Path(files[0]).parent, 240)
    _, feed = opened(config_of(big, data={"shuffle_buffer": 20}))
    assert pulled.total() == 20
    pulled.clear()
    windows = feed.windows(0, 40)
    next(windows)
    assert pulled.total() == 20  # of 240
    for _ in itertools.islice(windows, 5):
        pass
    assert pulled.total() <= 120 and max(pulled.values()) <= 60  # no file is read again for each buffer


def test_a17_rows_are_held_out_by_their_prompt_wherever_they_stand(files: list[str]) -> None:
    data, feed = opened(config_of(files, data={"validation_fraction": 0.4}))
    held_out = {example.input_ids[0] for example in data.validation}
    assert held_out and held_out < set(range(10))  # of the first buffer
    once = set(flat(numbers(feed, 0, 40)))
    assert not once & held_out and 5 < len(once) < 36
    again, other = opened(config_of(files, seed=5, data={"validation_fraction": 0.4}))
    assert [e.source for e in again.validation] == [e.source for e in data.validation]
    assert set(flat(numbers(other, 0, 40))) == once
    assert numbers(other, 0, 4) != numbers(feed, 0, 4)
    with pytest.raises(UsageError, match=r"data.validation_fraction: 1e-06 holds out none of the first 10 rows"):
        opened(config_of(files, data={"validation_fraction": 1e-6}))


def test_ranks_share_each_micro_batch_of_a_stream(files: list[str]) -> None:
    config = config_of(files)
    whole = [batch for n in range(3) for batch in opened(config)[1].segment(n)]
    ranks = [[batch for n in range(3) for batch in opened(config)[1].segment(n, rank, 2)] for rank in range(2)]
    for batch, first, second in zip(whole, *ranks, strict=True):
        assert batch.normaliser == first.normaliser == second.normaliser
        tokens = [int((b.example_ids >= 0).sum()) for b in (batch, first, second)]
        assert tokens[0] == tokens[1] + tokens[2] and len(first.input_ids) == len(second.input_ids) == 1


def test_tokens_seen_counts_what_has_come(files: list[str]) -> None:
    _, feed = opened(config_of(files))
    assert feed.tokens_seen(0) == 0
    told = [0]
    for segment in range(4):
        batches = list(feed.segment(segment))
        told.append(told[-1] + sum(int((batch.example_ids >= 0).sum()) for batch in batches))
        assert feed.tokens_seen(feed.steps_done(segment + 1)) == told[-1]
