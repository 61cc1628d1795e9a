import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipe.data import workers
from recipe.data.rows import BadRow
from recipe.data.workers import in_order, num_workers
from recipe.errors import UserError


def uneven(number: int) -> int:
    time.sleep(number % 3 * 0.01)
    return number * number


def pid(_: int) -> int:
    time.sleep(0.01)
    return os.getpid()


def failing(error: Exception) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == 5:
            raise error
        return uneven(number)

    return work


def wait_for_the_end(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while pids & {child.pid for child in multiprocessing.active_children()}:
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.01)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_results_come_in_order(count, processes):
    assert list(in_order(uneven, range(count), processes)) == [number * number for number in range(count)]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_few_chunks_are_taken_ahead(processes):
    taken = []

    def chunks() -> Iterator[int]:
        for number in range(30):
            taken.append(number)
            yield number

    ahead = [len(taken) - done for done, _ in enumerate(in_order(uneven, chunks(), processes))]
    assert max(ahead) == (1 if processes == 1 else 2 * processes)


@pytest.mark.parametrize("processes", [2, 3])
def test_work_is_done_in_so_many_processes_at_once(processes):
    barrier = multiprocessing.get_context("fork").Barrier(processes)

    def meet(_: int) -> int:
        barrier.wait(10)
        return os.getpid()

    pids = set(in_order(meet, range(2 * processes), processes))
    assert len(pids) == processes and os.getpid() not in pids


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("error", [UserError("one", "two"), BadRow("not JSON", "but list"), ZeroDivisionError("x")])
def test_an_error_in_the_work_arrives_after_what_was_before_it(error, processes):
    results = in_order(failing(error), range(20), processes)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(type(error)) as arrived:
        next(results)
    assert (str(arrived.value), arrived.value.args) == (str(error), error.args)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_while_chunks_are_read_arrives(processes):
    def chunks() -> Iterator[int]:
        yield from range(10)
        raise UserError("rows.jsonl cannot be read")

    results = in_order(pid, chunks(), processes)
    pids = {next(results)}
    with pytest.raises(UserError, match="rows.jsonl cannot be read"):
        pids |= set(results)
    wait_for_the_end(pids)


def test_a_process_that_is_killed():
    def work(number: int) -> int:
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return uneven(number)

    with pytest.raises(UserError, match="one of the 2 processes .* was killed .*; set dataset_num_proc lower"):
        list(in_order(work, range(50), 2))


BUILDER = """
import os, time
from recipe.data.workers import in_order

def work(number):
    print(os.getpid(), flush=True)
    time.sleep(60 if number else 0)

for _ in in_order(work, range(3), 2):
    pass
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which nobody waits for where process 1 does not, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_when_the_builder_is_killed_its_processes_end():
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", BUILDER], stdout=subprocess.PIPE, text=True, cwd=root) as builder:
        pids = {int(builder.stdout.readline()) for _ in range(3)}
        try:
            assert len(pids) == 2 and all(map(alive, pids))
            builder.kill()
            builder.wait()
            wait_until_ended(pids)
        finally:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_process_that_begins_after_the_builder_was_killed_ends():
    late = multiprocessing.get_context("fork").Process(target=workers._begin, args=(pid, os.getpid() + 1))
    late.start()
    late.join(10)
    assert late.exitcode == -signal.SIGKILL


def test_breaking_off_ends_the_processes_and_waits_for_none():
    def work(number: int) -> int:
        time.sleep(0 if number < 10 else 1)
        return os.getpid()

    results = in_order(work, range(1_000_000), 2)
    pids = {next(results) for _ in range(10)}
    assert pids <= {child.pid for child in multiprocessing.active_children()}
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 0.5
    wait_for_the_end(pids)


def test_signals_of_the_parent_are_not_handled_in_its_processes():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        handlers = next(in_order(lambda _: [signal.getsignal(number) for number in numbers], range(1), 2))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN]


def test_threads_of_the_tokenizer_are_off_in_processes_and_there_alone(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    read = in_order(lambda _: os.environ.get("TOKENIZERS_PARALLELISM"), range(1), 2)
    assert list(read) == ["false"] and "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize(
    ("asked", "size", "cores", "processes"), [(3, 0, 8, 3), (None, 1_000, 8, 1), (None, 10 << 20, 8, 8)]
)
def test_number_of_processes(asked, size, cores, processes, monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert num_workers(asked, size) == processes
