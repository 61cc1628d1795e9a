"""What preparation did to the rows: counts and lengths, kept as JSON beside the prepared data."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NO_LABEL = "no trained token within max_length"
MAX_CUT = 0.05  # share of rows cut or dropped for their length above which the report warns


@dataclass(frozen=True)
class SplitReport:
    """One split. Lengths are tokens a row before truncation; `tokens` and `trained_tokens` are what is left after it.

    `num_blocks` and `packing_efficiency` (share of the blocks' tokens that are used, 0 to 1) are None without packing.
    """

    rows_read: int
    rows_kept: int
    rows_dropped: dict[str, int]
    rows_truncated: int
    tokens: int
    trained_tokens: int
    length_p50: int
    length_p90: int
    length_p99: int
    length_max: int
    num_blocks: int | None
    packing_efficiency: float | None


@dataclass(frozen=True)
class Report:
    """The whole data set. `kind` is 'chat' or 'text', `max_length` is in tokens."""

    kind: str
    max_length: int
    train: SplitReport
    eval: SplitReport | None

    @property
    def warnings(self) -> list[str]:
        """What is legal and likely not meant."""
        found = []
        for name, split in self._splits().items():
            num_cut = split.rows_truncated + split.rows_dropped.get(NO_LABEL, 0)
            if num_cut > MAX_CUT * split.rows_read:
                found.append(
                    f"{name}: {num_cut:,} of {split.rows_read:,} rows ({num_cut / split.rows_read:.1%}) are longer "
                    f"than max_length {self.max_length} and lose their end; p99 of the lengths is {split.length_p99:,}"
                )
        return found

    def lines(self) -> list[str]:
        """A short summary for people, one line an item."""
        lines = []
        for name, split in self._splits().items():
            dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in split.rows_dropped.items())
            lines.append(
                f"{name}: {split.rows_read:,} {self.kind} rows read, {split.rows_kept:,} kept{dropped}, "
                f"{split.rows_truncated:,} truncated to {self.max_length} tokens"
            )
            lines.append(
                f"{name}: {split.tokens:,} tokens, {split.trained_tokens:,} "
                f"({split.trained_tokens / split.tokens:.1%}) trained; tokens a row "
                f"p50 {split.length_p50:,}, p90 {split.length_p90:,}, p99 {split.length_p99:,}, "
                f"max {split.length_max:,}"
            )
            if split.num_blocks is not None:
                lines.append(
                    f"{name}: packed into {split.num_blocks:,} blocks of {self.max_length} tokens, "
                    f"{split.packing_efficiency:.1%} full"
                )
        return lines + [f"WARNING {warning}" for warning in self.warnings]

    def _splits(self) -> dict[str, SplitReport]:
        return {"train": self.train} | ({"eval": self.eval} if self.eval else {})

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Report":
        values = json.loads(path.read_text())
        train, evaluation = SplitReport(**values.pop("train")), values.pop("eval")
        return cls(**values, train=train, eval=SplitReport(**evaluation) if evaluation else None)
