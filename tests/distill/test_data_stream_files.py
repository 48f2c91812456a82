"""What streamed files may hold, what is told and refused of them, and how a change of them is seen."""

import json
from pathlib import Path

import pytest

from decode.errors import UsageError
from distill.config import DataConfig, TeacherConfig
from distill.data import stream as stream_file
from distill.data.feed import content_sha256, data_lines
from distill.data.rows import read_rows, source_sha256
from distill.data.stream_module import StreamedDataModule
from tests.distill.test_data_stream import config_of, numbers, opened, write_shards


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return write_shards(tmp_path)


def test_the_report_is_of_the_first_buffer(files: list[str]) -> None:
    config = config_of(files)
    data, feed = opened(config)
    lines = data_lines(data, feed, config)
    assert lines[0] == "data: streamed, 10 rows at a time; the first 10:"
    assert lines[1].startswith("data: ") and " examples of 10 rows: " in lines[1]
    assert lines[-1].startswith("run: 40 steps of 4 sequences (2 in a batch, 2 accumulated); packed up to 16 tokens, ")
    assert feed.closing_lines() == []
    numbers(feed, 0, 40)
    assert feed.closing_lines()[0].endswith(f"dropped: {stream_file.HELD_OUT}")


def test_bad_rows_of_a_stream_stop_it_or_are_counted(tmp_path: Path) -> None:
    rows = [json.dumps({"input_ids": [n, 1, 2], "mask": [0, 1, 1]}) for n in range(30)]
    rows[25] = rows[27] = "broken"
    (tmp_path / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    name = str(tmp_path / "a.jsonl")
    _, feed = opened(config_of([name]))
    with pytest.raises(UsageError, match=r"a\.jsonl:26: not valid JSON"):
        numbers(feed, 0, 40)
    _, feed = opened(config_of([name], data={"on_bad_row": "skip"}))
    numbers(feed, 0, 40)
    assert isinstance(feed, StreamedDataModule)
    assert len(feed.stream.report.bad_rows) == 1 and feed.stream.report.num_forgotten >= 3
    assert "bad rows" in feed.closing_lines()[-1]


def test_a_stream_with_nothing_to_train_on_is_an_error_not_an_endless_search(tmp_path: Path) -> None:
    rows = [json.dumps({"input_ids": [n, 1, 2], "mask": [0, 0, 0]}) for n in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "v.jsonl").write_text(json.dumps({"text": "abc"}), encoding="utf-8")
    config = config_of([str(tmp_path / "a.jsonl")], data={"validation": [str(tmp_path / "v.jsonl")]})
    with pytest.raises(UsageError, match=r"no example is left; .*dropped: no supervised token"):
        numbers(opened(config)[1], 0, 1)


def test_what_a_stream_cannot_do_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"max_steps: none is given .* data.streaming needs it, for the rows are not"):
        config_of(["a"], max_steps=None)
    with pytest.raises(UsageError, match=r"max_steps: none is given .max_epochs: 3.; data.streaming needs it"):
        config_of(["a"], max_steps=None, max_epochs=3)
    with pytest.raises(UsageError, match=r"max_epochs: 3 is not legal; expected null with data.streaming"):
        config_of(["a"], max_epochs=3)
    with pytest.raises(UsageError, match=r"teacher.kind: 'cached' is not legal; expected online with data.streaming"):
        config_of(["a"], teacher=TeacherConfig(kind="cached"))
    with pytest.raises(UsageError, match=r"data.shuffle_buffer: 5 is not legal; expected 2000, the default"):
        DataConfig(["a"], shuffle_buffer=5)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UsageError, match=r"a\.json: a .json file is read as a whole, not streamed"):
        opened(config_of([str(tmp_path / "a.json")]))


def test_a_stream_is_known_by_what_its_files_hold(files: list[str]) -> None:
    data, _ = opened(config_of(files))
    before = content_sha256(data, "x")
    assert content_sha256(data, "y") != before == content_sha256(opened(config_of(files))[0], "x")
    Path(files[2]).write_text(Path(files[2]).read_text().replace("9", "8"))
    assert content_sha256(data, "x") != before


def test_data_sets_are_streamed_from_any_row_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"text": f"row {n}"} for n in range(9)])
    rows.save_to_disk(str(tmp_path / "saved"))
    streamed = rows.to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda name, streaming: {"train": streamed} if streaming else None)
    for name in (str(tmp_path / "saved"), "user/data"):
        found = list(read_rows(name, 6, streaming=True))
        assert [(row.index, row.line) for row in found] == [(6, 7), (7, 8), (8, 9)]
        assert [row.fields["text"] for row in found] == ["row 6", "row 7", "row 8"]
        assert list(read_rows(name, 9, streaming=True)) == []
        assert source_sha256(name) == source_sha256(name)
