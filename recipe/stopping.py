"""A request to stop, from whoever makes it to all ranks: at the next step boundary they save, and leave.

It comes as SIGUSR1 or SIGTERM to any rank, or as a line in one of the files that STOP_FILES names, which every rank
polls: under a scheduler a signal reaches only the launcher (see `recipe.launch` and `slurm/job.sh`).

SIGUSR1 means: save and come back; the exit code asks to be started again. SIGTERM means: save and leave; whoever sent
it knows what comes next.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

STOP_FILES = "STOP_FILES"
LEAVE, COME_BACK = 1, 2
KINDS = {signal.SIGTERM: LEAVE, signal.SIGUSR1: COME_BACK}
# 75 is EX_TEMPFAIL of sysexits.h, "try again later"; 143 what a shell says of a process that SIGTERM ended.
EXIT_CODES = {LEAVE: 128 + signal.SIGTERM, COME_BACK: 75}
POLL_SECONDS = 1.0


class Stopped(BaseException):
    """The run was asked to stop, and has done what there was to do. No `Exception`: it is raised wherever the main
    thread is, and libraries catch those."""

    def __init__(self, kind: int, outcome: str = "nothing was trained in this start; the next begins where it did"):
        self.exit_code = EXIT_CODES[kind]
        super().__init__(f"stopped, as asked by {'SIGTERM' if kind == LEAVE else 'SIGUSR1'}: {outcome}")


class StopRequest:
    """What this rank has heard; `agreed` makes it known to all.

    Attributes:
        kind: 0, LEAVE or COME_BACK.
    """

    def __init__(self) -> None:
        self.kind = 0
        self._interruptible = False
        self._files = [path for path in os.environ.get(STOP_FILES, "").split("\n") if path]

    def listen(self) -> None:
        """Take the signals and watch the files, from now on. In the main thread."""
        for number in KINDS:
            signal.signal(number, self._hear)
        os.register_at_fork(after_in_child=_leave_requests_to_the_rank)
        if self._files:
            threading.Thread(target=self._poll, args=[threading.get_ident()], daemon=True).start()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.kind = max(self.kind, KINDS[signal.Signals(number)])
        if self._interruptible:
            self._interruptible = False  # once: what it interrupts has to clean up
            raise Stopped(self.kind)

    def _poll(self, main_thread: int) -> None:
        heard: set[signal.Signals] = set()
        while True:
            lines = [line for path in self._files for line in _lines(path)]
            for number in KINDS:
                if number.name in lines and number not in heard:
                    heard.add(number)
                    signal.pthread_kill(main_thread, number)  # wakes it, where a flag would not
            time.sleep(POLL_SECONDS)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While there is nothing to save, and no collective that others could be left in, a request raises `Stopped` at
        once."""
        self._interruptible = True
        try:
            if self.kind:
                raise Stopped(self.kind)
            yield
            if self.kind:
                raise Stopped(self.kind)  # some library took the first for an error of its own
        finally:
            self._interruptible = False

    def agreed(self, device: torch.device) -> int:
        """What any rank has heard, the same on all of them. Collective."""
        kind = torch.tensor(self.kind, device=device)
        dist.all_reduce(kind, dist.ReduceOp.MAX)
        self.kind = max(self.kind, int(kind))
        return int(kind)


def _lines(path: str) -> list[str]:
    """Opened anew each time: NFS looks for news when a file is opened, not when it is asked for its size."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:  # not there, or out of reach for a moment
        return []


def _leave_requests_to_the_rank() -> None:
    """In a forked worker (of `datasets`, of a data loader): SIGTERM ends it, as any other; SIGUSR1 is not for it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
