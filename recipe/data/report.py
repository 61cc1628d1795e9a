"""What preparation did to the rows, kept as JSON beside the prepared data, and shown as a table."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from recipe.data.length import TOO_LONG

NUM_BINS = 40
MAX_CUT = 0.05  # share of rows that lose their end above which the report warns


@dataclass(frozen=True)
class Reason:
    """Rows left out for one reason, and where the first of them is."""

    reason: str
    count: int
    first: str


@dataclass(frozen=True)
class Lengths:
    """Tokens a row, before truncation: percentiles, the longest, and a histogram (`counts` between `edges`, which grow
    by the same factor)."""

    p50: int
    p90: int
    p99: int
    longest: int
    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, lengths: np.ndarray) -> "Lengths":
        p50, p90, p99 = (int(p) for p in np.percentile(lengths, [50, 90, 99], method="higher"))
        edges = np.geomspace(max(1, int(lengths.min())), int(lengths.max()) + 1, NUM_BINS + 1)
        return cls(p50, p90, p99, int(lengths.max()), edges.tolist(), np.histogram(lengths, edges)[0].tolist())


@dataclass(frozen=True)
class SourceReport:
    """One source: what was read of it, and what came of the rows.

    Attributes:
        identity: of its content; `revision` is a hub data set's commit.
        rows_read: all of them; `rows_kept` are those that could be trained on.
        rows_used: in an epoch, where sources are mixed or rows held out: training and evaluation together.
        dropped: by policies; `bad`: what `max_bad_rows` allowed.
        lengths: of all rows that could be encoded, kept or not; None where there are none.
    """

    name: str
    format: str
    identity: str
    revision: str | None
    rows_read: int
    rows_kept: int
    rows_used: int
    dropped: list[Reason]
    bad: list[Reason]
    lengths: Lengths | None

    def renamed(self, name: str) -> "SourceReport":
        def moved(reason: Reason) -> Reason:
            of_this_file = reason.first.startswith((f"{self.name}:", f"{self.name} row "))
            return replace(reason, first=name + reason.first.removeprefix(self.name)) if of_this_file else reason

        return replace(
            self, name=name, dropped=[moved(one) for one in self.dropped], bad=[moved(one) for one in self.bad]
        )

    def length_problems(self, max_long_rows: float, max_length: int) -> list[str]:
        """Leaving a few over-long rows out is a policy; leaving out a good part of the set is a mistake."""
        if self.lengths is None:
            return []
        total = sum(self.lengths.counts)
        long = sum(reason.count for reason in self.dropped if reason.reason == TOO_LONG)
        if long > max_long_rows * total:
            return [
                f"{self.name}: {long:,} of {total:,} rows ({long / total:.1%}) are longer than "
                f"max_length {max_length}, and truncation 'drop' may leave out {max_long_rows:.1%} (max_long_rows); "
                f"raise max_length (p99 of the rows is {self.lengths.p99:,} tokens, the longest "
                f"{self.lengths.longest:,}), or set truncation: right or split, or max_long_rows"
            ]
        if not self.rows_kept:
            return [
                f"{self.name}: no row of {total:,} has a trained token within max_length {max_length}; raise it (p50 "
                f"of the rows is {self.lengths.p50:,} tokens)"
            ]
        return []


@dataclass(frozen=True)
class SplitReport:
    """What is trained or evaluated on, in one epoch.

    Attributes:
        rows_truncated: rows that lost their end.
        duplicates: rows that are token for token another one of them.
        trained: histogram of the trained share of each row, ten bins from 0 to 1.
        num_blocks, packing_efficiency: blocks, and the share of their positions that holds tokens; None if not packed.
        fill: histogram of the blocks' fill, ten bins from 0 to 1.
    """

    rows: int
    rows_truncated: int
    duplicates: int
    tokens: int
    trained_tokens: int
    lengths: Lengths
    trained: list[int]
    num_blocks: int | None = None
    packing_efficiency: float | None = None
    fill: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The whole data set. `max_length` is in tokens; `leaked` counts evaluation rows that are trained on too."""

    max_length: int
    truncation: str
    sources: list[SourceReport]
    train: SplitReport
    eval: SplitReport | None
    leaked: int = 0

    @property
    def rows_read(self) -> int:
        return sum(source.rows_read for source in self.sources)

    @property
    def num_bad(self) -> int:
        return sum(reason.count for source in self.sources for reason in source.bad)

    @property
    def warnings(self) -> list[str]:
        """What is legal and likely not meant."""
        found = []
        for name, split in self.splits():
            if split.rows_truncated > MAX_CUT * split.rows:
                share = split.rows_truncated / split.rows
                found.append(
                    f"{name}: {split.rows_truncated:,} of {split.rows:,} rows ({share:.1%}) are longer than max_length "
                    f"{self.max_length} and {'are cut in pieces' if self.truncation == 'split' else 'lose their end'}"
                    f"; p99 of the lengths is {split.lengths.p99:,}"
                )
        if self.leaked:
            found.append(f"{self.leaked:,} of the rows that are evaluated on are trained on too")
        return found

    def renamed(self, names: list[str]) -> "Report":
        """As if the sources had always been called `names`."""
        sources = [source.renamed(name) for source, name in zip(self.sources, names, strict=True)]
        return replace(self, sources=sources)

    def problems(self, max_bad_rows: int, max_long_rows: float) -> list[str]:
        """Whether limits that may have changed since allow these data."""
        found = []
        if self.num_bad > max_bad_rows:
            first = next(reason for source in self.sources for reason in source.bad)
            found.append(
                f"the prepared data leave out {self.num_bad:,} bad rows (first: {first.first}: {first.reason}), and "
                f"max_bad_rows is {max_bad_rows}; mend them, or set max_bad_rows"
            )
        return found + [
            problem for source in self.sources for problem in source.length_problems(max_long_rows, self.max_length)
        ]

    def splits(self) -> list[tuple[str, SplitReport]]:
        return [("train", self.train)] + ([("eval", self.eval)] if self.eval else [])

    def lines(self) -> list[str]:
        """A summary for a run's log, one line an item."""
        lines = []
        for source in self.sources:
            left_out = "".join(
                f"; {r.count:,} left out: {r.reason} (first: {r.first})" for r in source.bad + source.dropped
            )
            lines.append(
                f"{source.name}: {source.format}, {source.rows_read:,} rows read, {source.rows_kept:,} kept{left_out}"
            )
        for name, split in self.splits():
            lines.append(
                f"{name}: {split.rows:,} rows, {split.tokens:,} tokens, {split.trained_tokens:,} "
                f"({split.trained_tokens / split.tokens:.1%}) trained; tokens a row p50 {split.lengths.p50:,}, "
                f"p99 {split.lengths.p99:,}, max {split.lengths.longest:,}; {split.duplicates:,} duplicates"
            )
            if split.num_blocks is not None:
                lines.append(
                    f"{name}: packed into {split.num_blocks:,} blocks of {self.max_length} tokens, "
                    f"{split.packing_efficiency:.1%} full"
                )
        return lines + [f"WARNING {warning}" for warning in self.warnings]

    def source_table(self) -> list[list[str]]:
        """Header and rows of a table of the sources and of what was left out of them."""
        table = [["source", "format", "rows", "kept", "used", "p50", "p90", "p99", "longest"]]
        for source in self.sources:
            counts = [source.rows_read, source.rows_kept, source.rows_used]
            lengths = source.lengths
            tokens = [lengths.p50, lengths.p90, lengths.p99, lengths.longest] if lengths else []
            table.append([source.name, source.format, *(f"{n:,}" for n in [*counts, *tokens])])
            table[-1] += [""] * (len(table[0]) - len(table[-1]))
        return table

    def reason_table(self) -> list[list[str]]:
        """Header and rows of a table of the rows that are left out; [] where there are none."""
        rows = [
            [kind, f"{reason.count:,}", reason.reason, reason.first]
            for source in self.sources
            for kind, reasons in (("bad", source.bad), ("dropped", source.dropped))
            for reason in reasons
        ]
        return [["left out", "rows", "reason", "first"], *rows] if rows else []

    def split_table(self) -> list[list[str]]:
        """Header and rows of a table with a column for each split."""

        def column(split: SplitReport) -> Iterator[tuple[str, str]]:
            yield "rows", f"{split.rows:,}"
            yield "tokens", f"{split.tokens:,}"
            yield "trained tokens", f"{split.trained_tokens:,} ({split.trained_tokens / split.tokens:.1%})"
            yield f"rows {'split' if self.truncation == 'split' else 'cut'}", f"{split.rows_truncated:,}"
            yield "duplicates", f"{split.duplicates:,}"
            yield f"blocks of {self.max_length:,}", "-" if split.num_blocks is None else f"{split.num_blocks:,}"
            fill = split.packing_efficiency
            yield "positions filled", "-" if fill is None else f"{fill:.2%}"

        columns = [dict(column(split)) for _, split in self.splits()]
        header = ["", *(name for name, _ in self.splits())]
        return [header, *([label, *(values[label] for values in columns)] for label in columns[0])]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Report":
        values = json.loads(path.read_text())
        sources = [_source(source) for source in values.pop("sources")]
        train, evaluation = _split(values.pop("train")), values.pop("eval")
        return cls(**values, sources=sources, train=train, eval=_split(evaluation) if evaluation else None)


def _source(values: dict[str, Any]) -> SourceReport:
    for key in ("dropped", "bad"):
        values[key] = [Reason(**reason) for reason in values[key]]
    values["lengths"] = Lengths(**values["lengths"]) if values["lengths"] else None
    return SourceReport(**values)


def _split(values: dict[str, Any]) -> SplitReport:
    return SplitReport(**values | {"lengths": Lengths(**values["lengths"])})
