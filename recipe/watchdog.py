"""Ends a run that hangs, and says which rank hangs, and in which phase.

A hung rank keeps the others waiting in a collective that says nothing until its own time-out (`ddp_timeout`, hours),
and then only which collective it was. Here each rank has a thread that publishes, through the launcher's store, how far
the rank is; when a rank has got no further for `hang_timeout`, its thread reads what all others published, twice.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from recipe.errors import record
from recipe.rendezvous import Rendezvous

NAME = "watchdog"
LISTED = 16  # ranks that a report lists one by one


class Hang(RuntimeError):
    """A rank got no further."""


class Watchdog:
    """Watches this rank.

    Args:
        rendezvous: a store of the watchdog's own: a client of a store answers one thread at a time.
        timeout: seconds without progress; 0 watches nothing.
        end: called with the `Hang`, in the watchdog's thread; does not return.

    Attributes:
        progress: counts what the rank has done, whatever it is.
        phase: what it is doing.
    """

    def __init__(self, rendezvous: Rendezvous, timeout: float, end: Callable[[Hang], Any]):
        self.rendezvous, self.timeout, self.end = rendezvous, timeout, end
        self.progress, self.phase = 0, "starting"
        self.interval = min(1.0, timeout / 8)
        self._published = 0
        if timeout > 0:
            threading.Thread(target=self._watch, daemon=True, name=NAME).start()

    def at(self, phase: str) -> None:
        """The rank got further; it is now in `phase`."""
        self.phase = phase
        self.progress += 1

    def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while True:
            if self.progress != seen:
                seen, since = self.progress, time.monotonic()
            idle = time.monotonic() - since
            reachable = self._publish(idle)
            if idle > self.timeout:
                dump = "the store of rank 0's launcher does not answer: its node is down, or out of reach"
                self.end(Hang(self._report(idle) if reachable else dump))
            time.sleep(self.interval)

    def _publish(self, idle: float) -> bool:
        """Whether the store took it."""
        self._published += 1
        mine = {"node": os.uname().nodename, "phase": self.phase, "idle": idle}
        try:
            self.rendezvous.set(NAME, mine | {"progress": self.progress, "published": self._published})
        except dist.DistError:
            return False
        return True

    def _report(self, idle: float) -> str:
        before = self._read()
        for _ in range(3):  # every thread that is alive publishes again meanwhile, those that report too
            time.sleep(self.interval)
            self._publish(idle)
        return describe(before, self._read(), idle)

    def _read(self) -> list[dict[str, Any] | None]:
        return [self.rendezvous.read(NAME, rank) for rank in range(self.rendezvous.world_size)]


def describe(before: list[dict[str, Any] | None], after: list[dict[str, Any] | None], idle: float) -> str:
    """Which rank holds up the others, from what each published at two times.

    A rank whose thread has fallen silent is frozen or cut off; if there is none, it is the rank that did least.
    """
    silent = [rank for rank, (old, new) in enumerate(zip(before, after, strict=True)) if new is None or new == old]
    progress = [-1 if state is None else state["progress"] for state in after]
    held_up_by = silent or [rank for rank, done in enumerate(progress) if done == min(progress)]
    why = "silent: frozen, or its node is out of reach" if silent else "alive and furthest behind"
    if not silent and min(progress) == max(progress):
        why = "alive, and as far as all others: a collective that does not end, or a step slower than hang_timeout"
    head = f"no progress for {idle:.0f} s (hang_timeout). Held up by "
    head += "; ".join(_line(rank, after[rank]) for rank in held_up_by[:LISTED]) + f" ({why})"
    others = [rank for rank in range(len(after)) if rank not in held_up_by]
    return "\n".join([head, *(f"  {_line(rank, after[rank])}" for rank in others[:LISTED])])


def _line(rank: int, state: dict[str, Any] | None) -> str:
    if state is None:
        return f"rank {rank}, of which nothing was ever heard"
    return f"rank {rank} on {state['node']}, last heard of in phase '{state['phase']}'"


def end_process(hang: Hang) -> None:
    """Say what hangs and where each thread of this process is, and end it: its main thread may never come back."""
    print(f"recipe: {hang}", file=sys.stderr)
    faulthandler.dump_traceback(sys.stderr)
    record(str(hang))
    os._exit(1)
