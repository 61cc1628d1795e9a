"""Arrow tables as chunks of rows: Parquet files, and data sets of `datasets`; with what Arrow does to rows undone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.data.rows import CHUNK_ROWS, BadRow, Chunk, Row, parse_json
from recipe.errors import UserError


@dataclass(frozen=True)
class Table:
    """Rows of a Parquet file or an Arrow data set."""

    path: str
    first: int
    table: pa.Table
    size: int

    def rows(self) -> Iterator[Row]:
        columns = {field.name: _reader(field.type) for field in self.table.schema}
        readers = {name: read for name, read in columns.items() if read is not None}
        try:
            rows = self.table.to_pylist()
        except (ValueError, OverflowError):  # of some of the rows: text that is not UTF-8, a date after the year 9999
            rows = [self._fields(at) for at in range(self.table.num_rows)]
        for number, fields in enumerate(rows, self.first):
            yield Row(number, {}, fields) if isinstance(fields, BadRow) else _read(number, fields, readers)

    def _fields(self, at: int) -> dict[str, Any] | BadRow:
        try:
            (fields,) = self.table.slice(at, 1).to_pylist()
        except (ValueError, OverflowError) as error:
            return BadRow("a value that cannot be read", str(error))
        return fields

    def place(self, number: int) -> str:
        return f"{self.path} row {number}"


def _reader(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes of a value that Arrow gives the one that was written; None where it is that already.

    JSON is decoded: `datasets` writes values of mixed types so (its feature `Json`), alone or inside lists and structs.
    And a struct has a null for each key of the column that the row did not have, so the keys of nulls are left out.
    That cannot be told from a null that was written, unlike in JSON, where nulls stay.
    """
    if isinstance(kind, pa.JsonType):
        return lambda text: None if text is None else parse_json(text)
    if pa.types.is_struct(kind):
        keys = [(field.name, _reader(field.type)) for field in kind.fields]
        return lambda value: (
            None
            if value is None
            else {key: read(value[key]) if read else value[key] for key, read in keys if value[key] is not None}
        )
    is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    if any(matches(kind) for matches in (*is_list, pa.types.is_large_list_view)):
        read = _reader(kind.value_type)
        return read and (lambda items: None if items is None else [read(item) for item in items])
    return None


def _read(number: int, fields: dict[str, Any], readers: dict[str, Callable[[Any], Any]]) -> Row:
    column = ""
    try:
        for column, read in readers.items():
            fields[column] = read(fields[column])
    except BadRow as problem:
        return Row(number, {}, BadRow(problem.reason, f"'{column}': {problem.detail}"))
    return Row(number, fields)


def read_parquet(path: Path) -> Iterator[Chunk]:
    """A Parquet file, in batches."""
    try:
        with pq.ParquetFile(path) as file:
            first, share = 1, path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=CHUNK_ROWS):
                yield Table(str(path), first, pa.Table.from_batches([batch]), round(share * batch.num_rows))
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from None


def read_dataset(name: str, dataset: datasets.Dataset) -> Iterator[Chunk]:
    """A data set of `datasets`, in batches; its size counts rows."""
    for first in range(0, len(dataset), CHUNK_ROWS):
        rows = range(first, min(first + CHUNK_ROWS, len(dataset)))
        part = dataset.select(rows).with_format("arrow")[:]
        # A slice would be sent to a worker with all of the buffers that it is a slice of.
        yield Table(name, first + 1, part.take(np.arange(len(rows))), len(rows))
