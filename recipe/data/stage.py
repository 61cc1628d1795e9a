"""One source read and encoded: its rows as tokens in an Arrow file, and what is known of each of them.

The result depends on the content and the settings alone, not on the number of processes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from tqdm.auto import tqdm

from recipe.arguments import DataArguments, TrainArguments
from recipe.data.formats import Example, Format, Reading
from recipe.data.inputs import Input
from recipe.data.length import fit
from recipe.data.report import Lengths, Reason, SourceReport
from recipe.data.rows import BadRow, Chunk, Dropped
from recipe.data.sources import Source
from recipe.data.tokenization import Encoder
from recipe.data.workers import in_order, num_workers
from recipe.errors import UserError, raise_if

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])
NUM_LISTED = 10  # bad rows shown
HOPELESS = 1000  # bad rows without a single good one, after which reading on would say nothing new
BYTES_A_ROW = 1000  # of a source whose size is in rows, for the number of processes


@dataclass
class Batch:
    """What a worker makes of a chunk. A row becomes one piece, or several (`truncation: split`).

    Attributes:
        ids, labels: of all pieces, [tokens].
        piece_lengths, piece_trained: tokens, and labels that reach the loss, [pieces].
        row_pieces, row_hashes, row_lengths: pieces, digest of all tokens, tokens before truncation, [kept rows].
        lengths: tokens of every row that could be encoded, kept or not.
        left_out: (reason, detail, place, whether it is a bad row) of each row that is not kept.
    """

    size: int
    rows_read: int
    ids: np.ndarray
    labels: np.ndarray
    piece_lengths: np.ndarray
    piece_trained: np.ndarray
    row_pieces: np.ndarray
    row_hashes: np.ndarray
    row_lengths: np.ndarray
    lengths: np.ndarray
    left_out: list[tuple[str, str, str, bool]]


@dataclass(frozen=True)
class RowWork:
    """Chunk in, `Batch` out; runs in a worker."""

    encoder: Encoder
    format: Format
    reading: Reading
    max_length: int
    truncation: str

    def __call__(self, chunk: Chunk) -> Batch:
        examples: list[Example] = []
        numbers: list[int] = []
        left_out: list[tuple[str, str, str, bool]] = []
        rows_read = 0
        for row in chunk.rows():
            rows_read += 1
            try:
                if row.problem is not None:
                    raise row.problem
                examples.append(self.format.parse(row.fields, self.reading))
                numbers.append(row.number)
            except BadRow as error:
                left_out.append((error.reason, error.detail, chunk.place(row.number), True))
            except RecursionError:
                left_out.append(("nested too deeply", "", chunk.place(row.number), True))
            except Dropped as error:
                left_out.append((error.reason, "", chunk.place(row.number), False))
        pieces, row_pieces, hashes, kept_lengths, lengths = [], [], [], [], []
        for number, encoded in zip(numbers, self.encoder.encode(examples), strict=True):
            if isinstance(encoded, BadRow):
                left_out.append((encoded.reason, encoded.detail, chunk.place(number), True))
                continue
            lengths.append(len(encoded.ids))
            kept, why = fit(encoded, self.max_length, self.truncation)
            if why is not None:
                left_out.append((why, "", chunk.place(number), False))
                continue
            pieces += kept
            row_pieces.append(len(kept))
            hashes.append(xxhash.xxh3_64_intdigest(encoded.ids.data))
            kept_lengths.append(len(encoded.ids))
        empty = [np.zeros(0, np.int32)]
        return Batch(
            chunk.size,
            rows_read,
            np.concatenate([piece.ids for piece in pieces] or empty),
            np.concatenate([piece.labels for piece in pieces] or empty),
            np.array([len(piece.ids) for piece in pieces], np.int32),
            np.array([piece.num_trained for piece in pieces], np.int32),
            np.array(row_pieces, np.int32),
            np.array(hashes, np.uint64),
            np.array(kept_lengths, np.int32),
            np.array(lengths, np.int32),
            left_out,
        )


@dataclass
class LeftOut:
    """Rows of one source that are not kept: counted by reason, with the first place of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)

    def add(self, reason: str, detail: str, place: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, place)
        # A rule that all rows break is to leave room for the others.
        if self.counts[reason] <= NUM_LISTED // 3 or (len(self.counts) == 1 and len(self.shown) < NUM_LISTED):
            self.shown.append(f"{place}: {reason}{': ' if detail else ''}{detail}")

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def reasons(self) -> list[Reason]:
        return [Reason(reason, count, self.first[reason]) for reason, count in self.counts.items()]


