"""Rows from files, folders and the hub: nothing is lost, and what is bad is named by file and line."""

import json
from pathlib import Path

import pytest

from decode.errors import UsageError
from distill.data.rows import BadRow, Row, check_source, read_rows

ROWS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
LINES = [json.dumps(row).encode() for row in ROWS]
ODD = "a\u2028b\u2029c\u0085d\u000ce"


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def fields(name: str) -> list[dict[str, object]]:
    rows = list(read_rows(name))
    assert all(isinstance(row, Row) for row in rows)
    return [row.fields for row in rows if isinstance(row, Row)]


def test_a06_broken_line_names_physical_line_and_not_its_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n{"text": "secret\n[1]\n7\n{"text": "last"}\n')
    rows = list(read_rows(path))
    assert [(type(row), row.line, row.index) for row in rows] == [
        (Row, 1, 0),
        (BadRow, 3, 1),
        (BadRow, 4, 2),
        (BadRow, 5, 3),
        (Row, 6, 4),
    ]
    bad = [row for row in rows if isinstance(row, BadRow)]
    assert bad[0].source == f"{path}:3" and bad[0].reason.startswith("not valid JSON")
    assert "a list" in bad[1].reason and "a number" in bad[2].reason
    assert not any("secret" in row.reason for row in bad)


@pytest.mark.parametrize("content", [b'{"text": "\xff"}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a06_other_broken_lines_are_bad_rows_too(tmp_path: Path, content: bytes) -> None:
    rows = list(read_rows(write(tmp_path / "a.jsonl", content + b"\n" + LINES[0])))
    assert [type(row) for row in rows] == [BadRow, Row]


@pytest.mark.parametrize(
    "content",
    [
        b"\n".join(LINES) + b"\n",
        b"\n".join(LINES),
        b"\xef\xbb\xbf" + b"\n".join(LINES),
        b"\r\n".join(LINES) + b"\r\n",
        b"\n \t\n" + b"\n\n".join(LINES) + b"\r\n\n",
    ],
    ids=["plain", "no newline at the end", "BOM", "CRLF", "blank lines"],
)
def test_a07_forms_of_the_same_file_give_the_same_rows(tmp_path: Path, content: bytes) -> None:
    assert fields(write(tmp_path / "a.jsonl", content)) == ROWS


@pytest.mark.parametrize("content", [b"", b"  \n\r\n\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a07_empty_file_is_an_error_that_says_so(tmp_path: Path, content: bytes, suffix: str) -> None:
    with pytest.raises(UsageError, match="it is empty"):
        list(read_rows(write(tmp_path / f"a{suffix}", content)))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a08_unusual_line_ends_inside_text_do_not_cut_a_row(tmp_path: Path, suffix: str) -> None:
    odd = ODD.replace("\f", "\\f")  # JSON allows all of them unescaped but the form feed
    path = write(tmp_path / f"a{suffix}", f'{{"text": "{odd}"}}\n'.encode())
    assert fields(path) == [{"text": ODD}]


def test_a09_rows_may_have_any_extra_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "x"}\n{"text": "y", "source": {"a": 1}}\n{"source": []}\n')
    assert [sorted(row) for row in fields(path)] == [["text"], ["source", "text"], ["source"]]


def test_a10_late_and_mixed_types_load(tmp_path: Path) -> None:
    late = (
        b'{"text": "t", "opt": null}\n' * 20_000 + b'{"text": "t", "opt": "x", "meta": 1}\n{"text": "t", "meta": "x"}\n'
    )
    rows = fields(write(tmp_path / "a.jsonl", late))
    assert len(rows) == 20_002 and rows[-2]["opt"] == "x"


def test_json_list_and_json_that_is_jsonl(tmp_path: Path) -> None:
    assert fields(write(tmp_path / "a.json", json.dumps(ROWS, indent=1).encode())) == ROWS
    assert fields(write(tmp_path / "b.json", b"\n".join(LINES))) == ROWS
    rows = list(read_rows(write(tmp_path / "c.json", b'[{"text": "x"}, 3]')))
    assert isinstance(rows[1], BadRow) and rows[1].line == 2
    assert fields(write(tmp_path / "d.json", json.dumps(ROWS[0], indent=1).encode())) == ROWS[:1]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert fields(str(tmp_path / "a.parquet")) == ROWS
    with pytest.raises(UsageError, match=r"b\.parquet: not a readable parquet file"):
        list(read_rows(write(tmp_path / "b.parquet", b"PAR1 nonsense")))


def test_folders_made_by_save_to_disk(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one.select([2])}).save_to_disk(str(tmp_path / "two"))
    datasets.DatasetDict({"train_sft": one, "test_sft": one}).save_to_disk(str(tmp_path / "three"))
    assert fields(str(tmp_path / "one")) == ROWS
    assert fields(str(tmp_path / "two")) == ROWS
    assert fields(f"{tmp_path / 'two'}#test") == ROWS[2:]
    with pytest.raises(UsageError, match="#train_sft"):
        list(read_rows(str(tmp_path / "three")))
    with pytest.raises(UsageError, match="no splits"):
        list(read_rows(f"{tmp_path / 'one'}#test"))


def test_names_that_stand_for_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(name: str, streaming: bool) -> None:
        raise ConnectionError(f"cannot reach the hub for {name}\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for name in ("missing.jsonl", "some/where/else", "../x", str(tmp_path / "none"), "user/data.parquet"):
        with pytest.raises(UsageError, match=r"no such file or folder$"):
            list(read_rows(name))
    with pytest.raises(UsageError, match=r"user/data: .*cannot reach the hub for user/data$"):
        list(read_rows("user/data"))
    with pytest.raises(UsageError, match=r"expected one that ends in \.jsonl, \.json, \.parquet"):
        list(read_rows(write(tmp_path / "a.txt", b"x")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="not a folder made by save_to_disk"):
        list(read_rows(str(tmp_path / "folder")))


def test_a_source_is_checked_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("")
    Path("rows.xml").write_text("")
    Path("folder").mkdir()
    for name in ("rows.jsonl", str(tmp_path / "rows.jsonl"), "folder", "folder#train", "owner/data", "owner/data#test"):
        check_source(name)
    for name, words in (
        ("rows.xml", "unknown kind of file"),
        ("gone.jsonl", "no such file or folder"),
        ("no/such/folder/here", "no such file or folder"),
        (str(tmp_path / "gone"), "no such file or folder"),
    ):
        with pytest.raises(UsageError, match=words):
            check_source(name)
