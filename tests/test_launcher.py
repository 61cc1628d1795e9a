"""recipe/launch.py: which of a node's failed ranks failed first, and what is left for the batch script."""

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from recipe.errors import record
from recipe.launch import Ending, _torn_down, report


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank that ended with `code` and recorded `text` (None: nothing) at `seconds`."""

    def failed(rank: int, code: int, text: str | None = None, seconds: float = 0.0) -> Ending:
        path = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if text is not None:
            record(text, code)
            os.utime(path, (seconds, seconds))
        return Ending.of(rank, ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(path)))

    return failed


def test_a_killed_rank_failed_before_those_that_noticed(failed) -> None:
    """Its neighbours record a broken connection before the launcher sees that it is gone."""
    noticed = failed(0, 1, "RuntimeError: Connection closed by peer", seconds=5.0)
    killed = failed(3, -signal.SIGKILL)
    assert min(noticed, killed) is killed and killed.exit_code == 137
    assert "rank 3 on " in killed.text and "killed by SIGKILL (out of memory?" in killed.text


def test_of_two_exceptions_the_earlier_failed_first(failed) -> None:
    later, earlier = failed(0, 1, "RuntimeError: Connection closed", seconds=5.2), failed(1, 1, "OSError", seconds=5.1)
    assert min(later, earlier) is earlier


def test_a_rank_that_was_told_to_leave_did_not_fail_first(failed) -> None:
    """When a node fails srun sends the others SIGTERM; clocks of nodes may be apart."""
    left, failed_later = failed(0, 143, "stopped", seconds=5.0), failed(2, 2, "no such file", seconds=6.0)
    assert min(left, failed_later) is failed_later


def test_a_rank_that_had_said_why_before_it_was_torn_down(failed, tmp_path) -> None:
    """Its report is the one with the traceback; what counts is the code that it was about to end with."""
    ending = failed(3, 1, "Traceback: disk", seconds=5.0)
    path = tmp_path / "error-3.json"
    again = Ending.of(3, ProcessFailure(local_rank=3, pid=1, exitcode=-signal.SIGUSR2, error_file=str(path)))
    assert again == ending
    assert not _torn_down(ProcessFailure(local_rank=3, pid=1, exitcode=-signal.SIGUSR2, error_file=str(path)), [1.0])
    silent = ProcessFailure(local_rank=3, pid=1, exitcode=-signal.SIGUSR2, error_file=str(tmp_path / "none"))
    frozen = ProcessFailure(local_rank=3, pid=1, exitcode=-signal.SIGKILL, error_file=str(tmp_path / "none"))
    assert _torn_down(silent, [1.0]) and _torn_down(frozen, [1.0]) and not _torn_down(frozen, [frozen.timestamp + 1.0])


def test_a_rank_that_recorded_nothing(failed) -> None:
    assert "exit code 7; its log says why" in failed(1, 7).text


@pytest.mark.parametrize("code", [1, 2, 75, 143])
def test_what_is_left_for_the_batch_script(code, failed, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("REPORTS", str(tmp_path / "reports"))
    assert report([failed(2, code, "what it said", seconds=5.0)]) == code
    reports = list((tmp_path / "reports").glob("*"))
    assert [path.name for path in reports] == [f"{2 if code == 143 else 1}-5.000000-rank2-code{code}.txt"]
    said = capsys.readouterr().err
    assert said.startswith("recipe: failed, first of all rank 2 on " if code == 1 else "recipe: what it said")
