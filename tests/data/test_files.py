import csv
import gzip
import io
import json
import pickle
import tracemalloc
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.data.digests import Digests
from recipe.data.files import READERS, format_of
from recipe.data.rows import MAX_ROW_BYTES, Chunk
from recipe.data.sources import Spec, open_sources
from recipe.data.tables import Table, read_dataset
from recipe.errors import UserError

ROWS = [{"content": "the fox"}, {"content": 'a dog, é\n"two" 字'}, {"content": "Hello"}]
TEXTS = [suffix + packed for suffix in (".jsonl", ".json", ".csv") for packed in ("", ".gz", ".zst")]
GOOD = b'{"content": "a"}'
BOM = b"\xef\xbb\xbf"


def encoded(rows: list[dict[str, str]], suffix: str) -> bytes:
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if suffix == ".json":
        return json.dumps(rows, indent=2, ensure_ascii=False).encode()
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), sink := io.BytesIO())
        return sink.getvalue()
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix.lower() == ".gz":
        return gzip.compress(content)
    return pa.compress(content, "zstd", asbytes=True) if suffix == ".zst" else content


def chunks_of(path: Path, content: bytes) -> list[Chunk]:
    path.write_bytes(content)
    return list(READERS[str(format_of(path))](path))


def rows_of(chunks: Iterable[Chunk]) -> list[tuple[str, object]]:
    """The place in its file of each row, with its fields, or why there are none."""
    found: list[tuple[str, object]] = []
    for chunk in chunks:
        for row in chunk.rows():
            place = chunk.place(row.number)
            found.append((Path(place).name, str(row.problem) if row.problem else row.fields))
    return found


def numbers_of(rows: list[tuple[str, object]]) -> list[int]:
    return [int(place.replace(":", " ").split()[-1]) for place, _ in rows]


@pytest.mark.parametrize("suffix", [*TEXTS, ".parquet", ".JSONL.GZ"])
def test_every_format_gives_the_same_rows_and_their_places(suffix, tmp_path):
    path = tmp_path / f"rows{suffix}"
    plain = format_of(path)
    rows = rows_of(chunks_of(path, compressed(encoded(ROWS, plain), path.suffix)))
    assert [fields for _, fields in rows] == ROWS
    # A list's items begin, and rows of CSV end, where their places say; the second row has a line break.
    places = {".jsonl": ":1 :2 :3", ".json": ":2 :5 :8", ".csv": ":2 :4 :5", ".parquet": "@row@1 @row@2 @row@3"}[plain]
    assert [place for place, _ in rows] == [path.name + place.replace("@", " ") for place in places.split()]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_lines_are_counted_with_empty_ones_and_a_byte_order_mark_is_no_content(name, tmp_path):
    content = BOM + b'\n{"content": "a"}\r\n\n  \n{"content": "b"}'
    assert rows_of(chunks_of(tmp_path / name, content)) == [
        (f"{name}:2", {"content": "a"}),
        (f"{name}:5", {"content": "b"}),
    ]


@pytest.mark.parametrize(
    ("name", "before"),
    [("rows.jsonl", BOM), ("rows.json", BOM), ("rows.csv", BOM), ("rows.json", BOM + b"\n "), ("rows.json", b"\n")],
)
def test_a_byte_order_mark_and_empty_lines_before_the_rows(name, before, tmp_path):
    content = before + encoded(ROWS, Path(name).suffix)
    assert [fields for _, fields in rows_of(chunks_of(tmp_path / name, content))] == ROWS


@pytest.mark.parametrize("name", [f"rows{suffix}" for suffix in TEXTS])
def test_a_file_without_content_has_no_rows(name, tmp_path):
    assert rows_of(chunks_of(tmp_path / name, compressed(b"", Path(name).suffix))) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"content": ', "not valid JSON: Expecting value at column 14"),
        (b'{"content": "\xff"}', "not UTF-8: invalid start byte at byte 14"),
        (b'{"content": "' + b"a" * (10 << 20) + b'"}', "larger than 4 MiB"),
        (b"[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
        (b'{"content": ' + b"1" * 5_000 + b"}", "not valid JSON: Exceeds the limit (4300 digits)"),
        (b'["a"]', "not a JSON object: but list"),
        (b"null", "not a JSON object: but NoneType"),
    ],
)
def test_a_line_that_is_no_row_leaves_its_neighbours(line, why, tmp_path):
    first, bad, last = rows_of(chunks_of(tmp_path / "rows.jsonl", b"\n".join([GOOD, line, GOOD])))
    assert (first[1], last) == ({"content": "a"}, ("rows.jsonl:3", {"content": "a"}))
    assert bad[0] == "rows.jsonl:2" and bad[1].startswith(why)


