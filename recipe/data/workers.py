"""Work on chunks in several processes, with the results in the order of the chunks, whatever their number."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from recipe.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

SMALL = 2 << 20  # bytes, or rows x 1,000: below it processes cost more than they bring
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Opened here: a forked process that loads a library may wait for ever for a lock that a thread held at the fork.
LIBC = ctypes.CDLL(None)
_work: Callable[[Any], Any]


def num_workers(asked: int | None, size: int) -> int:
    """Processes for `size` bytes: as asked, else one for each core that this process may use."""
    if asked is not None:
        return asked
    if size < SMALL:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[T], R], chunks: Iterable[T], processes: int) -> Iterator[R]:
    """`work` of each chunk, in their order. At most two chunks a process are under way, so memory is bounded.

    Raises:
        UserError: a process was killed, most likely for want of memory.
    """
    if processes == 1:
        yield from map(work, chunks)
        return
    # Forked, as `datasets` does: what `work` needs is there, and nothing is imported once more.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    waiting: deque[Future[R]] = deque()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(work, os.getpid())) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_do, chunk))
                if len(waiting) >= 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                f"one of the {processes} processes that prepare the data was killed (out of memory?); set "
                "dataset_num_proc lower"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    _end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of several already
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the parent's handlers are about the parent
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with(parent: int) -> None:
    """See to it that this process is killed when `parent` is. A parent that is killed ends none of its processes, and
    they hold each other's pipes open, so that they would wait for chunks for ever.

    Linux alone: it is where jobs run, and are killed; elsewhere people can end what they see is left.
    """
    if sys.platform != "linux":
        return
    # prctl(2), with the thread that forked this process for a parent: the one that takes the results. Where a sandbox
    # refuses it, processes may be left behind, and nothing else.
    LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it was killed before that
        os.kill(os.getpid(), signal.SIGKILL)


def _do(chunk: Any) -> Any:
    return _work(chunk)
