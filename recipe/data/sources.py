"""Rows as they are on disk or on the Hub: where they come from, which split, and what identifies their content.

Nothing is interpreted here but the file format; what a row must hold is `recipe.data.messages`'s business.
"""

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.arguments import DataArguments
from recipe.errors import UserError


@dataclass(frozen=True)
class Row:
    """One row: its 1-based number in the source's `unit`, and its fields, or why they could not be read."""

    number: int
    fields: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """One split of a data set, not yet read.

    Attributes:
        name: As the user gave it, for messages.
        unit: What `Row.number` counts: 'line' of a .jsonl or .csv file, else 'row'.
        identify: What changes when the content does: a digest of the files, which it reads, or the Hub's fingerprint of
            a revision.
        read: Yields the rows from the first on, anew at each call.
    """

    name: str
    unit: str
    identify: Callable[[], str]
    read: Callable[[], Iterator[Row]]


def open_sources(data_args: DataArguments) -> tuple[Source, Source | None]:
    """Find the training split and, if `dataset_test_split` is set, the evaluation split.

    Raises:
        UserError: no such file, folder, hub id or split; a format that is not known.
    """
    assert data_args.dataset_name is not None, "check() refuses a run without dataset_name"
    train = _open(data_args, "dataset_train_split", data_args.dataset_train_split)
    if data_args.dataset_test_split is None:
        return train, None
    return train, _open(data_args, "dataset_test_split", data_args.dataset_test_split)


def _open(data_args: DataArguments, split_key: str, split: str) -> Source:
    name = str(data_args.dataset_name)
    path = Path(name).expanduser()
    if path.is_file():
        return _open_file(path, split_key, split)
    if path.is_dir():
        return _open_saved(path, split_key, split)
    if path.suffix.lower() in READERS or name.startswith(("/", "./", "../", "~")):
        raise UserError(f"dataset_name '{name}': no such file or folder (looked for {path.absolute()})")
    return _open_hub(name, data_args.dataset_config, split_key, split)


def _open_file(path: Path, split_key: str, split: str) -> Source:
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UserError(f"dataset_name '{path}': a file must end in one of {', '.join(READERS)}, not '{suffix}'")
    if split != "train":
        raise UserError(
            f"{split_key} '{split}': a single file has the split 'train' and no other; "
            "hold rows out of it with eval_samples, or leave the key out"
        )
    unit = "line" if suffix in (".jsonl", ".csv") else "row"
    return Source(str(path), unit, lambda: suffix + digest([path]), lambda: READERS[suffix](path))


def _open_saved(path: Path, split_key: str, split: str) -> Source:
    """A folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise UserError(f"{split_key} '{split}': {path} has the splits {', '.join(splits)}")
        path = path / split
    elif not (path / "dataset_info.json").is_file():
        raise UserError(
            f"dataset_name '{path}': a folder must be one written by datasets.save_to_disk (no dataset_info.json or "
            "dataset_dict.json in it); give one data file instead"
        )
    elif split != "train":
        raise UserError(f"{split_key} '{split}': {path} holds one data set without splits; use eval_samples")
    return Source(
        str(path),
        "row",
        lambda: digest(sorted(path.glob("*.arrow"))),
        lambda: _dataset_rows(datasets.load_from_disk(path)),
    )


def _open_hub(name: str, config: str | None, split_key: str, split: str) -> Source:
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    # DatasetNotFoundError is a FileNotFoundError; an unknown config or split is a ValueError.
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise UserError(
            f"dataset_name '{name}' (dataset_config {config}, {split_key} '{split}') is no file or folder here, and "
            f"could not be loaded from the Hub: {type(error).__name__}: {error}"
        ) from error
    # `_fingerprint` is derived from the builder's cache folder, whose name holds the Hub's revision, and the split.
    identity = f"{name}:{config}:{split}:{dataset._fingerprint}"
    return Source(f"{name} ({split})", "row", lambda: identity, lambda: _dataset_rows(dataset))


def _dataset_rows(dataset: datasets.Dataset) -> Iterator[Row]:
    for number, fields in enumerate(dataset, 1):
        yield Row(number, fields)


def digest(files: list[Path]) -> str:
    """SHA-256 of the content of `files`, in their order, as 64 hexadecimal digits."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _row(number: int, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(number, value)
    return Row(number, {}, f"must be a JSON object, not {type(value).__name__}")


def read_jsonl(path: Path) -> Iterator[Row]:
    """One JSON object a line, UTF-8; empty lines are passed over. A line that does not parse is a problem."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.strip()
            if not line:
                continue
            try:
                yield _row(number, json.loads(line))
            except json.JSONDecodeError as error:
                yield Row(number, {}, f"not valid JSON: {error.msg} at column {error.colno} ({path}:{number})")
            except UnicodeDecodeError as error:
                yield Row(number, {}, f"not UTF-8: {error.reason} at byte {error.start + 1} ({path}:{number})")


def read_json(path: Path) -> Iterator[Row]:
    """A JSON list of objects, read as a whole; a file that does not begin with '[' is taken as JSON lines."""
    with path.open("rb") as file:
        if not file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from read_jsonl(path)
            return
    try:
        values = json.loads(path.read_text("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"dataset_name: not valid JSON: {error.msg} at column {error.colno} ({path}:{error.lineno})"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"dataset_name: {path} is not UTF-8: {error.reason} at byte {error.start + 1}") from None
    for number, value in enumerate(values, 1):
        yield _row(number, value)


def read_csv(path: Path) -> Iterator[Row]:
    """CSV with a header line; every field is text. A row's number is the line on which it ends."""
    csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is shorter than a long document
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for fields in reader:
                too_many = fields.pop(None, None)  # DictReader's key of surplus fields
                problem = f"has {len(too_many)} fields more than the header" if too_many else None
                yield Row(reader.line_num, fields, problem)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"dataset_name: not valid CSV: {error} ({path}:{reader.line_num})") from None


def read_parquet(path: Path) -> Iterator[Row]:
    """A Parquet file, in batches."""
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1000):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(number, fields)
    except pa.ArrowException as error:
        raise UserError(f"dataset_name: {path} is not a readable Parquet file: {error}") from None


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_csv,
}
