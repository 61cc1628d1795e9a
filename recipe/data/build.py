"""One prepared data set, from its sources to a cache folder: read and encoded, rows held out, mixed, packed."""

import sys
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np

from recipe.arguments import DataArguments, TrainArguments
from recipe.data import mixture
from recipe.data.inputs import Input
from recipe.data.report import Report
from recipe.data.split import Split
from recipe.data.stage import Stage, check_bad, encode
from recipe.data.tokenization import Encoder
from recipe.errors import UserError


@dataclass(frozen=True)
class Builder:
    """Builds one cache folder: train/, eval/ (if any) and report.json."""

    data_args: DataArguments
    train_args: TrainArguments
    encoder: Encoder

    def build(self, train: list[Input], test: list[Input], scratch: Path, result: Path) -> None:
        args = self.train_args
        assert args.max_length is not None, "check() refuses a run without max_length"
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()  # they would fill a log
        stages = [
            encode(one, self.encoder, self.data_args, args, scratch / f"{at}.arrow")
            for at, one in enumerate([*train, *test])
        ]
        check_bad(
            [stage.bad for stage in stages], sum(stage.rows_read for stage in stages), self.data_args.max_bad_rows
        )
        trained, tested = stages[: len(train)], stages[len(train) :]
        available, held_out = self._hold_out(trained)
        counts = mixture.counts([stage.source.spec for stage in trained], [len(rows) for rows in available])
        chosen = [mixture.choose(rows, count, args.seed) for rows, count in zip(available, counts, strict=True)]
        if self.data_args.eval_samples:
            tested = trained
        else:
            held_out = [np.arange(stage.num_rows) for stage in tested]
        used = [0] * len(stages)
        for stage, rows in [*zip(trained, chosen, strict=True), *zip(tested, held_out, strict=True)]:
            used[stages.index(stage)] += len(rows)
        split = Split(trained, chosen, args.max_length, args.packing, args.seed if args.shuffle_dataset else None)
        train_report = split.save(result / "train")
        eval_report, leaked = None, 0
        if tested:
            if not any(len(rows) for rows in held_out):
                raise UserError(
                    f"{tested[0].source.spec.key} '{tested[0].source.spec.path}': no row is left to evaluate "
                    f"on; {mixture.WHY}"
                )
            packing = args.packing if args.eval_packing is None else args.eval_packing
            evaluated = Split(tested, held_out, args.max_length, packing, None)
            eval_report = evaluated.save(result / "eval")
            leaked = int(np.isin(evaluated.hashes(), split.hashes()).sum())
        sources = [stage.report(number) for stage, number in zip(stages, used, strict=True)]
        report = Report(args.max_length, self.data_args.truncation, sources, train_report, eval_report, leaked)
        report.save(result / "report.json")

    def _hold_out(self, stages: list[Stage]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Rows of each source to train on, and `eval_samples` rows of all of them together, drawn by `seed`."""
        wanted, total = self.data_args.eval_samples, sum(stage.num_rows for stage in stages)
        if wanted >= max(total, 1):
            raise UserError(f"eval_samples {wanted:,} leaves nothing of {total:,} rows to train on; set it lower")
        out = np.zeros(total, bool)
        out[np.random.default_rng(self.train_args.seed).permutation(total)[:wanted]] = True
        parts = np.split(out, np.cumsum([stage.num_rows for stage in stages])[:-1])
        return [np.flatnonzero(~part) for part in parts], [np.flatnonzero(part) for part in parts]
