"""The sharded files of a checkpoint, by torch's distributed checkpoint, in Accelerate's folder names."""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

# Accelerate's names, so that stock tools (`accelerate merge-weights`) read these checkpoints.
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_KEYS = {MODEL: "model", OPTIMIZER: "optimizer"}


def save(folder: Path, name: str, state: dict[str, Any]) -> None:
    """Write this rank's part of `state` into `folder/name`. Collective; raises on every rank if one cannot write."""
    dcp.save({_KEYS[name]: state}, storage_writer=dcp.FileSystemWriter(folder / name, sync_files=True))


def load(folder: Path, name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Fill `state`, which says what this rank holds, from `folder/name`, whatever number of ranks wrote it. Collective.

    Raises:
        CheckpointException: a key of `state` is not in the files.
    """
    wrapped = {_KEYS[name]: state}
    dcp.load(wrapped, storage_reader=dcp.FileSystemReader(folder / name))
    return wrapped[_KEYS[name]]
