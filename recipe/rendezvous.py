"""What ranks tell each other outside any process group: through the key-value store that the launcher opened for them.

It needs no device and no collective, so it works before there is a process group, and in a thread beside a hung one.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recipe.errors import UserError

_SLICE = timedelta(seconds=2)  # a wait in the store hears no signal until it ends


class Rendezvous:
    """This launch's store.

    Attributes:
        rank: this rank, of `world_size`.
        num_nodes: nodes of the launch.
    """

    def __init__(self) -> None:
        self._store, self.rank, self.world_size = next(dist.rendezvous("env://"))
        self._store.set_timeout(timedelta(seconds=30))
        self.num_nodes = self.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def set(self, name: str, value: Any) -> None:
        """Publish this rank's JSON `value` of `name`, in the place of an earlier one."""
        self._store.set(f"recipe/{name}/{self.rank}", json.dumps(value))

    def read(self, name: str, rank: int) -> Any:
        """`rank`'s last value of `name`, or None where it has published none."""
        key = f"recipe/{name}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def gather(self, name: str, value: Any, patience: float | None = None) -> list[Any]:
        """Every rank's `value` of `name`, by rank. Every rank calls it, once for each name.

        Args:
            patience: seconds to wait for the slowest rank; None: for ever (a launcher ends those who wait for a rank
                that died).

        Raises:
            TimeoutError: with the ranks that are missing.
        """
        self.set(name, value)
        keys = self._keys(name)
        began = time.monotonic()
        while not self._has(keys):
            if patience is not None and time.monotonic() - began > patience:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(
                    f"ranks {', '.join(map(str, missing))} have not reached '{name}' in {patience:.0f} s; are their "
                    "nodes up, and do their logs say more?"
                )
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def to_main(self, name: str, value: Any) -> list[Any] | None:
        """Every rank's `value` of `name`, by rank, on rank 0; None elsewhere, at once. The store forgets them."""
        self.set(name, value)
        if self.rank != 0:
            return None
        keys = self._keys(name)
        while not self._has(keys):
            pass
        values = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return values

    def from_main(self, name: str, value: Any) -> Any:
        """Rank 0's `value` of `name`, on every rank, once rank 0 has come to it."""
        key = f"recipe/{name}/0"
        if self.rank == 0:
            self.set(name, value)
            return value
        while not self._has([key]):
            pass
        return json.loads(self._store.get(key))

    def _keys(self, name: str) -> list[str]:
        return [f"recipe/{name}/{rank}" for rank in range(self.world_size)]

    def _has(self, keys: list[str]) -> bool:
        try:
            self._store.wait(keys, _SLICE)
        except dist.DistStoreError:
            return False
        return True

    @contextmanager
    def all_or_none(self, name: str) -> Iterator[None]:
        """Run the body on every rank; where it raised a `UserError` on some, raise all their problems on every rank."""
        problems: list[str] = []
        try:
            yield
        except UserError as error:
            problems = error.problems
        found = merge(self.gather(name, {"node": os.uname().nodename, "problems": problems}))
        if found:
            raise UserError(*found)


def merge(reports: list[dict[str, Any]]) -> list[str]:
    """The distinct problems of all ranks ({"node", "problems"} each); one that not every rank has says on which nodes
    it was met."""
    nodes: dict[str, dict[str, None]] = {}
    counts: dict[str, int] = {}
    for report in reports:
        for problem in dict.fromkeys(report["problems"]):
            nodes.setdefault(problem, {})[report["node"]] = None
            counts[problem] = counts.get(problem, 0) + 1
    return [
        problem if counts[problem] == len(reports) else f"{problem} (on {', '.join(where)})"
        for problem, where in nodes.items()
    ]
