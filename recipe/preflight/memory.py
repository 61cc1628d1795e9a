"""Whether the host has memory for the copy that checkpoints are written from."""

import os
from pathlib import Path

import psutil
from transformers import PreTrainedModel

from recipe import model as models
from recipe.arguments import ModelArguments, TrainArguments
from recipe.preflight.disk import checkpoint_bytes

_CGROUPS = Path("/sys/fs/cgroup")


def copy_problems(
    fresh: PreTrainedModel, model: ModelArguments, train: TrainArguments, world_size: int, on_gpu: bool
) -> list[str]:
    """The ranks of this node together copy their shards of weights and moments; on CPU ranks the shards themselves and
    their gradients are in the same memory."""
    if not train.async_save or train.save_strategy == "no":
        return []
    share = fresh.num_parameters() * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / world_size
    copied = share * checkpoint_bytes(model, train)
    trained = 0 if on_gpu else copied + share * models.torch_dtype(model.param_dtype).itemsize
    free = available()
    if copied + trained <= free:
        return []
    beside = f", beside the {trained / 1e9:.1f} GB that it trains," if trained else ""
    return [
        f"async_save copies {copied / 1e9:.1f} GB of a node's weights and moments to host memory{beside} and "
        f"{free / 1e9:.1f} GB are free; set async_save: false (training then waits for the disk), or take more nodes"
    ]


def available() -> int:
    """Bytes of memory that this process may still take: of the machine, and of the control groups that it is in."""
    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def _left_in_cgroups() -> list[int]:
    left = []
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, path = line.split(":", 2)
        unified = number == "0" and not controllers
        if not unified and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS if unified else _CGROUPS / "memory"
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            limit, used = ("".join(_lines(folder / name)) for name in names)
            if limit.isdigit() and used.isdigit():
                left.append(max(0, int(limit) - int(used)))
            if folder == root:
                break
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