@pytest.mark.parametrize(("surplus", "end"), [(0, b"\n"), (0, b""), (1, b"\n"), (1, b"")])
def test_how_large_a_row_may_be(surplus, end, tmp_path):
    row = b'"' + b"a" * (MAX_ROW_BYTES - 2 + surplus) + b'"'
    ((_, why),) = rows_of(chunks_of(tmp_path / "rows.jsonl", row + end))
    assert why == ("larger than 4 MiB" if surplus else "not a JSON object: but str")


def test_a_large_row_is_not_held_in_memory(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"a" * (40 << 20))
    tracemalloc.start()
    assert len(rows_of(READERS[".jsonl"](path))) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * MAX_ROW_BYTES


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"a", "not as many fields as the header: 1 fewer"),
        (b"a,b,c,d", "not as many fields as the header: 2 more"),
        (b"a,\xe9", "not UTF-8: byte 0xe9"),
    ],
)
def test_a_bad_row_of_csv_leaves_its_neighbours(line, why, tmp_path):
    assert rows_of(chunks_of(tmp_path / "rows.csv", b"x,y\n1,2\n" + line + b"\n3,4\n")) == [
        ("rows.csv:2", {"x": "1", "y": "2"}),
        ("rows.csv:3", why),
        ("rows.csv:4", {"x": "3", "y": "4"}),
    ]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (pa.array([b"a", b"\xff", b"c"]).view(pa.string()), "invalid start byte"),
        (pa.array([0, 1 << 62, 0], pa.timestamp("us")), "date value out of range"),
    ],
)
def test_a_value_of_parquet_that_cannot_be_read_leaves_its_neighbours(values, why, tmp_path):
    pq.write_table(pa.table({"x": values}), tmp_path / "rows.parquet")
    first, bad, last = rows_of(READERS[".parquet"](tmp_path / "rows.parquet"))
    assert first[1] in ({"x": "a"}, {"x": datetime(1970, 1, 1)})
    assert bad[0] == "rows.parquet row 2"
    assert bad[1].startswith("a value that cannot be read: ") and why in bad[1]
    assert last[1] in ({"x": "c"}, {"x": datetime(1970, 1, 1)})


# Each column holds values of several types, so `datasets` writes JSON: alone, in lists, in structs, in both.
MIXED: list[dict[str, object]] = [
    {
        "text": "Four.",
        "messages": [{"content": "a"}],
        "deep": {"x": "five"},
        "calls": [{"f": {"name": "f", "args": {}}}],
    },
    {
        "text": 5,
        "messages": [{"content": ["a"]}],
        "deep": {"x": [1]},
        "calls": [{"f": {"name": "g", "args": [1, None]}}],
    },
    {"text": None, "messages": None, "deep": {"x": {"city": None}}, "calls": []},
    {"text": {"a": None, "b": [{"c": None}]}, "messages": ["b"], "deep": {"x": True}, "calls": None},
]


