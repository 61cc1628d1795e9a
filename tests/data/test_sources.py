import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.arguments import DataArguments
from recipe.data.digests import Digests
from recipe.data.sources import Source, Spec, open_sources, read_specs
from recipe.errors import UserError

ROWS = [{"content": "the fox"}, {"content": "a dog"}, {"content": "Hello"}]


@pytest.fixture
def open_one(tmp_path: Path) -> Callable[..., Source]:
    def open_one(path: Any, **fields: Any) -> Source:
        (source,) = open_sources([Spec(str(path), **fields)], Digests(tmp_path / "digests.json"))
        return source

    return open_one


def contents(source: Source) -> list[str]:
    return [row.fields["content"] for chunk in source.chunks() for row in chunk.rows()]


def write_lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    return path


# -- what the keys say -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "train", "test"),
    [
        ({"dataset_name": "a.jsonl"}, [Spec("a.jsonl")], []),
        (
            {
                "dataset_name": "o/n",
                "dataset_config": "c",
                "dataset_train_split": "s",
                "dataset_revision": "r",
                "dataset_test_split": "t",
            },
            [Spec("o/n", "c", "s", "r")],
            [Spec("o/n", "c", "t", "r", key="dataset_test_split")],
        ),
        (
            {"datasets": ["a.csv", {"path": "b", "name": "c", "split": "s", "revision": "r", "text_field": "t"}]},
            [Spec("a.csv", key="datasets[0]"), Spec("b", "c", "s", "r", "t", key="datasets[1]")],
            [],
        ),
        (
            {"datasets": [{"path": "a", "weight": 2}, {"path": "b", "weight": 0.5, "split": None}]},
            [Spec("a", weight=2, key="datasets[0]"), Spec("b", weight=0.5, key="datasets[1]")],
            [],
        ),
        (
            {"datasets": [{"path": "a", "samples": 5}, "b"], "eval_datasets": ["c"]},
            [Spec("a", samples=5, key="datasets[0]"), Spec("b", key="datasets[1]")],
            [Spec("c", key="eval_datasets[0]")],
        ),
        ({"data": ["a", "b"], "dataset_name": "c"}, [Spec("a", key="--data"), Spec("b", key="--data")], []),
        (
            {"data": ["a"], "datasets": [{"path": "c", "weight": 2}], "eval_datasets": ["d"]},
            [Spec("a", key="--data")],
            [Spec("d", key="eval_datasets[0]")],
        ),
    ],
)
def test_keys_name_sources(keys, train, test):
    assert read_specs(DataArguments(**keys)) == (train, test)


A, B = {"path": "a"}, {"path": "b"}
WRONG_KEYS = [
    ({}, "dataset_name is not set; give a file (.jsonl, .json, .csv, .parquet "),
    ({"dataset_name": "a", "datasets": [B]}, "dataset_name and datasets both name the training data; leave one out"),
    ({"datasets": [A, {**B, "wieght": 1}]}, "datasets[1] has the unknown key 'wieght'; known are path, name, split"),
    ({"datasets": [{"name": "a"}]}, "datasets[0] is {'name': 'a'}; give a path, or a mapping with path and any of"),
    ({"datasets": [{"path": None}]}, "datasets[0] is {'path': None}; give a path, or a mapping with path and any of"),
    ({"datasets": [["a"]]}, "datasets[0] is ['a']; give a path, or a mapping with path and any of name, split"),
    ({"datasets": [{"path": 5}]}, "datasets[0].path is 5; give str"),
    ({"datasets": [{**A, "weight": "2"}]}, "datasets[0].weight is '2'; give int or float"),
    ({"datasets": [{**A, "weight": True}]}, "datasets[0].weight is True; give int or float"),
    ({"datasets": [{**A, "samples": 2.5}]}, "datasets[0].samples is 2.5; give int"),
    ({"datasets": [{**A, "weight": 0}]}, "datasets[0].weight is 0; set more than 0"),
    ({"datasets": [{**A, "weight": float("nan")}]}, "datasets[0].weight is nan; set more than 0"),
    ({"datasets": [{**A, "weight": float("inf")}]}, "datasets[0].weight is inf; set more than 0"),
    ({"datasets": [{**A, "samples": 0}]}, "datasets[0].samples is 0; set 1 or more"),
    ({"datasets": [{**A, "weight": 1}, B]}, "datasets[1] has no weight, and others have; give every source a weight"),
    (
        {"datasets": [{**A, "weight": 1, "samples": 5}]},
        "datasets: weight and samples both say how many rows an epoch has; use one of the two",
    ),
    ({"eval_datasets": [{**A, "samples": 5}]}, "eval_datasets: evaluation takes every row once; leave weight and"),
    ({"eval_datasets": [{**A, "weigth": 5}]}, "eval_datasets[0] has the unknown key 'weigth'; known are path"),
    (
        {"eval_samples": 5, "eval_datasets": [A]},
        "eval_samples (5) and eval_datasets are 2 evaluation sets; leave all but one out",
    ),
    (
        {"eval_samples": 5, "eval_datasets": [A], "dataset_test_split": "t"},
        "eval_samples (5) and eval_datasets and dataset_test_split (t) are 3 evaluation sets; leave all but one out",
    ),
    ({"datasets": [A], "dataset_test_split": "t"}, "dataset_test_split 't' is a split of dataset_name, which is not"),
    (
        {"data": ["a"], "dataset_name": "b", "dataset_test_split": "t"},
        "dataset_test_split 't' is a split of dataset_name, which is not",
    ),
]


