import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from recipe.data.messages import detect_kind
from recipe.data.sources import open_sources
from recipe.errors import UserError

ROWS = [{"content": "the fox"}, {"content": 'a dog, é\n"two" 字'}, {"content": "Hello"}]


def rows_of(source):
    return [(row.number, row.fields) for row in source.read()]


def write_as(suffix: str, path: Path) -> str:
    path = path / f"rows{suffix}"
    table = pa.Table.from_pylist(ROWS)
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv", ""])
def test_every_format_gives_the_same_rows(suffix, tmp_path, data_args):
    source, test = open_sources(data_args(write_as(suffix, tmp_path)))
    assert [fields for _, fields in rows_of(source)] == ROWS
    assert test is None
    # The row in the middle spans two lines of a .csv file.
    assert [number for number, _ in rows_of(source)] == ([2, 4, 5] if suffix == ".csv" else [1, 2, 3])
    assert rows_of(source) == rows_of(source), "a source can be read again"


def test_line_numbers_count_empty_lines_and_a_byte_order_mark_is_no_content(tmp_path, data_args):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"content": "a"}\n\n{"content": "b"}')
    assert rows_of(open_sources(data_args(str(path)))[0]) == [(1, {"content": "a"}), (3, {"content": "b"})]


def test_json_file_may_hold_json_lines(tmp_path, data_args):
    path = tmp_path / "rows.json"
    path.write_text('{"content": "a"}\n{"content": "b"}\n')
    assert len(rows_of(open_sources(data_args(str(path)))[0])) == 2


def test_identity_is_the_content_and_not_the_place(tmp_path, data_args):
    def identity(path: Path, text: str) -> str:
        path.write_text(text)
        return open_sources(data_args(str(path)))[0].identify()

    first = identity(tmp_path / "a.jsonl", '{"content": "a"}\n')
    assert identity(tmp_path / "b.jsonl", '{"content": "a"}\n') == first
    assert identity(tmp_path / "a.jsonl", '{"content": "b"}\n') != first


def test_splits_of_a_saved_folder(tmp_path, data_args):
    path = str(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(path)
    train, test = open_sources(data_args(path, dataset_test_split="test"))
    assert len(rows_of(train)) == 3 and len(rows_of(test)) == 1
    assert train.identify() != test.identify()
    with pytest.raises(UserError, match=r"dataset_test_split 'dev': .*saved has the splits train, test"):
        open_sources(data_args(path, dataset_test_split="dev"))
    with pytest.raises(UserError, match=r"dataset_train_split 'dev'"):
        open_sources(data_args(path, dataset_train_split="dev"))


def test_saved_folder_without_splits_has_no_test_split(tmp_path, data_args):
    path = write_as("", tmp_path)
    with pytest.raises(UserError, match="dataset_test_split 'test': .* without splits; use eval_samples"):
        open_sources(data_args(path, dataset_test_split="test"))


@pytest.mark.parametrize("name", ["rows.jsonl", "/nowhere/rows", "./rows"])
def test_missing_path(name, data_args):
    with pytest.raises(UserError, match=f"dataset_name '{name}': no such file or folder"):
        open_sources(data_args(name))


def test_file_errors(tmp_path, data_args):
    (tmp_path / "rows.txt").write_text("the fox")
    with pytest.raises(UserError, match=r"must end in one of .jsonl, .json, .parquet, .csv, not '.txt'"):
        open_sources(data_args(str(tmp_path / "rows.txt")))
    with pytest.raises(UserError, match="dataset_test_split 'test': a single file has the split 'train' and no other"):
        open_sources(data_args(write_as(".jsonl", tmp_path), dataset_test_split="test"))
    with pytest.raises(UserError, match="a folder must be one written by datasets.save_to_disk"):
        open_sources(data_args(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'[{"content": "a"},\n {"content": }]', r"not valid JSON: .* \(.*rows.json:2\)"),
        ("rows.json", b'[{"content": "\xff"}]', "is not UTF-8: invalid start byte at byte 15"),
        ("rows.csv", b'content\n"never closed', r"not valid CSV: .* \(.*rows.csv:\d\)"),
        ("rows.parquet", b"PAR1 not", "is not a readable Parquet file"),
    ],
)
def test_file_that_cannot_be_read(name, content, message, tmp_path, data_args):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        rows_of(open_sources(data_args(str(tmp_path / name)))[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"content": "a"}\n{"content": \n', r"not valid JSON: .* at column 12 \(.*rows.jsonl:2\)"),
        (b'{"content": "a"}\n{"content": "\xff"}\n', r"not UTF-8: invalid start byte at byte 14 \(.*rows.jsonl:2\)"),
        (b'{"content": "a"}\n["a"]\n', "must be a JSON object, not list"),
    ],
)
def test_line_that_cannot_be_read_is_a_problem_of_that_line(content, message, tmp_path, data_args):
    (tmp_path / "rows.jsonl").write_bytes(content)
    first, second = open_sources(data_args(str(tmp_path / "rows.jsonl")))[0].read()
    assert first.problem is None and second.number == 2
    with pytest.raises(UserError, match=message):
        raise UserError(second.problem)


def test_csv_row_with_too_many_fields(tmp_path, data_args):
    (tmp_path / "rows.csv").write_text("content\na,b\n")
    (row,) = open_sources(data_args(str(tmp_path / "rows.csv")))[0].read()
    assert row.problem == "has 1 fields more than the header"


def test_hub_id_that_cannot_be_loaded(monkeypatch, data_args):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="dataset_name 'nobody/nothing' .* could not be loaded from the Hub"):
        open_sources(data_args("nobody/nothing"))


def test_hub_id_is_loaded_with_config_and_split(tmp_path, monkeypatch, data_args):
    """The Hub itself is out of reach of a test: a folder of Parquet files goes the same way through `load_dataset`."""
    load_dataset = datasets.load_dataset
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        pa.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "hub" / f"{split}-0.parquet")

    def load_folder(name, config, split):
        assert (name, config) == ("owner/name", "default")
        return load_dataset(str(tmp_path / "hub"), config, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_folder)
    args = data_args("owner/name", dataset_config="default", dataset_test_split="test")
    train, test = open_sources(args)
    assert [fields for _, fields in rows_of(train)] == ROWS
    assert (train.identify(), test.identify()) == tuple(source.identify() for source in open_sources(args))
    assert train.identify() != test.identify()
    with pytest.raises(UserError, match="dataset_test_split 'dev'.* ValueError: Unknown split"):
        open_sources(data_args("owner/name", dataset_config="default", dataset_test_split="dev"))


def test_kind_is_told_by_the_first_readable_row(write, data_args, tmp_path):
    def kind(rows, text_field="text"):
        return detect_kind(open_sources(data_args(write(rows)))[0], text_field)

    assert kind([{"messages": []}, {"text": "a"}]) == "chat"
    assert kind([{"messages": [], "text": "a"}]) == "chat"
    assert kind([["a list"], {"content": "a"}], "content") == "text"
    with pytest.raises(UserError, match=r"dataset_text_field's 'text' \(text\); line 1 has instruction, output; set"):
        kind([{"instruction": "a", "output": "b"}])
    with pytest.raises(UserError, match="the data set is empty"):
        kind([])
    with pytest.raises(UserError, match="no row can be read; line 1 must be a JSON object, not list"):
        kind([["a"], ["b"]])