def mixed(path: Path) -> datasets.Dataset:
    (path / "rows.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in MIXED))
    return datasets.load_dataset(
        "json", data_files=str(path / "rows.jsonl"), split="train", cache_dir=str(path / "cache")
    )


@pytest.mark.parametrize("kind", ["hub", "saved", "parquet"])
def test_json_inside_arrow_is_decoded(kind, tmp_path):
    dataset = mixed(tmp_path)
    kinds = [str(kind) for kind in dataset.features.arrow_schema.types]
    assert all("arrow.json" in kind for kind in kinds) and {kind.partition("<")[0] for kind in kinds} == {
        "extension",
        "list",
        "struct",
    }
    if kind == "parquet":
        dataset.to_parquet(tmp_path / "rows.parquet")
        chunks = READERS[".parquet"](tmp_path / "rows.parquet")
    elif kind == "saved":
        dataset.save_to_disk(tmp_path / "saved")
        (source,) = open_sources([Spec(str(tmp_path / "saved"))], Digests(tmp_path / "digests.json"))
        chunks = source.chunks()
    else:
        chunks = read_dataset("owner/name", dataset)
    read = rows_of(pickle.loads(pickle.dumps(list(chunks))))
    assert [fields for _, fields in read] == MIXED


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": ', "not valid JSON: 'x': Expecting value at column 7"),
        ("", "not valid JSON: 'x': Expecting value at column 1"),
        ("[" * 100_000, "not valid JSON: 'x': maximum recursion depth"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_json_inside_arrow_that_is_none_leaves_its_neighbours(text, why, nested, tmp_path):
    values = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"a"', text, '"c"']))
    if nested:
        values = pa.ListArray.from_arrays([0, 1, 2, 3], pa.StructArray.from_arrays([values], ["y"]))
    pq.write_table(pa.table({"x": values}), tmp_path / "rows.parquet")
    first, bad, last = rows_of(READERS[".parquet"](tmp_path / "rows.parquet"))
    assert (first[1], last[1]) == (({"x": [{"y": "a"}]}, {"x": [{"y": "c"}]}) if nested else ({"x": "a"}, {"x": "c"}))
    assert bad[0] == "rows.parquet row 2" and bad[1].startswith(why)


def test_keys_that_a_row_of_arrow_did_not_have_are_left_out(tmp_path):
    rows = [
        {"messages": [{"role": "a", "calls": [{"name": "f", "arguments": {"city": "Paris"}}]}], "tools": None},
        {
            "messages": [{"role": "a", "calls": [{"name": "g", "arguments": {"n": 3}}]}],
            "tools": [{"p": {"n": {"t": 1}}}],
        },
        {"messages": [{"role": "a"}, None], "tools": [{"p": {"city": {"t": 2, "enum": ["a", None]}}}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tables = {
        "parquet": READERS[".parquet"](tmp_path / "rows.parquet"),
        "dataset": read_dataset("owner/name", datasets.Dataset(pa.Table.from_pylist(rows))),
    }
    for name, chunks in tables.items():
        assert [fields for _, fields in rows_of(chunks)] == rows, name


@pytest.mark.parametrize(
    "kind", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda item: pa.list_(item, 1)]
)
def test_every_list_of_arrow_is_looked_into(kind):
    item = pa.struct({"a": pa.int64(), "b": pa.int64()})
    chunk = Table("rows", 1, pa.table({"x": pa.array([[{"a": 1}], None], kind(item))}), 0)
    assert [row.fields for row in chunk.rows()] == [{"x": [{"a": 1}]}, {"x": None}]


def test_nulls_that_json_writes_stay(tmp_path):
    row = b'{"arguments": {"city": null}}'
    assert rows_of(chunks_of(tmp_path / "rows.jsonl", row)) == [("rows.jsonl:1", {"arguments": {"city": None}})]


def test_a_cell_of_csv_may_be_a_long_document(tmp_path):
    rows = [{"content": "a" * 1_000_000}]
    assert [fields for _, fields in rows_of(chunks_of(tmp_path / "rows.csv", encoded(rows, ".csv")))] == rows


LINES = b"".join(b'{"content": "%d"}\n' % (at * at) for at in range(20_000))
LIST, TABLE = encoded(ROWS, ".json"), encoded(ROWS * 300, ".parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'[{"content": "a"},\n {"content": }]', "rows.json:2: not valid JSON: Expecting value at column"),
        ("rows.json", b'[{"content": "a"}\n {"content": 1}]', "rows.json:2: not valid JSON: expected ',' or ']'"),
        ("rows.json", b'[{"content": "a"},\n {"content": 1}', "rows.json:2: not valid JSON: expected ',' or ']'"),
        ("rows.json", b'[{"content": "a"},\n]', "rows.json:2: not valid JSON: Expecting value at column 1"),
        ("rows.json", b'[{"content": "a"}]\n[{"content": "b"}]', "rows.json:2: not valid JSON: more after the end"),
        ("rows.json", b'[\n{"content": "\xff"}]', "rows.json:2: not UTF-8: invalid start byte"),
        ("rows.json", b"[\n" + b"[" * 100_000, "rows.json:2: not valid JSON: nested too deeply"),
        ("rows.json", b"[\n" + b"1" * 5_000, "rows.json:2: not valid JSON: Exceeds the limit"),
        ("rows.csv", b'content\nfine\n"a" b\n', "rows.csv:3: not valid CSV: ',' expected after '\"'"),
        ("rows.csv", b'content\nfine\n"never closed\n\n\n', "rows.csv:3: not valid CSV: unexpected end of data"),
        ("rows.csv", b'content\n"never closed' + b"\na" * (3 << 20), "rows.csv:2: not valid CSV: field larger than"),
        ("rows.jsonl.gz", gzip.compress(LINES)[:-5_000], "Compressed file ended before the end-of-stream"),
        ("rows.json.gz", gzip.compress(LIST)[:-20], "Compressed file ended before the end-of-stream"),
        ("rows.csv.gz", gzip.compress(LINES)[:-20], "Compressed file ended before the end-of-stream"),
        ("rows.jsonl.gz", gzip.compress(LINES)[:1_000] + bytes(1_000), "Error -3 while decompressing"),
        ("rows.jsonl.gz", LINES, "Not a gzipped file"),
        ("rows.jsonl.zst", compressed(LINES, ".zst")[:-5_000], "Truncated compressed stream"),
        ("rows.json.zst", compressed(LIST, ".zst")[:-20], "Truncated compressed stream"),
        ("rows.csv.zst", compressed(LINES, ".zst")[:-20], "Truncated compressed stream"),
        ("rows.jsonl.zst", LINES, "ZSTD decompress failed"),
        ("rows.parquet", b"PAR1 not", "not a readable Parquet file"),
        ("rows.parquet", TABLE[:100] + bytes(100) + TABLE[200:], "not a readable Parquet file"),
        ("rows.parquet", TABLE[:-100], "not a readable Parquet file"),
    ],
)
def test_a_broken_file_is_named_with_the_line(name, content, message, tmp_path):
    with pytest.raises(UserError) as error:
        rows_of(chunks_of(tmp_path / name, content))
    assert str(error.value).startswith(str(tmp_path / name)) and message in str(error.value)


@pytest.mark.parametrize("suffix", READERS)
def test_a_file_that_has_gone(suffix, tmp_path):
    with pytest.raises(UserError, match=f"rows{suffix} .*No such file"):
        list(READERS[suffix](tmp_path / f"rows{suffix}"))


@pytest.mark.parametrize("suffix", [*TEXTS, ".parquet"])
def test_a_file_of_many_chunks(suffix, tmp_path):
    rows = [{"content": f"{at * at:050}"} for at in range(2_200)]
    path = tmp_path / f"rows{suffix}"
    plain = str(format_of(path))
    chunks = chunks_of(path, compressed(encoded(rows, plain), path.suffix))
    assert len(chunks) >= 5
    read = rows_of(pickle.loads(pickle.dumps(chunks)))
    assert [fields for _, fields in read] == rows
    first, step = {".jsonl": (1, 1), ".json": (2, 3), ".csv": (2, 1), ".parquet": (1, 1)}[plain]
    assert numbers_of(read) == list(range(first, first + 2_200 * step, step))
    assert sum(chunk.size for chunk in chunks) == pytest.approx(path.stat().st_size, rel=0.01)
    assert all(chunk.size >= 0 for chunk in chunks)


def test_a_chunk_of_long_lines_is_about_a_megabyte(tmp_path):
    content = encoded([{"content": "a" * 300_000}] * 20, ".jsonl")
    assert [len(chunk.lines) for chunk in chunks_of(tmp_path / "rows.jsonl", content)] == [4] * 5


def test_a_data_set_in_chunks():
    rows = [{"content": f"{at:0500}"} for at in range(1_200)]
    dataset = datasets.Dataset.from_list(rows).select(range(1_199, -1, -1))
    chunks = list(read_dataset("owner/name", dataset))
    assert [chunk.size for chunk in chunks] == [500, 500, 200]
    read = rows_of(chunks)
    assert [fields for _, fields in read] == rows[::-1] and numbers_of(read) == list(range(1, 1_201))
    assert chunks[2].place(1_001) == "owner/name row 1001"


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_a_chunk_takes_its_own_rows_to_another_process_and_no_others(kind, tmp_path):
    table = pa.Table.from_pylist([{"content": "a" * 1_000}] * 5_000)
    if kind == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet", use_dictionary=False)
        chunks = READERS[".parquet"](tmp_path / "rows.parquet")
    else:
        chunks = read_dataset("name", datasets.Dataset(table))
    assert max(len(pickle.dumps(chunk)) for chunk in chunks) < 700_000


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *[(f"a.b{suffix}", "." + suffix.split(".")[1]) for suffix in TEXTS],
        ("a.parquet", ".parquet"),
        ("A.JSONL", ".jsonl"),
        ("a.parquet.gz", None),
        ("a.parquet.zst", None),
        ("a.txt", None),
        ("a.jsonl.bz2", None),
        ("a.gz", None),
        ("jsonl", None),
        (".gz", None),
    ],
)
def test_format_of_a_name(name, suffix):
    assert format_of(Path("folder.csv") / name) == suffix
