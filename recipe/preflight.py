"""Every problem of a run that can be known before it costs anything: configuration, files, versions, disk.

Each check returns its problems; `check` gathers them all, so that the user mends them in one go and not one a queue
time.
"""

import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from huggingface_hub.serialization._base import parse_size_to_int
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipe import model as models
from recipe.arguments import Arguments, DataArguments, ModelArguments, TrainArguments
from recipe.data import check as check_data
from recipe.errors import UserError, raise_if
from recipe.loading import Weights
from recipe.sharding import plugin

OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "paged_adamw_32bit", "adamw_8bit")
DISK_MARGIN = 1.2  # for what the estimate of a checkpoint does not know


@dataclass(frozen=True)
class Found:
    """What the checks read on the way, so that nothing is read twice."""

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    fresh: PreTrainedModel
    compute_dtype: torch.dtype
    master_dtype: torch.dtype


def check(arguments: Arguments, world_size: int, *, on_gpu: bool, launched: bool = True) -> Found:
    """Run every check.

    Args:
        world_size: ranks of the run.
        on_gpu: whether the ranks have GPUs.
        launched: whether a launcher has set this process's environment; False to check from a shell.

    Raises:
        UserError: all problems found.
    """
    data, model, train = arguments
    problems = plugin.spread_problems() if launched else []
    problems += required(model, train) + check_data(data, train) + evaluation(data, train)
    problems += batch(train, world_size) + unsupported(model, train) + disk_folder(train) + shard_size(train)
    if launched and not on_gpu:
        problems += plugin.cpu_problems()
    compute_dtype = torch.bfloat16 if train.bf16 or model.param_dtype == "bfloat16" else torch.float32
    problems += models.attention_problems(model, compute_dtype, on_gpu)
    found = None
    if model.model_name_or_path is not None:
        try:
            found, wrong = _read_model(model, train, compute_dtype)
            problems += wrong
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    assert found is not None
    return found


def versions() -> dict[str, str]:
    """The packages that what a run computes depends on."""
    names = ("torch", "transformers", "accelerate", "trl", "datasets", "safetensors", "bitsandbytes")
    return {name: metadata.version(name) for name in names}


def _read_model(model: ModelArguments, train: TrainArguments, compute_dtype: torch.dtype) -> tuple[Found, list[str]]:
    """What can be read of the model, and what is wrong with it. Raises `UserError` where nothing can be read."""
    folder = models.resolve_folder(model)
    config, tokenizer = models.load_config(folder), models.load_tokenizer(folder)
    master_dtype = models.torch_dtype(model.param_dtype)
    # The attention has been checked, and may be one that cannot be built here; shapes do not depend on it.
    fresh = models.meta_model(config, "sdpa", master_dtype)
    problems = models.vocabulary_problems(config, tokenizer) + models.head_problems(fresh)
    positions = config.max_position_embeddings
    if train.max_length is not None and train.max_length > positions:
        problems.append(
            f"max_length is {train.max_length} and the model has {positions} positions; set at most {positions}"
        )
    generation = GenerationConfig()
    try:
        generation = models.load_generation_config(folder, tokenizer)
        problems += Weights(folder).problems(fresh)
    except UserError as error:
        problems += error.problems
    problems += disk_space(fresh, model, train)
    return Found(folder, config, tokenizer, generation, fresh, compute_dtype, master_dtype), problems


def required(model: ModelArguments, train: TrainArguments) -> list[str]:
    values = {
        "model_name_or_path": model.model_name_or_path,
        "output_dir": train.output_dir,
        "global_batch_size": train.global_batch_size,
    }
    return [f"{key} is not set; it has no default" for key, value in values.items() if value is None]


def costs(model: ModelArguments) -> list[str]:
    """Choices that are allowed and cost something, for the log."""
    if model.param_dtype != "bfloat16":
        return []
    return [
        "warning: param_dtype is bfloat16: weights keep 8 bits, so updates smaller than about 1/256 of a weight are "
        "lost, and torch's Adam keeps its moments in bf16 too; float32 trains better where it fits"
    ]