@pytest.mark.parametrize(("keys", "message"), WRONG_KEYS)
def test_keys_that_do_not_go_together(keys, message):
    named = {} if not keys or {"data", "datasets", "dataset_name"} & keys.keys() else {"dataset_name": "x"}
    with pytest.raises(UserError) as error:
        read_specs(DataArguments(**keys, **named))
    (problem,) = error.value.problems
    assert problem.startswith(message)


def test_all_problems_come_at_once():
    keys = {"datasets": [{"name": "a"}, {**A, "x": 1, "y": 1, "split": 5}], "eval_datasets": [5], "eval_samples": 1}
    with pytest.raises(UserError) as error:
        read_specs(DataArguments(dataset_name="x", **keys))
    asked = [
        "datasets[0]",
        "'x'",
        "'y'",
        "datasets[1].split",
        "dataset_name and datasets",
        "eval_datasets[0]",
        "2 eval",
    ]
    assert len(error.value.problems) == len(asked)
    assert [part for part in asked if part not in str(error.value)] == []


# -- where they are ----------------------------------------------------------------------------------------------------


def test_a_file_can_be_read_again(tmp_path, open_one):
    source = open_one(write_lines(tmp_path / "rows.jsonl", "a", "b"))
    assert contents(source) == contents(source) == ["a", "b"]
    assert (source.size, source.unit) == ((tmp_path / "rows.jsonl").stat().st_size, "B")
    assert (source.name, source.revision, source.notes) == (str(tmp_path / "rows.jsonl"), None, ())


