"""Whether the host has memory for the copy that checkpoints are written from."""

import os
from pathlib import Path

import psutil
from transformers import PreTrainedModel

from recipe import model as models
from recipe.arguments import ModelArguments, TrainArguments
from recipe.plan import host
from recipe.preflight import disk
from recipe.sharding import plugin

_CGROUPS, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def copy_problems(
    fresh: PreTrainedModel, model: ModelArguments, train: TrainArguments, world_size: int, on_gpu: bool
) -> list[str]:
    """The ranks of this node together copy their shards of weights and moments; on CPU ranks the shards themselves and
    their gradients are in the same memory."""
    if not train.async_save or train.save_strategy == "no":
        return []
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    parameters, master = fresh.num_parameters(), models.torch_dtype(model.param_dtype).itemsize
    shards, optimizer = plugin.ranks_that_share(local, world_size), disk.optimizer(train)
    of_a_rank = host.save_bytes(
        parameters, shards=shards, world_size=world_size, master_bytes=master, optimizer=optimizer
    )
    copied = local * sum(of_a_rank)
    moments = 2 * master if optimizer.moments is None else optimizer.moments
    in_memory = not on_gpu or plugin.offload_asked()
    trained = local * parameters / shards * (2 * master + moments) if in_memory else 0
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
    for line in _lines(_MINE):
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
                left.append(max(0, int(limit) - int(used) + _cached_files(folder, total="" if unified else "total_")))
            if folder == root:
                break
    return left


def _cached_files(group: Path, total: str) -> int:
    """Bytes of files that were read or written, which the group is charged for and the kernel gives back."""
    stat = dict(line.split() for line in _lines(group / "memory.stat"))
    return sum(int(stat.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
