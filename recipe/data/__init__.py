"""From rows to batches' worth of tokens: sources > messages > template and loss mask > length > packed blocks.

`prepare` is the only door. It runs before any process group exists and calls no collective: all ranks call it, one
builds, the others wait for a file lock, and all map the same files into memory (`recipe.data.cache`).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from recipe.arguments import DataArguments, TrainArguments
from recipe.data.build import Builder
from recipe.data.cache import build_once, fingerprint, tokenizer_digest
from recipe.data.messages import Kind, detect_kind
from recipe.data.report import Report, SplitReport
from recipe.data.sources import Source, open_sources
from recipe.data.template import read_template, resolve_template
from recipe.errors import UserError, raise_if

__all__ = ["PreparedData", "Report", "SplitReport", "at_hand", "check", "prepare", "read_template", "resolve_template"]

FORMAT = 1  # of the prepared data; a change of what this package writes needs a new one, or old caches are taken for it


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on, mapped from disk.

    Attributes:
        train: `input_ids` and `labels` (-100 where untrained), lists of int32 at most `max_length` long; packed data
            have `seq_lengths` too. Ready for TRL's `DataCollatorForLanguageModeling`.
        eval: The same, or `None`.
        fingerprint: 16 hexadecimal digits that name the content, the tokenizer, the template and the settings.
        report: What was read, kept and cut.
        template: Text of the chat template that `chat_template_path` names, for the tokenizer that is saved with the
            model; `None` where the tokenizer keeps its own, and for text rows.
    """

    train: datasets.Dataset
    eval: datasets.Dataset | None
    fingerprint: str
    report: Report
    template: str | None


def check(data_args: DataArguments, train_args: TrainArguments) -> list[str]:
    """List what is wrong with the keys alone; reads no file."""
    problems = []
    if not data_args.dataset_name:
        problems.append("dataset_name is not set; give a .jsonl/.json/.parquet/.csv file, a saved folder or a hub id")
    if data_args.dataset_streaming:
        problems.append("dataset_streaming is not supported: rows are counted and packed before training; set false")
    if data_args.eval_samples < 0:
        problems.append(f"eval_samples must be 0 or more, not {data_args.eval_samples}")
    if data_args.eval_samples and data_args.dataset_test_split:
        problems.append(
            f"eval_samples {data_args.eval_samples} and dataset_test_split '{data_args.dataset_test_split}' are two "
            "evaluation sets; leave one out"
        )
    if train_args.max_length is None:
        problems.append("max_length is not set; give the tokens of a row, or of a packed block (4096 for Llama-2)")
    elif train_args.max_length < 2:
        problems.append(f"max_length must be 2 tokens or more, not {train_args.max_length}")
    if train_args.packing and train_args.packing_strategy not in ("bfd", "bfd_split"):
        problems.append(
            f"packing_strategy '{train_args.packing_strategy}' does not keep rows apart; set bfd or bfd_split"
        )
    if train_args.truncation_mode != "keep_start":
        problems.append(f"truncation_mode '{train_args.truncation_mode}' is not supported; set keep_start")
    if train_args.completion_only_loss:
        problems.append("completion_only_loss is for prompt/completion rows; use messages and assistant_only_loss")
    if train_args.dataset_num_proc is not None and train_args.dataset_num_proc < 1:
        problems.append(f"dataset_num_proc must be 1 or more, not {train_args.dataset_num_proc}")
    return problems


def at_hand(data_args: DataArguments) -> list[str]:
    """Whether the data are where `dataset_name` says; files are not read, a hub id's are fetched."""
    try:
        if data_args.dataset_name:
            open_sources(data_args)
    except UserError as error:
        return error.problems
    return []


def prepare(data_args: DataArguments, train_args: TrainArguments, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Read, validate, tokenize, truncate and pack the run's data set, or map what an earlier call made of it.

    Sets `tokenizer.eos_token` to `train_args.eos_token` if that is given, as TRL does.

    Raises:
        UserError: keys that do not go together; missing, empty or unreadable data; bad rows, with their numbers; a
            template without marks or eos; nothing left within `max_length`.
    """
    raise_if(check(data_args, train_args))
    _check_tokenizer(tokenizer, train_args.eos_token)
    train, test = open_sources(data_args)
    kind = detect_kind(train, train_args.dataset_text_field)
    template = _template(kind, train, train_args, tokenizer)
    settings = _settings(data_args, train_args) | {
        "train": train.identify(),
        "eval": test.identify() if test else None,
        "kind": kind,
        "template": template,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    name = fingerprint(settings)
    folder = Path(data_args.data_cache_dir).expanduser() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data_cache_dir '{data_args.data_cache_dir}' cannot be made: {error}; set another") from None
    builder = Builder(data_args, train_args, tokenizer, kind, template)
    build_once(folder, partial(builder.build, train, test))
    evaluation = datasets.load_from_disk(folder / "eval") if (folder / "eval").is_dir() else None
    return PreparedData(
        train=datasets.load_from_disk(folder / "train"),
        eval=evaluation,
        fingerprint=name,
        report=Report.load(folder / "report.json"),
        template=read_template(tokenizer, path) if kind == "chat" and (path := train_args.chat_template_path) else None,
    )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, eos_token: str | None) -> None:
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, which the loss mask needs; "
            "convert it to a folder with a tokenizer.json"
        )
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise UserError(f"eos_token '{eos_token}' is not in the tokenizer's vocabulary; set it to one that is")
        tokenizer.eos_token = eos_token
    if not tokenizer.eos_token:
        raise UserError("the tokenizer has no eos token, so the model cannot learn to stop; set eos_token")


def _template(kind: Kind, source: Source, train_args: TrainArguments, tokenizer: PreTrainedTokenizerBase) -> str | None:
    if kind == "chat":
        return resolve_template(tokenizer, train_args.chat_template_path, train_args.assistant_only_loss)
    if train_args.assistant_only_loss:
        raise UserError(
            f"assistant_only_loss needs chat rows, and {source.name} has text in '{train_args.dataset_text_field}', "
            "where nothing tells an answer from a question; set assistant_only_loss: false, or give rows of messages"
        )
    return None


def _settings(data_args: DataArguments, train_args: TrainArguments) -> dict[str, Any]:
    """What else the prepared data depend on; a seed that nothing draws from is left out."""
    draws = data_args.eval_samples > 0 or train_args.shuffle_dataset
    return {
        "format": FORMAT,
        "text_field": train_args.dataset_text_field,
        "assistant_only_loss": train_args.assistant_only_loss,
        "max_length": train_args.max_length,
        "packing": train_args.packing,
        "packing_strategy": train_args.packing_strategy,
        "eval_packing": train_args.eval_packing,
        "eval_samples": data_args.eval_samples,
        "shuffle_dataset": train_args.shuffle_dataset,
        "seed": train_args.seed if draws else None,
    }
