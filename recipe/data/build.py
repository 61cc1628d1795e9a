"""One prepared data set, from its sources to a cache folder: normalized, tokenized, fitted, packed and counted."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from recipe.arguments import DataArguments, TrainArguments
from recipe.data.messages import Kind, RowFormat, normalize
from recipe.data.packing import pack
from recipe.data.report import NO_LABEL, Report, SplitReport
from recipe.data.sources import Source
from recipe.data.tokenization import fit, tokenize
from recipe.errors import UserError, raise_if

TOKENS = {"row": Value("int64"), "input_ids": List(Value("int32")), "labels": List(Value("int32"))}


def hold_out(dataset: datasets.Dataset, num_rows: int, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split `num_rows` rows off, drawn by `seed`; both parts keep the order of the rows.

    Raises:
        UserError: nothing would be left to train on.
    """
    if num_rows >= len(dataset):
        raise UserError(f"eval_samples {num_rows:,} leaves nothing of {len(dataset):,} rows to train on; set it lower")
    drawn = np.random.default_rng(seed).permutation(len(dataset))
    return dataset.select(np.sort(drawn[num_rows:])), dataset.select(np.sort(drawn[:num_rows]))


@dataclass(frozen=True)
class Builder:
    """Builds one cache folder: train/, eval/ (if any) and report.json."""

    data_args: DataArguments
    train_args: TrainArguments
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    template: str | None

    def build(self, train: Source, test: Source | None, scratch: Path, result: Path) -> None:
        args = self.train_args
        assert args.max_length is not None, "check() refuses a run without max_length"
        rows = self._normalize({"train": train} | ({"eval": test} if test else {}), scratch)
        if self.data_args.eval_samples:
            rows["train"], rows["eval"] = hold_out(rows["train"], self.data_args.eval_samples, args.seed)
        eval_packing = args.packing if args.eval_packing is None else args.eval_packing
        reports = {}
        for name, packing in (("train", args.packing), ("eval", eval_packing)):
            if name in rows:
                unit = (test if name == "eval" and test else train).unit
                dataset, reports[name] = self._build_split(name, rows[name], unit, args.max_length, packing)
                dataset.save_to_disk(result / name)
        Report(self.kind, args.max_length, reports["train"], reports.get("eval")).save(result / "report.json")

    def _normalize(self, sources: dict[str, Source], scratch: Path) -> dict[str, datasets.Dataset]:
        row_format = RowFormat(
            self.kind,
            self.train_args.dataset_text_field,
            self.tokenizer.eos_token,
            tuple(t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special),
        )
        rows, problems = {}, []
        for name, source in sources.items():
            try:
                rows[name] = normalize(source, row_format, scratch / f"{name}.arrow")
            except UserError as error:
                problems += error.problems
        raise_if(problems)
        return rows

    def _build_split(
        self, name: str, rows: datasets.Dataset, unit: str, max_length: int, packing: bool
    ) -> tuple[datasets.Dataset, SplitReport]:
        args = self.train_args
        map_batches = partial(
            datasets.Dataset.map,
            batched=True,
            num_proc=args.dataset_num_proc,
            load_from_cache_file=False,
            remove_columns=[*rows.column_names],
        )
        tokenized = map_batches(
            rows,
            tokenize,
            fn_kwargs={
                "tokenizer": self.tokenizer,
                "template": self.template,
                "assistant_only_loss": args.assistant_only_loss,
                "unit": unit,
            },
            features=Features(TOKENS),
            desc=f"Tokenizing {name}",
        )
        split = packing and args.packing_strategy == "bfd_split"
        fitted = map_batches(
            tokenized,
            fit,
            fn_kwargs={"max_length": max_length, "split": split},
            features=Features(TOKENS | {"num_trained": Value("int32")}),
            remove_columns=[*TOKENS],
            desc=f"Fitting {name} to max_length",
        )
        if not len(fitted):
            raise UserError(
                f"{name}: no row of {len(rows):,} has a trained token within max_length {max_length}; "
                f"raise it (the shortest row has {min(_lengths(tokenized)):,} tokens)"
            )
        dataset = fitted.select_columns(["input_ids", "labels"])
        if args.shuffle_dataset and name == "train":
            dataset = dataset.shuffle(seed=args.seed)
        if packing:
            dataset = pack(dataset, max_length)
        return dataset, _report(tokenized, fitted, dataset if packing else None, max_length, split)


def _lengths(dataset: datasets.Dataset) -> np.ndarray:
    """Tokens of each row, shape `[rows]`."""
    return pc.list_value_length(dataset.data.column("input_ids")).to_numpy()


def _report(
    tokenized: datasets.Dataset,
    fitted: datasets.Dataset,
    blocks: datasets.Dataset | None,
    max_length: int,
    split: bool,
) -> SplitReport:
    lengths = _lengths(tokenized)
    tokens = int(_lengths(fitted).sum())
    kept = np.isin(tokenized.data.column("row").to_numpy(), fitted.data.column("row").to_numpy())
    rows_dropped = int((~kept).sum())
    truncated = np.zeros_like(kept) if split else kept & (lengths > max_length)
    p50, p90, p99 = (int(p) for p in np.percentile(lengths, [50, 90, 99], method="higher"))
    return SplitReport(
        rows_read=len(tokenized),
        rows_kept=int(kept.sum()),
        rows_dropped={NO_LABEL: rows_dropped} if rows_dropped else {},
        rows_truncated=int(truncated.sum()),
        tokens=tokens,
        trained_tokens=int(pc.sum(fitted.data.column("num_trained")).as_py()),
        length_p50=p50,
        length_p90=p90,
        length_p99=p99,
        length_max=int(lengths.max()),
        num_blocks=len(blocks) if blocks is not None else None,
        packing_efficiency=tokens / (len(blocks) * max_length) if blocks is not None else None,
    )
