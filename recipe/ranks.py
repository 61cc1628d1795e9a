"""What all ranks of a run do together: fail together, and agree on what one of them knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from recipe.errors import UserError

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def is_main() -> bool:
    return dist.get_rank() == 0


@contextmanager
def all_or_none(doing: str) -> Iterator[None]:
    """Run the body on every rank; if it raised on one, raise on all of them, so that none waits for another for ever.

    Raises:
        UserError: where the body raised one, with every rank's distinct problems.
        RuntimeError: for any other exception of any rank, naming the rank; that rank's own exception is its cause.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - it is raised again below, on every rank
        error = raised
    mine = None if error is None else (type(error).__name__, str(error), getattr(error, "problems", None))
    everyone: list = gather(mine)
    failed = {number: what for number, what in enumerate(everyone) if what is not None}
    if not failed:
        return
    if all(problems for _, _, problems in failed.values()):
        distinct = dict.fromkeys(p for _, _, problems in failed.values() for p in problems)
        raise UserError(*distinct) from error
    listed = "; ".join(f"rank {number}: {kind}: {text}" for number, (kind, text, _) in failed.items())
    raise RuntimeError(f"{doing} failed on {len(failed)} of {world_size()} ranks: {listed}") from error


def gather(value: T) -> list[T]:
    """Every rank's `value`, by rank, on every rank."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def from_main(value: T | None) -> T:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]
