"""The run's arguments, on TRL's dataclasses: defaults < YAML (`--config`) < command line; an unknown key is an error.

Parsing touches no device and starts no process group: `TrainArguments.activate` does that, after the checks
(`recipe.preflight`), so that a typo costs a second and not a place in the queue.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

from recipe.errors import UserError, raise_if
from recipe.sampling import num_steps

DTYPES = ("float32", "bfloat16")


@dataclass
class DataArguments(ScriptArguments):
    """Where the training rows come from. Length, packing and loss mask are TRL's own keys (`SFTConfig`)."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A .jsonl, .json, .csv (also .gz, .zst) or .parquet file, a glob of them, a folder written by "
            "`datasets.save_to_disk`, or a hub id. For several sources see `datasets`."
        },
    )
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a hub data set; every checkpoint says which it was."}
    )
    dataset_test_split: str | None = field(
        default=None, metadata={"help": "Split of the same data set to evaluate on. Unset: see eval_samples."}
    )
    datasets: list[dict] | None = field(
        default=None,
        metadata={
            "help": "Several sources: a list of paths, or of mappings with path, name (hub configuration), split, "
            "revision, text_field, and weight (share of an epoch's rows) or samples (rows in an epoch)."
        },
    )
    data: list[str] | None = field(
        default=None, metadata={"help": "Files, globs, folders or hub ids in the place of the configured sources."}
    )
    eval_datasets: list[dict] | None = field(
        default=None, metadata={"help": "Sources to evaluate on, written as `datasets`, without weight and samples."}
    )
    eval_samples: int = field(
        default=0,
        metadata={"help": "Rows held out of the training sources for evaluation, drawn by `seed`. 0: none."},
    )
    data_cache_dir: str = field(
        default="runs/.data", metadata={"help": "Folder of prepared data sets, shared by runs and by all nodes."}
    )
    max_bad_rows: int = field(
        default=0,
        metadata={"help": "Rows that may be left out because they cannot be trained on. More: stop, and list them."},
    )
    truncation: str = field(
        default="drop",
        metadata={
            "help": "Rows longer than max_length: 'drop' leaves them out, 'right' cuts their end off (and the end "
            "token with it), 'split' makes several rows of one.",
            "choices": ["drop", "right", "split"],
        },
    )
    max_long_rows: float = field(
        default=0.05, metadata={"help": "Share (0 to 1) of a source's rows that truncation: drop may leave out."}
    )
    leading_assistant: str = field(
        default="error",
        metadata={
            "help": "A chat begins with the assistant: 'error' (a bad row), 'drop' (leave the row out), 'trim' (leave "
            "that turn out), 'keep'.",
            "choices": ["error", "drop", "trim", "keep"],
        },
    )
    repeated_roles: str = field(
        default="error",
        metadata={
            "help": "Two turns in a row by the user, or by the assistant: 'error', 'drop' (the row), 'merge' (to one "
            "turn, with an empty line between), 'keep'.",
            "choices": ["error", "drop", "merge", "keep"],
        },
    )
    tool_turns: str = field(
        default="keep",
        metadata={
            "help": "A chat with tools: 'keep' (the chat template has to show them), 'drop' (the row), 'error'.",
            "choices": ["keep", "drop", "error"],
        },
    )
    empty_content: str = field(
        default="error",
        metadata={
            "help": "A chat with a message without text: 'error', 'drop' (the row), 'keep'.",
            "choices": ["error", "drop", "keep"],
        },
    )


@dataclass
class ModelArguments(ModelConfig):
    """Which model, and in which dtype its master weights, gradients and moments live."""

    dtype: str | None = field(
        default=None, metadata={"help": "Not used: see param_dtype, which also decides the optimizer's dtype."}
    )
    param_dtype: str = field(
        default="float32",
        metadata={
            "help": "Master weights and Adam moments. 'float32' (with bf16 compute) is right for most runs; "
            "'bfloat16' halves the memory and loses updates smaller than 1/256 of a weight.",
            "choices": list(DTYPES),
        },
    )
    reduce_dtype: str = field(
        default="float32",
        metadata={
            "help": "Dtype of the gradient reduce-scatter under bf16. 'bfloat16' halves the traffic.",
            "choices": list(DTYPES),
        },
    )


