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
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from recipe.errors import record
from recipe.rendezvous import Rendezvous

NAME = "watchdog"
LISTED = 16  # ranks that a report lists one by one
ANSWER_SECONDS = 30.0  # until the store is taken for unreachable; its own calls may wait as long as TCP does


class Watchdog:
    """Watches this rank, and publishes how far it is.

    Args:
        rendezvous: a store of the watchdog's own: a client of a store answers one thread at a time.
        timeout: seconds without progress; 0 watches nothing.
        end: called with what hangs, in the watchdog's thread; does not return.

    Attributes:
        progress: counts what the rank has done, whatever it is.
        phase: what it is doing.
        patient: whether this phase may take as long as it likes.
    """

    def __init__(self, rendezvous: Rendezvous, timeout: float, end: Callable[[str], Any]):
        self.rendezvous, self.timeout, self.end = rendezvous, timeout, end
        # Nodes may start minutes apart; those who wait for the last one say so themselves (`Rendezvous.gather`).
        self.progress, self.phase, self.patient = 0, "starting", True
        self.interval = min(1.0, timeout / 8)
        if timeout > 0:
            threading.Thread(target=self._publish, daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()

    def at(self, phase: str, patient: bool = False) -> None:
        """The rank got further; it is now in `phase`."""
        self.phase, self.patient = phase, patient
        self.progress += 1

    def _publish(self) -> None:
        published = 0
        while True:
            published += 1
            state = {"node": os.uname().nodename, "phase": self.phase, "progress": self.progress}
            with suppress(dist.DistError):  # `_watch` says so, if it comes to that
                self.rendezvous.set(NAME, state | {"published": published})
            time.sleep(self.interval)

    def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while True:
            if self.progress != seen or self.patient:
                seen, since = self.progress, time.monotonic()
            idle = time.monotonic() - since
            if idle > self.timeout:
                self.end(self._report(idle))
            time.sleep(self.interval)

    def _report(self, idle: float) -> str:
        """In a thread, since the store may never answer."""
        answer = [
            f"no progress for {idle:.0f} s (hang_timeout) in phase '{self.phase}', and the store of rank 0's launcher "
            "does not answer: its node is down, or out of reach"
        ]

        def ask() -> None:
            with suppress(dist.DistError):
                before = self._read()
                time.sleep(3 * self.interval)  # every rank that is alive publishes meanwhile
                answer[0] = describe(before, self._read(), idle)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS)
        return answer[0]

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


def end_process(hang: str) -> None:
    """Say what hangs and where each thread of this process is, and end it: its main thread may never come back."""
    print(f"recipe: {hang}", file=sys.stderr)
    faulthandler.dump_traceback(sys.stderr)
    record(hang, exit_code=1)
    os._exit(1)
