"""Whether the run's checkpoints and its export have a place to go."""

import math
import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from recipe import model as models
from recipe.arguments import ModelArguments, TrainArguments
from recipe.checkpoint.find import candidates
from recipe.checkpoint.publish import TEMPORARY
from recipe.plan import host
from recipe.plan.setup import OPTIMIZERS, Optimizer

DISK_MARGIN = 1.2  # for what the estimate of a checkpoint does not know


def folder_problems(train: TrainArguments) -> list[str]:
    folder = existing(Path(train.output_dir or "."))
    if not folder.is_dir():
        return [f"output_dir {train.output_dir}: {folder} is a file; set output_dir to a folder"]
    if not os.access(folder, os.W_OK):
        return [f"output_dir {train.output_dir}: {folder} cannot be written to; set output_dir to a folder that can"]
    return []


def space_problems(fresh: PreTrainedModel, model: ModelArguments, train: TrainArguments) -> list[str]:
    """Room for the checkpoints that will lie there together and are not there yet, and for the export."""
    folder = existing(Path(train.output_dir or "."))
    parameters = fresh.num_parameters()
    checkpoint = parameters * checkpoint_bytes(model, train)
    export = parameters * models.torch_dtype(train.export_dtype).itemsize if train.export else 0
    run_dir = Path(train.output_dir or ".").expanduser()
    # What an interrupted save left is removed when the run starts.
    there = len(candidates(run_dir)) + len(list(run_dir.glob(f"*{TEMPORARY}")))
    number = checkpoints_to_come(train, there)
    needed, free = int(DISK_MARGIN * (number * checkpoint + export)), shutil.disk_usage(folder).free
    if free >= needed:
        return []
    return [
        f"{folder} has {free / 1e9:.1f} GB free and the run needs {needed / 1e9:.1f} GB ({DISK_MARGIN} x ({number} "
        f"checkpoints of {checkpoint / 1e9:.1f} + export of {export / 1e9:.1f})); free some, set output_dir to a "
        "larger disk, or lower save_total_limit"
    ]


def checkpoints_to_come(train: TrainArguments, there: int) -> int:
    """Checkpoints that will be written before one is deleted: the limit, and the new one beside it. Without a limit,
    as many as max_steps and save_steps make, or 1 where the data decide on the steps."""
    if train.save_strategy == "no":
        return 0
    saves = math.ceil(train.max_steps / train.save_steps) if train.max_steps > 0 and train.save_steps >= 1 else None
    most = saves if train.save_total_limit is None else train.save_total_limit + 1
    if saves is not None and most is not None:
        most = min(saves, most)
    return max(1, (most or 1) - there)


def checkpoint_bytes(model: ModelArguments, train: TrainArguments) -> int:
    """Bytes of a checkpoint for each parameter."""
    return int(host.saved_bytes(models.torch_dtype(model.param_dtype).itemsize, optimizer(train)))


def optimizer(train: TrainArguments) -> Optimizer:
    """As the planner knows it; of one that is refused, what takes the most."""
    return OPTIMIZERS.get(train.optim, OPTIMIZERS["adamw_8bit"])


def existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
