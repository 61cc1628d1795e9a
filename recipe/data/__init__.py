"""From rows to batches' worth of tokens: sources > chats and texts > template and loss mask > length > packed blocks.

`prepare` makes what a run trains on, and `load` maps it in other processes. That is before any process group exists,
and calls no collective: any number of processes may prepare, one builds, the others wait for a file lock, and all map
the same files into memory (`recipe.data.cache`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from recipe.arguments import DataArguments, TrainArguments
from recipe.data.build import Builder
from recipe.data.cache import build_once, fingerprint, tokenizer_digest
from recipe.data.digests import Digests
from recipe.data.inputs import Input, answers_only, inputs_of, template_of
from recipe.data.messages import Turns
from recipe.data.report import Report, SplitReport
from recipe.data.sources import Source, is_here, open_sources, read_specs
from recipe.data.template import read_template, resolve_template
from recipe.data.tokenization import Encoder
from recipe.errors import UserError, raise_if

__all__ = [
    "PreparedData",
    "Report",
    "SplitReport",
    "at_hand",
    "check",
    "load",
    "prepare",
    "read_template",
    "resolve_template",
]

FORMAT = 4  # of the prepared data; a change of what this package writes needs a new one, or old caches are taken for it
TRAIN, EVAL, REPORT, TEMPLATE = "train", "eval", "report.json", "template.jinja"


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on, mapped from disk.

    Attributes:
        folder: where it lies; its name is the fingerprint.
        train: `input_ids` and `labels` (-100 where untrained), lists of int32 at most `max_length` long; packed data
            have `seq_lengths` too. Ready for TRL's `DataCollatorForLanguageModeling`.
        eval: The same, or `None`.
        report: What was read, kept and cut.
        template: Text of the chat template that `chat_template_path` names, for the tokenizer that is saved with the
            model; `None` where the tokenizer keeps its own, and where there are no chats.
    """

    folder: Path
    train: datasets.Dataset
    eval: datasets.Dataset | None
    report: Report
    template: str | None
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name the content, the tokenizer, the template and the settings."""
        return self.folder.name

    def lines(self) -> list[str]:
        """For a run's log."""
        return [*self.notes, *self.report.lines()]

    def origin(self) -> list[dict[str, Any]]:
        """Where it comes from, for a checkpoint's manifest."""
        return [
            {"source": s.name, "format": s.format, "content": s.identity, "revision": s.revision, "rows": s.rows_used}
            for s in self.report.sources
        ]


def check(data_args: DataArguments, train_args: TrainArguments) -> list[str]:
    """List what is wrong with the keys alone; reads no file."""
    problems = []
    try:
        read_specs(data_args)
    except UserError as error:
        problems += error.problems
    if data_args.dataset_streaming:
        problems.append("dataset_streaming is not supported: rows are counted and packed before training; set false")
    for key in ("eval_samples", "max_bad_rows"):
        if getattr(data_args, key) < 0:
            problems.append(f"{key} must be 0 or more, not {getattr(data_args, key)}")
    if not 0 <= data_args.max_long_rows <= 1:
        problems.append(f"max_long_rows is a share of the rows, from 0 to 1, not {data_args.max_long_rows:g}")
    if train_args.max_length is None:
        problems.append("max_length is not set; give the tokens of a row, or of a packed block (4096 for Llama-2)")
    elif train_args.max_length < 2:
        problems.append(f"max_length must be 2 tokens or more, not {train_args.max_length}")
    if train_args.packing and train_args.packing_strategy != "bfd":
        problems.append(
            f"packing_strategy '{train_args.packing_strategy}' is not supported: blocks hold whole rows; set bfd, and "
            "truncation: split for rows that are longer than a block"
        )
    if train_args.eval_packing and not train_args.packing:
        problems.append("eval_packing is true and packing is not; set packing: true, or leave eval_packing out")
    if train_args.padding_free and not train_args.packing:
        problems.append("padding_free is true and packing is not; set packing: true, which is free of padding too")
    if train_args.seed < 0:
        problems.append(f"seed must be 0 or more, not {train_args.seed}")
    if train_args.truncation_mode != "keep_start":
        problems.append(f"truncation_mode '{train_args.truncation_mode}' is not supported; see truncation")
    if train_args.dataset_num_proc is not None and train_args.dataset_num_proc < 1:
        problems.append(f"dataset_num_proc must be 1 or more, not {train_args.dataset_num_proc}")
    return problems


def at_hand(data_args: DataArguments, fetch: bool) -> list[str]:
    """Whether the data are where the keys say; files are not read.

    Args:
        fetch: look at the hub too, and fetch what is not here. A run leaves that to `prepare`, in which others wait.
    """
    try:
        specs = read_specs(data_args)
    except UserError:
        return []  # `check` lists that
    try:
        open_sources([spec for spec in [*specs[0], *specs[1]] if fetch or is_here(spec)], _digests(data_args))
    except UserError as error:
        return error.problems
    return []


