"""The run's keys against each other: what is missing, does not go together, or is not this recipe's."""

from huggingface_hub.serialization._base import parse_size_to_int

from recipe.arguments import DataArguments, ModelArguments, TrainArguments
from recipe.run_folder import IDENTIFYING
from recipe.sharding import plugin

OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "paged_adamw_32bit", "adamw_8bit")


def problems(data: DataArguments, model: ModelArguments, train: TrainArguments) -> list[str]:
    """All that is wrong with the keys, whatever the number of ranks."""
    return [
        *required(model, train),
        *evaluation(data, train),
        *unsupported(model, train),
        *shard_size(train),
        *timeouts(train),
    ]


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
        "param_dtype is bfloat16: weights keep 8 bits, so updates smaller than about 1/256 of a weight are "
        "lost, and torch's Adam keeps its moments in bf16 too; float32 trains better where it fits"
    ]


def batch(train: TrainArguments, world_size: int | None) -> list[str]:
    """The global batch has to be a multiple of ranks x micro-batch; `world_size` None leaves the ranks out."""
    asked, micro = train.global_batch_size, train.per_device_train_batch_size
    problems = []
    if micro < 1:
        problems.append(f"per_device_train_batch_size is {micro}; set 1 or more")
    if train.gradient_accumulation_steps != 1:
        problems.append(
            f"gradient_accumulation_steps is {train.gradient_accumulation_steps}; it is derived: leave it out and set "
            "global_batch_size"
        )
    if world_size is None:
        return problems
    together = world_size * micro
    if asked is not None and micro >= 1 and (asked < 1 or asked % together):
        near = sorted({max(1, asked // together) * together, max(1, asked // together + 1) * together})
        problems.append(
            f"global_batch_size {asked} is not a multiple of {world_size} ranks x {micro} samples "
            f"(per_device_train_batch_size); set it to {' or '.join(map(str, near))}"
        )
    if asked is not None and asked > together and plugin.offload_asked() and plugin.version_asked() == 1:
        # torch.distributed.fsdp, of `cpu_offload`: it takes the new gradient in the place of the one that is there.
        problems.append(
            f"fsdp_offload_params with FSDP1 cannot accumulate gradients, and global_batch_size {asked} takes "
            f"{asked // together} micro-batches; raise per_device_train_batch_size, lower global_batch_size to "
            f"{together}, or set fsdp_version: 2"
        )
    return problems


def evaluation(data: DataArguments, train: TrainArguments) -> list[str]:
    """Rows are held out if and only if they are evaluated on."""
    held_out = bool(data.eval_samples or data.dataset_test_split or data.eval_datasets)
    if held_out and train.eval_strategy == "no":
        keys = "eval_samples, eval_datasets or dataset_test_split"
        return [f"rows are held out ({keys}) and eval_strategy is 'no'; set it to 'steps'"]
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


def timeouts(train: TrainArguments) -> list[str]:
    """The watchdog has to speak first: it knows which rank hangs, and a collective's time-out does not."""
    if train.hang_timeout < 0:
        return [f"hang_timeout is {train.hang_timeout:g}; set seconds, or 0 for never"]
    if train.hang_timeout >= train.ddp_timeout:
        return [
            f"hang_timeout {train.hang_timeout:g} is not below ddp_timeout {train.ddp_timeout} (both in seconds); "
            "lower hang_timeout or raise ddp_timeout"
        ]
    return []


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
        "metric_for_best_model": "export a checkpoint of your choice instead",
        "enable_jit_checkpoint": "SIGUSR1 and SIGTERM already make all ranks save, at the same step",
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
    if train.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        problems.append(
            f"lr_scheduler_type is '{train.lr_scheduler_type}'; set one that depends on the step alone, such as cosine"
        )
    unknown = [key for key in train.accepted_changes() if key not in IDENTIFYING]
    if unknown:
        problems.append(
            f"accept_changes names {', '.join(unknown)}; what a run is known by is {', '.join(sorted(IDENTIFYING))}"
        )
    if train.keep_every is not None and train.keep_every < 1:
        problems.append(f"keep_every is {train.keep_every}; set steps, a multiple of save_steps, or leave it out")
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
