"""Data files as chunks of rows: JSON lines, JSON, CSV and Parquet, the text formats also compressed (.gz, .zst).

Nothing is interpreted but the file format. JSON lines are parsed in the workers; the process that reads only finds
where lines end.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from recipe.data.rows import CHUNK_ROWS, MAX_ROW_BYTES, BadRow, Chunk, Row, parse_json
from recipe.data.tables import read_parquet
from recipe.errors import UserError

CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
TOO_LARGE = f"larger than {MAX_ROW_BYTES >> 20} MiB"


@dataclass(frozen=True)
class Lines:
    """Lines of a JSON lines file; None stands for one that is too large."""

    path: str
    first: int
    lines: list[bytes | None]
    size: int

    def rows(self) -> Iterator[Row]:
        for number, line in enumerate(self.lines, self.first):
            if line is None:
                yield Row(number, {}, BadRow(TOO_LARGE))
            elif line.strip():
                yield _parse(number, line)

    def place(self, number: int) -> str:
        return f"{self.path}:{number}"


@dataclass(frozen=True)
class Values:
    """Rows that the reading process has parsed, with the line on which each begins (JSON) or ends (CSV)."""

    path: str
    values: list[tuple[int, Any, BadRow | None]]
    size: int

    def rows(self) -> Iterator[Row]:
        for number, value, problem in self.values:
            yield _row(number, value) if problem is None else Row(number, {}, problem)

    def place(self, number: int) -> str:
        return f"{self.path}:{number}"


def _parse(number: int, line: bytes) -> Row:
    try:
        return _row(number, parse_json(line))
    except BadRow as problem:
        return Row(number, {}, problem)


def _row(number: int, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(number, value)
    return Row(number, {}, BadRow("not a JSON object", f"but {type(value).__name__}"))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The decompressed content, and how many bytes of the file have been read.

    Raises:
        UserError: the file ends early, or is not compressed as its name says.
    """
    try:
        with path.open("rb") as raw:
            suffix = path.suffix.lower()
            if suffix == ".gz":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw.tell
            elif suffix == ".zst":
                stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
                yield io.BufferedReader(stream, CHUNK_BYTES), raw.tell
            else:
                yield raw, raw.tell
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error or type(error).__name__}") from None


def read_lines(path: Path) -> Iterator[Chunk]:
    """One JSON object a line, UTF-8; empty lines are passed over. A line that does not parse is a bad row."""
    with _opened(path) as (file, position):
        number, before = 1, 0
        lines: list[bytes | None] = []
        first, held = number, 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            kept: bytes | None = line
            while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                kept, line = None, file.readline(MAX_ROW_BYTES + 1)
            if number == 1 and kept is not None:
                kept = kept.removeprefix(BOM)
            lines.append(kept)
            held += len(kept or b"")
            number += 1
            if len(lines) == CHUNK_ROWS or held > CHUNK_BYTES:
                yield Lines(str(path), first, lines, position() - before)
                before, lines, first, held = position(), [], number, 0
        if lines:
            yield Lines(str(path), first, lines, position() - before)


def read_json(path: Path) -> Iterator[Chunk]:
    """A JSON list of objects, read as a whole; a file that does not begin with '[' is taken as JSON lines."""
    with _opened(path) as (file, _):
        content = file.read(4096).removeprefix(BOM)
        is_list = content.lstrip().startswith(b"[")
        if is_list:
            content += file.read()
    if not is_list:
        yield from read_lines(path)
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8: {error.reason}; write the file anew as UTF-8") from None
    yield from _chunked(str(path), _items(path, text), path.stat().st_size)


def _items(path: Path, text: str) -> Iterator[tuple[int, Any, None]]:
    """The items of the list `text`, each with the line on which it begins."""
    decoder = json.JSONDecoder()
    at, line, counted = text.index("[") + 1, 1, 0
    first = True
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == "]":
            at = _skip(text, at + 1)
            if at < len(text):
                _refuse(path, text, at, "more after the end of the list")
            return
        if not first:
            if text[at : at + 1] != ",":
                _refuse(path, text, at, "expected ',' or ']'")
            at = _skip(text, at + 1)
        first = False
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            _refuse(path, text, error.pos, error.msg)
        except RecursionError:
            _refuse(path, text, at, "nested too deeply")
        except ValueError as error:  # a number of thousands of digits
            _refuse(path, text, at, str(error))
        yield line, value, None


def _skip(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _refuse(path: Path, text: str, at: int, why: str) -> None:
    line = text.count("\n", 0, at) + 1
    raise UserError(f"{path}:{line}: not valid JSON: {why} at column {at - text.rfind(chr(10), 0, at)}")


def read_csv(path: Path) -> Iterator[Chunk]:
    """CSV with a header line; every field is text. A row's number is the line on which it ends."""
    # The default, 128 KiB, is shorter than a long document; without any, a quote that is not closed takes all the rest.
    csv.field_size_limit(MAX_ROW_BYTES)
    ended = 0
    with _opened(path) as (file, position):
        # What is not UTF-8 is of one row, and text is decoded in blocks ahead of the rows.
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(text, strict=True)

        def values() -> Iterator[tuple[int, Any, BadRow | None]]:
            nonlocal ended
            if reader.fieldnames:
                ended = reader.line_num
            for fields in reader:
                ended = reader.line_num
                surplus = cast(list[str], fields.pop(None, []))  # DictReader's key of surplus fields
                yield ended, fields, _csv_problem(fields, surplus)

        try:
            yield from _chunked(str(path), values(), path.stat().st_size, position)
        except csv.Error as error:
            raise UserError(f"{path}:{ended + 1}: not valid CSV: {error}; mend the row that begins there") from None


def _csv_problem(fields: dict[str, str | None], surplus: list[str]) -> BadRow | None:
    values = [value for value in fields.values() if value is not None]
    if surplus or len(values) < len(fields):
        which = f"{len(surplus)} more" if surplus else f"{len(fields) - len(values)} fewer"
        return BadRow("not as many fields as the header", which)
    try:
        "".join([*fields, *values]).encode()
    except UnicodeEncodeError as error:
        return BadRow("not UTF-8", f"byte {ord(error.object[error.start]) - 0xDC00:#x}")
    return None


def _chunked(
    path: str, values: Iterator[tuple[int, Any, BadRow | None]], total: int, position: Callable[[], int] | None = None
) -> Iterator[Chunk]:
    held: list[tuple[int, Any, BadRow | None]] = []
    before = 0
    for value in values:
        held.append(value)
        if len(held) == CHUNK_ROWS:
            now = position() if position else before
            yield Values(path, held, now - before)
            before, held = now, []
    yield Values(path, held, total - before)


READERS: dict[str, Callable[[Path], Iterator[Chunk]]] = {
    ".jsonl": read_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
COMPRESSED = (".gz", ".zst")


def format_of(path: Path) -> str | None:
    """The key of `READERS` that the name of `path` asks for; None where there is none."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    suffix = plain.suffix.lower()
    if suffix not in READERS or (plain != path and suffix == ".parquet"):
        return None
    return suffix
