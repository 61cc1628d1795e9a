"""How a request reaches one rank. (How all agree on it: tests/test_disturbed.py.)"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipe.stopping import COME_BACK, LEAVE, Stopped, StopRequest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def listening(monkeypatch: pytest.MonkeyPatch, files: str = "") -> StopRequest:
    monkeypatch.setenv("STOP_FILES", files)
    stop = StopRequest()
    stop.listen()
    return stop


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGUSR1, COME_BACK), (signal.SIGTERM, LEAVE)])
def test_a_signal_is_kept_until_the_step_ends(number, kind, monkeypatch, one_rank) -> None:
    stop = listening(monkeypatch)
    assert stop.agreed(torch.device("cpu")) == 0
    os.kill(os.getpid(), number)
    assert stop.agreed(torch.device("cpu")) == kind


def test_coming_back_goes_before_leaving(monkeypatch, one_rank) -> None:
    """The batch script asks the ranks to come back; that a scheduler sends SIGTERM besides changes nothing."""
    stop = listening(monkeypatch)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed(torch.device("cpu")) == COME_BACK


def test_with_nothing_to_save_it_is_answered_at_once(monkeypatch) -> None:
    stop = listening(monkeypatch)
    with pytest.raises(Stopped) as caught, stop.interruptible():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(5)
        pytest.fail("slept on")
    assert caught.value.exit_code == 75
    with pytest.raises(Stopped), stop.interruptible():
        pytest.fail("what was heard before holds")


def test_a_second_signal_does_not_disturb_the_cleaning_up(monkeypatch) -> None:
    stop = listening(monkeypatch)
    cleaned = False
    with pytest.raises(Stopped), stop.interruptible():
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            os.kill(os.getpid(), signal.SIGUSR1)
            cleaned = True
    assert cleaned


def test_a_forked_worker_is_ended_by_sigterm(monkeypatch) -> None:
    """`datasets` ends its workers so; with the rank's handler they would live on."""
    listening(monkeypatch)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[30])
    child.start()
    time.sleep(0.5)  # it sleeps by now
    os.kill(child.pid or 0, signal.SIGUSR1)  # not for it
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM


def test_a_line_in_one_of_the_files_is_a_signal(monkeypatch, tmp_path: Path) -> None:
    """It wakes the main thread, whatever that waits for."""
    files = [tmp_path / "not there", tmp_path / "empty"]
    files[1].touch()
    stop = listening(monkeypatch, "\n".join(map(str, files)))
    began = time.monotonic()
    with pytest.raises(Stopped), stop.interruptible():
        writer = f"import time; time.sleep(0.5); open({str(files[1])!r}, 'w').write('SIGUSR1\\n')"
        subprocess.Popen([sys.executable, "-c", writer])
        time.sleep(30)
    assert time.monotonic() - began < 10 and stop.kind == COME_BACK


def test_a_line_that_is_half_written_waits(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("SIGU")
    stop = listening(monkeypatch, str(tmp_path / "stop"))
    time.sleep(1.5)
    assert stop.kind == 0