def test_paths_from_home_and_from_here(tmp_path, open_one, monkeypatch):
    write_lines(tmp_path / "[1] rows.jsonl", "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert contents(open_one("~/[1] rows.jsonl")) == ["a"], "what is there is no pattern"
    monkeypatch.chdir(tmp_path)
    assert contents(open_one("[1] rows.jsonl")) == ["a"]


def test_a_glob_takes_files_of_all_formats_by_name(tmp_path, open_one):
    write_lines(tmp_path / "c" / "2.jsonl", "3", "4")
    (tmp_path / "c/1.csv").write_text("content\n1\n2\n")
    pq.write_table(pa.table({"content": ["5"]}), tmp_path / "c/3.parquet")
    (tmp_path / "c/4.folder").mkdir()
    source = open_one(tmp_path / "c" / "*")
    assert contents(source) == ["1", "2", "3", "4", "5"]
    assert source.size == sum(path.stat().st_size for path in (tmp_path / "c").glob("*.*") if path.is_file())
    assert contents(open_one(tmp_path.parent / "**" / tmp_path.name / "**/[23].*")) == ["3", "4", "5"]
    assert [chunk.place(1) for chunk in source.chunks()][1:] == [
        f"{tmp_path}/c/2.jsonl:1",
        f"{tmp_path}/c/3.parquet row 1",
    ]


def test_a_saved_folder_with_splits(tmp_path, open_one):
    splits = {"train": ROWS, "test": ROWS[:1]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
        tmp_path / "saved"
    )
    train, test = open_one(tmp_path / "saved"), open_one(tmp_path / "saved", split="test")
    assert (contents(train), contents(test)) == (["the fox", "a dog", "Hello"], ["the fox"])
    assert (train.size, train.unit, test.name) == (3, "row", f"{tmp_path}/saved (test)")
    assert train.identity != test.identity


def test_a_saved_folder_without_splits(tmp_path, open_one):
    datasets.Dataset.from_list(ROWS).select([2, 0]).save_to_disk(tmp_path / "saved")
    assert contents(open_one(tmp_path / "saved")) == ["Hello", "the fox"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files and saved folders, seen from beside them."""
    write_lines(tmp_path / "rows.jsonl", "a")
    write_lines(tmp_path / "plain/rows.jsonl", "a")
    (tmp_path / "rows.txt").write_text("a")
    (tmp_path / "rows.parquet.gz").write_text("a")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "splits")
    shutil.copytree(tmp_path / "splits", tmp_path / "half")
    shutil.rmtree(tmp_path / "half/test")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/dataset_dict.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("no.jsonl", {}, "dataset_name 'no.jsonl': no such file or folder (looked for {here}/no.jsonl)"),
        ("no.csv.zst", {}, "dataset_name 'no.csv.zst': no such file or folder"),
        ("no.gz", {}, "dataset_name 'no.gz': no such file or folder"),
        ("/nowhere/rows", {}, "dataset_name '/nowhere/rows': no such file or folder"),
        ("./rows", {}, "dataset_name './rows': no such file or folder"),
        ("~/no rows", {}, "dataset_name '~/no rows': no such file or folder"),
        ("no/*.jsonl", {"key": "datasets[1]"}, "datasets[1] 'no/*.jsonl': no file matches (looked from {here})"),
        (
            "rows.txt",
            {},
            "dataset_name 'rows.txt': the name of a file must end in one of .jsonl, .json, .csv, .parquet ",
        ),
        ("rows.parquet.gz", {}, "dataset_name 'rows.parquet.gz': the name of a file must end in one of"),
        ("rows.*", {"key": "--data"}, "--data 'rows.*': the name of a file must end in one of"),
        ("plain", {}, "dataset_name 'plain': the folder was not written by `datasets.save_to_disk`; for the files in "),
        ("rows.jsonl", {"split": "x"}, "dataset_train_split 'x': files have the split 'train' and no other; leave it "),
        (
            "rows.jsonl",
            {"split": "x", "key": "dataset_test_split"},
            "dataset_test_split 'x': files have the split 'train' and no other; leave it out, and for evaluation hold",
        ),
        ("rows.jsonl", {"split": "x", "key": "datasets[0]"}, "datasets[0].split 'x': files have the split 'train'"),
        ("splits", {"split": "x"}, "dataset_train_split 'x' is none of the splits of splits: train, test"),
        ("saved", {"split": "x"}, "dataset_train_split 'x': saved was saved without splits; leave it out"),
        ("half", {}, "dataset_name 'half': half cannot be loaded: "),
        ("broken", {}, "dataset_name 'broken': broken cannot be loaded: "),
    ],
)
def test_what_is_not_there_or_no_data(path, fields, message, folder, open_one):
    with pytest.raises(UserError) as error:
        open_one(path, **fields)
    assert str(error.value).startswith(message.format(here=folder))


def test_every_source_that_is_not_there_is_named(folder):
    specs = [Spec("a.jsonl"), Spec("rows.jsonl"), Spec("plain"), Spec("b.csv")]
    with pytest.raises(UserError) as error:
        open_sources(specs, Digests(folder / "digests.json"))
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        f"dataset_name '{name}'" for name in ("a.jsonl", "plain", "b.csv")
    ]


# -- which content it is -----------------------------------------------------------------------------------------------


def test_identity_of_a_file_is_its_content_and_not_its_place(tmp_path, open_one):
    first = open_one(write_lines(tmp_path / "a.jsonl", "a")).identity
    assert open_one(write_lines(tmp_path / "elsewhere/b.jsonl", "a")).identity == first
    assert open_one(write_lines(tmp_path / "a.jsonl", "b")).identity != first
    shutil.copy(tmp_path / "elsewhere/b.jsonl", tmp_path / "b.csv")
    assert open_one(tmp_path / "b.csv").identity != first, "it is read in another way"


def test_identity_of_a_glob(tmp_path, open_one):
    for name, text in {"1": "a", "2": "b"}.items():
        write_lines(tmp_path / f"one/{name}.jsonl", text)
        write_lines(tmp_path / f"two/x{name}.jsonl", text)
    one, two = open_one(tmp_path / "one/*"), open_one(tmp_path / "two/*")
    assert one.identity == two.identity != open_one(tmp_path / "one/1.*").identity
    shutil.move(tmp_path / "two/x1.jsonl", tmp_path / "two/x3.jsonl")
    assert open_one(tmp_path / "two/*").identity != one.identity, "the order is another"


def test_identity_of_a_saved_folder(tmp_path, open_one):
    def identity(place: str, rows: list[dict[str, str]]) -> str:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / place)
        return open_one(tmp_path / place).identity

    assert identity("a", ROWS) == identity("b", ROWS) != identity("c", ROWS[::-1])
