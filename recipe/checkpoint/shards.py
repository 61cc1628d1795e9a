"""The sharded files of a checkpoint, by torch's distributed checkpoint, in Accelerate's folder names."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from recipe.errors import UserError

# Accelerate's names, so that stock tools (`accelerate merge-weights`) read these checkpoints.
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_KEYS = {MODEL: "model", OPTIMIZER: "optimizer"}


def save(folder: Path, name: str, state: dict[str, Any]) -> None:
    """Write this rank's part of `state` into `folder/name`. Collective; raises on every rank if one cannot write.

    Raises:
        UserError: a disk is full.
        RuntimeError: any other failure, with each failed rank's.
    """
    with _failures_of_ranks(f"writing {folder / name}"):
        dcp.save({_KEYS[name]: state}, storage_writer=dcp.FileSystemWriter(folder / name, sync_files=True))


def load(folder: Path, name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Fill `state`, which says what this rank holds, from `folder/name`, whatever number of ranks wrote it. Collective.

    Raises:
        RuntimeError: a key of `state` is not in the files, or they cannot be read; with each failed rank's reason.
    """
    wrapped = {_KEYS[name]: state}
    with _failures_of_ranks(f"reading {folder / name}"):
        dcp.load(wrapped, storage_reader=dcp.FileSystemReader(folder / name))
    return wrapped[_KEYS[name]]


@contextmanager
def _failures_of_ranks(doing: str) -> Iterator[None]:
    """torch gathers the ranks' failures in a `CheckpointException`, which is no `Exception`; say them in one line."""
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
        listed = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        if any(isinstance(c, OSError) and c.errno in (errno.ENOSPC, errno.EDQUOT) for c in causes.values()):
            raise UserError(
                f"{doing}: the disk is full ({listed}); free some, or set output_dir to a larger disk"
            ) from error
        raise RuntimeError(f"{doing}: {listed}") from error