def batch(train: TrainArguments, world_size: int) -> list[str]:
    """The global batch has to be a multiple of ranks x micro-batch."""
    asked, micro = train.global_batch_size, train.per_device_train_batch_size
    problems = []
    if micro < 1:
        problems.append(f"per_device_train_batch_size is {micro}; set 1 or more")
    if train.gradient_accumulation_steps != 1:
        problems.append(
            f"gradient_accumulation_steps is {train.gradient_accumulation_steps}; it is derived: leave it out and set "
            "global_batch_size"
        )
    together = world_size * micro
    if asked is not None and micro >= 1 and (asked < 1 or asked % together):
        near = sorted({max(1, asked // together) * together, max(1, asked // together + 1) * together})
        problems.append(
            f"global_batch_size {asked} is not a multiple of {world_size} ranks x {micro} samples "
            f"(per_device_train_batch_size); set it to {' or '.join(map(str, near))}"
        )
    return problems


def evaluation(data: DataArguments, train: TrainArguments) -> list[str]:
    """Rows are held out if and only if they are evaluated on."""
    held_out = bool(data.eval_samples or data.dataset_test_split)
    if held_out and train.eval_strategy == "no":
        return ["rows are held out (eval_samples or dataset_test_split) and eval_strategy is 'no'; set it to 'steps'"]
    if not held_out and train.eval_strategy == "steps":
        return [f"eval_strategy is '{train.eval_strategy}' and nothing is held out; set eval_samples"]
    return []


def shard_size(train: TrainArguments) -> list[str]:
    """Read now what the export will need."""
    try:
        if parse_size_to_int(train.max_shard_size) > 0:
            return []
    except ValueError:
        pass
    return [f"max_shard_size is '{train.max_shard_size}'; give a positive size in KB, MB, GB or TB, such as 5GB"]


def rows(train: TrainArguments, num_rows: int) -> list[str]:
    """A step must not see a sample twice."""
    assert train.global_batch_size is not None, "required() refuses that"
    if num_rows >= train.global_batch_size:
        return []
    kind = "packed blocks" if train.packing else "samples"
    return [
        f"the training set has {num_rows} {kind}, fewer than global_batch_size {train.global_batch_size}; lower "
        "global_batch_size or give more data"
    ]


def unsupported(model: ModelArguments, train: TrainArguments) -> list[str]:
    """Keys of the libraries' that do not go with a sharded run, or that this recipe does otherwise."""
    problems = []
    refused = {
        "save_only_model": "a sharded checkpoint without its optimizer cannot be resumed; the export has the weights",
        "load_best_model_at_end": "export a checkpoint of your choice instead",
        "push_to_hub": "push the exported folder when the run has ended",
        "auto_find_batch_size": "set per_device_train_batch_size; a rank that retries alone leaves the others waiting",
        "accelerator_config": "the accelerate file and global_batch_size decide",
        "dataset_kwargs": "the data set is prepared before TRL sees it",
        "fp16": "use bf16; fp16 needs loss scaling, which this recipe does not do",
        "ignore_data_skip": "a resume goes on with the samples that come next",
    }
    problems += [f"{key} is not supported: {way}" for key, way in refused.items() if getattr(train, key)]
    for key in ("use_peft", "load_in_4bit", "load_in_8bit"):
        if getattr(model, key):
            problems.append(f"{key} is not supported yet; unset it for full fine-tuning")
    for key in ("save_strategy", "eval_strategy", "logging_strategy"):
        if getattr(train, key) not in ("steps", "no"):
            problems.append(f"{key} is '{getattr(train, key)}'; set 'steps' (with {key.split('_')[0]}_steps) or 'no'")
    if train.optim not in OPTIMIZERS:
        problems.append(f"optim '{train.optim}' is not known to resume under FSDP; set one of {', '.join(OPTIMIZERS)}")
    if model.dtype is not None:
        problems.append(f"dtype is '{model.dtype}'; set param_dtype instead: it is the dtype of weights and moments")
    checkpointing = (
        train.activation_checkpointing if train.gradient_checkpointing is None else train.gradient_checkpointing
    )
    if checkpointing and plugin.activation_checkpointing_asked():
        problems.append(
            "activation checkpointing is on twice: fsdp_activation_checkpointing in the accelerate file and "
            "activation_checkpointing in the run's config; switch one of them off"
        )
    if train.checkpointing_kwargs().get("use_reentrant"):
        problems.append("activation_checkpointing_kwargs sets use_reentrant: true; FSDP needs false")
    return problems


def disk_folder(train: TrainArguments) -> list[str]:
    folder = _existing(Path(train.output_dir or "."))
    if not folder.is_dir():
        return [f"output_dir {train.output_dir}: {folder} is a file; set output_dir to a folder"]
    if not os.access(folder, os.W_OK):
        return [f"output_dir {train.output_dir}: {folder} cannot be written to; set output_dir to a folder that can"]
    return []


def disk_space(fresh: PreTrainedModel, model: ModelArguments, train: TrainArguments) -> list[str]:
    """Room for one checkpoint and the export, with a margin."""
    folder = _existing(Path(train.output_dir or "."))
    parameters, per_parameter = fresh.num_parameters(), checkpoint_bytes(model, train)
    checkpoint = 0 if train.save_strategy == "no" else parameters * per_parameter
    export = parameters * models.torch_dtype(train.export_dtype).itemsize if train.export else 0
    needed, free = int(DISK_MARGIN * (checkpoint + export)), shutil.disk_usage(folder).free
    if free >= needed:
        return []
    return [
        f"{folder} has {free / 1e9:.1f} GB free and a checkpoint with the export needs {needed / 1e9:.1f} GB "
        f"({DISK_MARGIN} x ({checkpoint / 1e9:.1f} + {export / 1e9:.1f})); free some, or set output_dir to a "
        "larger disk"
    ]


def checkpoint_bytes(model: ModelArguments, train: TrainArguments) -> int:
    """Bytes of a checkpoint for each parameter: the master weight and two moments, bitsandbytes' written in fp32."""
    master = models.torch_dtype(model.param_dtype).itemsize
    return master + 2 * (master if train.optim.startswith("adamw_torch") else 4)


def _existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
