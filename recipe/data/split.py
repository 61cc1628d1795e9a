"""Rows that are trained or evaluated on, from the sources to one data set on disk, packed if it is to be."""

from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute as pc

from recipe.data import mixture
from recipe.data.packing import pack
from recipe.data.report import Lengths, SplitReport
from recipe.data.stage import Stage


@dataclass(frozen=True)
class Split:
    """Rows of some sources (`rows` has their numbers by source; the mixture may repeat them).

    They stand in the order of their sources, interleaved, or in an order drawn by `shuffle_seed`.
    """

    stages: list[Stage]
    rows: list[np.ndarray]
    max_length: int
    packing: bool
    shuffle_seed: int | None

    def hashes(self) -> np.ndarray:
        return np.concatenate([stage.row_hashes[np.unique(rows)] for stage, rows in self._parts()])

    def save(self, folder: Path) -> SplitReport:
        """Write the data set, packed if it is to be."""
        order = mixture.interleave([len(rows) for rows in self.rows])
        if self.shuffle_seed is not None:
            order = np.random.default_rng(self.shuffle_seed).permutation(order)
        firsts = np.cumsum([0, *(len(stage.pieces) for stage in self.stages)])
        starts = np.concatenate(
            [
                first + _first_pieces(stage)[rows]
                for first, (stage, rows) in zip(firsts[:-1], self._parts(), strict=True)
            ]
        )
        counts = np.concatenate([stage.row_pieces[rows] for stage, rows in self._parts()])
        indices = _ranges(starts[order], counts[order])
        pieces = datasets.concatenate_datasets([stage.pieces for stage in self.stages])
        if not np.array_equal(indices, np.arange(len(pieces))):
            pieces = pieces.select(indices)
        piece_lengths = np.concatenate([stage.piece_lengths for stage in self.stages])[indices]
        piece_trained = np.concatenate([stage.piece_trained for stage in self.stages])[indices]
        dataset = pack(pieces, self.max_length) if self.packing else pieces
        dataset.save_to_disk(folder)
        return self._report(dataset, piece_lengths, piece_trained)

    def _parts(self) -> zip:
        return zip(self.stages, self.rows, strict=True)

    def _report(self, dataset: datasets.Dataset, lengths: np.ndarray, trained: np.ndarray) -> SplitReport:
        hashes, tokens = self.hashes(), int(lengths.sum())
        row_lengths = np.concatenate([stage.row_lengths[rows] for stage, rows in self._parts()])
        return SplitReport(
            len(row_lengths),
            int((row_lengths > self.max_length).sum()),
            len(hashes) - len(np.unique(hashes)),
            tokens,
            int(trained.sum()),
            Lengths.of(row_lengths),
            _tenths(trained / lengths),
            len(dataset) if self.packing else None,
            tokens / (len(dataset) * self.max_length) if self.packing else None,
            _tenths(_lengths(dataset) / self.max_length) if self.packing else [],
        )


def _first_pieces(stage: Stage) -> np.ndarray:
    """The first piece of each row, [rows]."""
    return np.cumsum(stage.row_pieces) - stage.row_pieces


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ..., start + count - 1 of each, joined."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _lengths(dataset: datasets.Dataset) -> np.ndarray:
    return pc.list_value_length(dataset.data.column("input_ids")).to_numpy()


def _tenths(shares: np.ndarray) -> list[int]:
    return np.histogram(shares, 10, (0, 1))[0].tolist()
