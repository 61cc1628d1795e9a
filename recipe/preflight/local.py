"""What one process can see of a run: its keys, its model's files, its data, its disk."""

import subprocess
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipe import __version__
from recipe import data as datasets
from recipe import model as models
from recipe.arguments import Arguments, ModelArguments, TrainArguments
from recipe.errors import UserError
from recipe.loading import Weights
from recipe.preflight import disk, memory, settings
from recipe.sharding import plugin


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


@dataclass
class Report:
    """What the checks say: problems stop the run, warnings do not; `found` is None only where there are problems."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    found: Found | None = None


def inspect(arguments: Arguments, world_size: int | None, *, on_gpu: bool, launched: bool = True) -> Report:
    """Run every check that one process can.

    Args:
        world_size: ranks of the run; None where not known, and then the batch is not held against it.
        on_gpu: whether the ranks have GPUs.
        launched: whether a launcher has set this process's environment; False to check from a shell.
    """
    data, model, train = arguments
    report = Report(warnings=settings.costs(model))
    problems = report.problems
    if launched:
        problems += plugin.spread_problems() + plugin.device_problems(torch.cuda.device_count() if on_gpu else 0)
        report.warnings += plugin.idle_gpus(torch.cuda.device_count() if on_gpu else 0)
    problems += (
        settings.problems(data, model, train) + datasets.check(data, train) + datasets.at_hand(data, fetch=not launched)
    )
    problems += settings.batch(train, world_size) + disk.folder_problems(train)
    compute_dtype = torch.bfloat16 if train.bf16 or model.param_dtype == "bfloat16" else torch.float32
    problems += models.attention_problems(model, compute_dtype, on_gpu)
    if model.model_name_or_path is not None:
        try:
            report.found = _read_model(model, train, compute_dtype, launched, report)
            if launched and world_size is not None:
                problems += memory.copy_problems(report.found.fresh, model, train, world_size, on_gpu)
        except UserError as error:
            problems += error.problems
    return report


@cache
def versions() -> dict[str, str]:
    """The packages that what a run computes depends on."""
    names = ("torch", "transformers", "accelerate", "trl", "datasets", "safetensors", "bitsandbytes")
    return {name: metadata.version(name) for name in names}


@cache
def code_version() -> str:
    """The revision of this code, by git where it is a checkout (with `+changes` where files differ from it), else by
    version."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        revision = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{revision.strip()}{'+changes' if changed else ''}"


def _read_model(
    model: ModelArguments, train: TrainArguments, compute_dtype: torch.dtype, launched: bool, report: Report
) -> Found:
    """What can be read of the model; what is wrong with it goes into `report`. Raises `UserError` where nothing can be
    read."""
    folder, awaited = models.find_folder(model, download=launched)  # a check from a shell fetches no weights
    report.warnings += awaited
    trust = train.trust_remote_code
    config, tokenizer = models.load_config(folder, trust), models.load_tokenizer(folder, trust, train.eos_token)
    master_dtype = models.torch_dtype(model.param_dtype)
    # The attention has been checked, and may be one that cannot be built here; shapes do not depend on it.
    fresh = models.meta_model(config, "sdpa", master_dtype, trust)
    report.problems += models.vocabulary_problems(config, tokenizer) + models.head_problems(fresh)
    report.problems += models.positions_problems(config.max_position_embeddings, train.max_length)
    generation = GenerationConfig()
    try:
        generation = models.load_generation_config(folder, config, tokenizer)
        report.problems += [] if awaited else Weights(folder).problems(fresh)
    except UserError as error:
        report.problems += error.problems
    report.problems += disk.space_problems(fresh, model, train)
    return Found(folder, config, tokenizer, generation, fresh, compute_dtype, master_dtype)