def prepare(data_args: DataArguments, train_args: TrainArguments, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Read, validate, tokenize, truncate and pack the run's data, or map what an earlier call made of them.

    Raises:
        UserError: keys that do not go together; missing, empty or unreadable data; bad rows, with their places; a
            template without marks or eos; nothing left within `max_length`.
    """
    opened, train, test, template, folder = _identified(data_args, train_args, tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data_cache_dir '{data_args.data_cache_dir}' cannot be made: {error}; set another") from None

    def build(scratch: Path, result: Path) -> None:
        encoder = Encoder(tokenizer, template, answers_only(train_args))
        Builder(data_args, train_args, encoder).build(train, test, scratch, result)
        if template is not None and train_args.chat_template_path is not None:
            (result / TEMPLATE).write_text(read_template(tokenizer, train_args.chat_template_path))

    build_once(folder, build)
    notes = tuple(note for source in opened for note in source.notes)
    if template is not None and not answers_only(train_args):
        notes += ("every token of a chat is trained, questions too (assistant_only_loss: false)",)
    return _mapped(folder, data_args, opened, notes)


def prepared(
    data_args: DataArguments, train_args: TrainArguments, tokenizer: PreTrainedTokenizerBase
) -> PreparedData | None:
    """What an earlier `prepare` made of the run's data, or None: nothing is built.

    Raises:
        UserError: as `prepare`, for what does not go together or is not there.
    """
    opened, _, _, _, folder = _identified(data_args, train_args, tokenizer)
    return _mapped(folder, data_args, opened) if folder.is_dir() else None


def _identified(
    data_args: DataArguments, train_args: TrainArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Source], list[Input], list[Input], str | None, Path]:
    """The sources, as training and as evaluation data, the template, and the folder of what is prepared of them."""
    raise_if(check(data_args, train_args))
    _check_tokenizer(tokenizer)
    train_specs, test_specs = read_specs(data_args)
    opened = open_sources([*train_specs, *test_specs], _digests(data_args))
    turns = Turns.of(data_args)
    inputs = inputs_of(opened, turns, train_args)
    train, test = inputs[: len(train_specs)], inputs[len(train_specs) :]
    template = template_of(inputs, train_args, tokenizer)
    settings = _settings(data_args, train_args) | {
        "train": [_identity(one) for one in train],
        "eval": [_identity(one) for one in test],
        "template": template,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    return opened, train, test, template, Path(data_args.data_cache_dir).expanduser() / fingerprint(settings)


def load(data_args: DataArguments, name: str) -> PreparedData | None:
    """What `prepare` made in another process, by its fingerprint; None where this machine does not see it."""
    folder = Path(data_args.data_cache_dir).expanduser() / name
    if not folder.is_dir():
        return None
    return _mapped(folder, data_args)


def _mapped(
    folder: Path, data_args: DataArguments, opened: Sequence[Source] = (), notes: tuple[str, ...] = ()
) -> PreparedData:
    report = Report.load(folder / REPORT)
    if opened:  # the same content may have had other names when it was prepared
        report = report.renamed([source.name for source in opened])
    raise_if(report.problems(data_args.max_bad_rows, data_args.max_long_rows))
    template = folder / TEMPLATE
    return PreparedData(
        folder=folder,
        train=datasets.load_from_disk(folder / TRAIN),
        eval=datasets.load_from_disk(folder / EVAL) if (folder / EVAL).is_dir() else None,
        report=report,
        template=template.read_text() if template.is_file() else None,
        notes=notes,
    )


def _digests(data_args: DataArguments) -> Digests:
    return Digests(Path(data_args.data_cache_dir).expanduser() / "digests.json")


def _identity(one: Input) -> list[Any]:
    spec = one.source.spec
    return [one.source.identity, one.format.name, one.reading.text_field, spec.weight, spec.samples]


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, which the loss mask needs; "
            "convert it to a folder with a tokenizer.json"
        )
    if not tokenizer.eos_token:
        raise UserError("the tokenizer has no eos token, so the model cannot learn to stop; set eos_token")


def _settings(data_args: DataArguments, train_args: TrainArguments) -> dict[str, Any]:
    """What else the prepared data depend on; a seed that nothing draws from is left out."""
    shares = any(spec.weight is not None or spec.samples is not None for spec in read_specs(data_args)[0])
    draws = data_args.eval_samples > 0 or train_args.shuffle_dataset or shares
    return {
        "format": FORMAT,
        "answers_only": answers_only(train_args),
        "completion_only_loss": train_args.completion_only_loss,
        "max_length": train_args.max_length,
        "truncation": data_args.truncation,
        "packing": train_args.packing,
        "eval_packing": train_args.eval_packing,
        "eval_samples": data_args.eval_samples,
        "turns": asdict(Turns.of(data_args)),
        "shuffle_dataset": train_args.shuffle_dataset,
        "seed": train_args.seed if draws else None,
    }