@dataclass
class TrainArguments(SFTConfig):
    """TRL's `SFTConfig` with the batch asked for as a whole, and with safe defaults for sharded runs."""

    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Samples (packed blocks, when packing) in one optimizer step, over all ranks. Accumulation is "
            "derived: global_batch_size / (ranks x per_device_train_batch_size)."
        },
    )
    resume_from_checkpoint: str | None = field(
        default="auto",
        metadata={
            "help": "'auto': the newest complete checkpoint of this run, else a fresh start; 'none'; or a folder."
        },
    )
    accept_changes: list[str] | None = field(
        default=None,
        metadata={
            "help": "Keys in which this run may differ from the checkpoint it goes on from, as the refusal lists them, "
            "such as 'learning_rate max_steps'. Today's values hold."
        },
    )
    async_save: bool = field(
        default=True,
        metadata={
            "help": "Write checkpoints while training goes on, from a copy in host memory. False: training waits, and "
            "nothing is copied."
        },
    )
    keep_every: int | None = field(
        default=None,
        metadata={"help": "Steps: checkpoints at multiples of it are never deleted, whatever save_total_limit says."},
    )
    export_dtype: str = field(
        default="bfloat16", metadata={"help": "Dtype of the exported weights.", "choices": list(DTYPES)}
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "Largest exported safetensors file."})
    export: bool = field(default=True, metadata={"help": "Export a Hugging Face folder when training has ended."})

    # Safe defaults for sharded runs, each where the library's own would fail or mislead.
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Samples per rank in one forward pass."})
    save_strategy: str = field(default="steps", metadata={"help": "'steps' or 'no'."})
    save_total_limit: int | None = field(default=3, metadata={"help": "Newest checkpoints kept; see keep_every."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide NaN losses from the log."})
    logging_steps: float = field(default=1, metadata={"help": "Optimizer steps between two lines of metrics.jsonl."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "The recipe has a progress bar of its own."})
    report_to: str | list[str] = field(
        default_factory=lambda: ["tensorboard"], metadata={"help": "Trackers; 'none' for none."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a sample, or of a packed block. No default: a silent cut is costly."}
    )
    assistant_only_loss: bool | None = field(
        default=None,
        metadata={
            "help": "Train answers alone, which a chat template has to mark. Unset: so for chats, and all of a text. "
            "False: questions too."
        },
    )
    activation_checkpointing: bool = field(
        default=True, metadata={"help": "Recompute activations in the backward pass (non-reentrant)."}
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "For torch.utils.checkpoint; use_reentrant is false."}
    )
    max_steps: int = field(
        default=-1, metadata={"help": "Optimizer steps; num_train_epochs decides where this is not positive."}
    )
    gradient_checkpointing: bool | None = field(
        default=None, metadata={"help": "The older name of activation_checkpointing; it wins where it is set."}
    )
    stop_at_step: int | None = field(
        default=None,
        metadata={"help": "Leave after this step with a checkpoint, the schedule unchanged, as if interrupted."},
    )
    hang_timeout: float = field(
        default=1800,
        metadata={
            "help": "Seconds in which a rank gets no further (a step, a checkpoint, an evaluation batch) until the run "
            "is ended, saying which rank hangs. 0: never."
        },
    )
    ddp_timeout: int = field(
        default=7200, metadata={"help": "Seconds until a collective fails by itself; above hang_timeout."}
    )
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Pad batches to a multiple of this."})

    def __post_init__(self) -> None:
        """Only what the checks read: transformers starts the process group in its own, and the checks come first."""
        if isinstance(self.activation_checkpointing_kwargs, str):
            self.activation_checkpointing_kwargs = json.loads(self.activation_checkpointing_kwargs)

    def accepted_changes(self) -> list[str]:
        """Keys, given as a list or in one text."""
        return [key for text in self.accept_changes or [] for key in text.replace(",", " ").split()]

    def checkpointing_kwargs(self) -> dict[str, Any]:
        assert not isinstance(self.activation_checkpointing_kwargs, str), "__post_init__ has read it"
        return self.activation_checkpointing_kwargs or {}

    def settle(self, num_rows: int, bf16: bool) -> None:
        """Fill in what the data and the model decide: the number of steps, and whether compute is in another dtype."""
        assert self.global_batch_size is not None, "preflight refuses a run without global_batch_size"
        self.max_steps = num_steps(num_rows, self.global_batch_size, self.num_train_epochs, self.max_steps)
        self.bf16 = bf16

    def activate(self, world_size: int, on_gpu: bool) -> None:
        """Derive accumulation from `world_size`, then let transformers take the device and join the process group."""
        assert self.global_batch_size is not None, "preflight refuses a run without global_batch_size"
        self.gradient_accumulation_steps = self.global_batch_size // (world_size * self.per_device_train_batch_size)
        # Without it, and with no GPU, Accelerate lets every rank train alone, without a word.
        self.use_cpu = not on_gpu
        if self.gradient_checkpointing is not None:
            self.activation_checkpointing, self.gradient_checkpointing = self.gradient_checkpointing, None
        self.activation_checkpointing_kwargs = {"use_reentrant": False} | self.checkpointing_kwargs()
        # Without this, accumulation keeps every rank's gradients whole (276 GB at 70B) until the last micro-batch.
        self.accelerator_config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        # A resumed run's sampler begins where the checkpoint was; transformers would skip as many again.
        self.ignore_data_skip = True
        # The data room has done what these ask for; TRL would do it again, from the hub.
        self.dataset_kwargs = {"skip_prepare_dataset": True}
        self.assistant_only_loss, self.chat_template_path = False, None
        super().__post_init__()


Arguments = tuple[DataArguments, ModelArguments, TrainArguments]


class _Parser(TrlParser):
    """`TrlParser` that names the nearest known key, and is as strict with YAML's values as with the command line's."""

    def __init__(self) -> None:
        groups = (DataArguments, ModelArguments, TrainArguments)
        super().__init__(groups, allow_abbrev=False, prog="recipe.train")
        self.keys = {action.dest: action for action in self._actions if action.dest != "help"}
        self.hints = {key: hint for group in groups for key, hint in get_type_hints(group).items()}

    def error(self, message: str) -> Any:
        raise UserError(message)

    def parse(self, argv: Sequence[str]) -> Arguments:
        argv = [
            part for arg in argv for part in (arg.split("=", 1) if arg.startswith(("--config=", "--data=")) else [arg])
        ]
        argv = _gathered(argv, "--data")
        config: dict[Any, Any] = {}
        path = ""
        if "--config" in argv:
            at = argv.index("--config")
            if at + 1 == len(argv):
                raise UserError("--config needs a path to a YAML file")
            path = argv[at + 1]
            argv = argv[:at] + argv[at + 2 :]
            config = read_config(path)
        flags = [arg[2:].split("=", 1)[0].replace("-", "_") for arg in argv if arg.startswith("--")]
        flags = [flag.removeprefix("no_") if flag not in self.keys else flag for flag in flags if flag != "help"]
        if mappings := {"datasets", "eval_datasets"} & {*flags}:
            raise UserError(f"--{min(mappings)} is for the YAML file; on the command line give --data PATH ...")
        raise_if(
            [
                *self.unknown(config, f"in {path}"),
                *self.unknown(flags, "on the command line"),
                *(problem for key, value in config.items() for problem in self.misfit(key, value, path)),
            ]
        )
        # argparse applies an argument's type to defaults that are text, so YAML's plain values go in as text.
        self.set_defaults_with_config(**{key: _as_text(value) for key, value in config.items()})
        *parsed, stray = self.parse_args_into_dataclasses(list(argv), return_remaining_strings=True)
        if stray:
            raise UserError(f"'{stray[0]}' on the command line is no key; give --config FILE and --key value")
        data, model, train = parsed
        return data, model, train

    def unknown(self, keys: Iterable[Any], where: str) -> list[str]:
        problems = []
        for key in keys:
            if key not in self.keys:
                near = difflib.get_close_matches(str(key), self.keys, n=1, cutoff=0.0)
                problems.append(f"unknown key '{key}' {where}; the nearest known key is '{near[0]}'")
        return problems

    def misfit(self, key: Any, value: Any, path: str) -> list[str]:
        """What argparse would say of `value` on the command line, and does not of a default."""
        if key not in self.keys:
            return []
        hint = self.hints[key]
        kinds = [get_origin(part) or part for part in (get_args(hint) or [hint])]
        if list in kinds and str not in kinds and value is not None and not isinstance(value, list):
            return [f"{key} in {path} is {value!r}; give a list"]
        if value is None or isinstance(value, list | dict):
            fits = type(value) in kinds or get_origin(hint) is type(value) or value == self.keys[key].default
            return [] if fits else [f"{key} in {path} is {value!r}; give a plain value"]
        try:
            self._check_value(self.keys[key], self._get_value(self.keys[key], _as_text(value)))
        except argparse.ArgumentError as error:
            return [f"{key} in {path}: {error.message}"]
        return []


def _gathered(argv: Sequence[str], flag: str) -> list[str]:
    """`argv` with what several `flag`s name behind one, as argparse wants a list."""
    values: list[str] = []
    others: list[str] = []
    at = 0
    while at < len(argv):
        if argv[at] != flag:
            others.append(argv[at])
            at += 1
            continue
        at += 1
        while at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
    return [*others, flag, *values] if values or flag in argv else others


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float | bool) else value


def read_config(path: str | Path, key: str = "--config") -> dict[Any, Any]:
    """Read the YAML file that `key` names as a mapping. Raises `UserError` where there is none."""
    try:
        config = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"no config file at '{path}'; give {key} an existing YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give {key} a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a YAML mapping of keys to values, not {type(config).__name__}")
    return config


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parse `argv` (default: the process's) into the three dataclasses.

    Returns:
        `(DataArguments, ModelArguments, TrainArguments)`, not yet activated.

    Raises:
        UserError: unknown keys (all of them, each with the nearest known one) or a value of the wrong type.
    """
    return _Parser().parse(sys.argv[1:] if argv is None else argv)