@dataclass(eq=False)
class Stage:
    """One source, encoded: its pieces in an Arrow file, and what is known of them, as in `Batch`."""

    source: Source
    format: Format
    pieces: datasets.Dataset
    piece_lengths: np.ndarray
    piece_trained: np.ndarray
    row_pieces: np.ndarray
    row_hashes: np.ndarray
    row_lengths: np.ndarray
    lengths: np.ndarray
    rows_read: int
    bad: LeftOut
    dropped: LeftOut

    @property
    def num_rows(self) -> int:
        return len(self.row_pieces)

    def report(self, rows_used: int) -> SourceReport:
        return SourceReport(
            name=self.source.name,
            format=self.format.name,
            identity=self.source.identity,
            revision=self.source.revision,
            rows_read=self.rows_read,
            rows_kept=self.num_rows,
            rows_used=rows_used,
            dropped=self.dropped.reasons(),
            bad=self.bad.reasons(),
            lengths=Lengths.of(self.lengths) if len(self.lengths) else None,
        )


def encode(one: Input, encoder: Encoder, data_args: DataArguments, args: TrainArguments, path: Path) -> Stage:
    """Read all of a source, in several processes, and write what can be trained on to the Arrow file `path`.

    Raises:
        UserError: it is empty or cannot be read; every row is bad; too many rows are too long.
    """
    source = one.source
    assert args.max_length is not None, "check() refuses a run without max_length"
    work = RowWork(encoder, one.format, one.reading, args.max_length, data_args.truncation)
    processes = num_workers(args.dataset_num_proc, source.size * (BYTES_A_ROW if source.unit == "row" else 1))
    bad, dropped, batches = LeftOut(), LeftOut(), []
    rows_read = num_kept = 0
    bar = tqdm(
        total=source.size,
        unit=source.unit,
        unit_scale=source.unit == "B",
        desc=f"Preparing {source.name}",
        leave=False,
        disable=None,  # where nobody looks at a terminal
    )
    with bar, pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
        for batch in in_order(work, source.chunks(), processes):
            bar.update(batch.size)
            rows_read += batch.rows_read
            num_kept += len(batch.row_pieces)
            for reason, detail, place, is_bad in batch.left_out:
                (bad if is_bad else dropped).add(reason, detail, place)
            if bad.total > max(HOPELESS, data_args.max_bad_rows) and not num_kept:
                check_bad([bad], rows_read, data_args.max_bad_rows)
            _write(writer, batch)
            batch.ids = batch.labels = np.zeros(0, np.int32)  # they are on the disk now
            batches.append(batch)
    if not rows_read:
        raise UserError(f"{source.spec.key} '{source.spec.path}': the data set is empty")

    def joined(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(getattr(batch, name) for batch in batches)])

    stage = Stage(
        source,
        one.format,
        datasets.Dataset.from_file(str(path)),
        joined("piece_lengths", np.int32),
        joined("piece_trained", np.int32),
        joined("row_pieces", np.int32),
        joined("row_hashes", np.uint64),
        joined("row_lengths", np.int32),
        joined("lengths", np.int32),
        rows_read,
        bad,
        dropped,
    )
    if bad.total <= data_args.max_bad_rows:
        raise_if(stage.report(0).length_problems(data_args.max_long_rows, args.max_length))
    return stage


def _write(writer: pa.RecordBatchStreamWriter, batch: Batch) -> None:
    offsets = np.concatenate([[0], np.cumsum(batch.piece_lengths)]).astype(np.int32)
    columns = [pa.ListArray.from_arrays(offsets, values) for values in (batch.ids, batch.labels)]
    writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def check_bad(found: Iterable[LeftOut], rows_read: int, max_bad_rows: int) -> None:
    """Raise `UserError` with the bad rows if there are more than `max_bad_rows`."""
    found = list(found)
    total = sum(bad.total for bad in found)
    if total <= max_bad_rows:
        return
    shown = [line for bad in found for line in bad.shown][:NUM_LISTED]
    counts: dict[str, int] = {}
    for bad in found:
        for reason, count in bad.counts.items():
            counts[reason] = counts.get(reason, 0) + count
    reasons = "; ".join(f"{count:,} x {reason}" for reason, count in counts.items())
    more = "" if total == len(shown) else f" ({reasons})"
    raise UserError(
        f"{total:,} of {rows_read:,} rows are bad, and max_bad_rows is {max_bad_rows}; mend them, or set max_bad_rows "
        f"to leave them out{more}:\n" + "\n".join(f"     {line}" for line in shown)
    )
