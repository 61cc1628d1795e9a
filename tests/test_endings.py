"""`recipe.launch`: which of a node's failed ranks failed first, and what is left for the batch script."""

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from recipe.errors import record
from recipe.launch import Ending, report


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank that ended with `code` and recorded `text` (None: nothing) at `seconds`."""

    def failed(rank: int, code: int, text: str | None = None, seconds: float = 0.0) -> Ending:
        path = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if text is not None:
            record(text)
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


def test_a_rank_that_recorded_nothing(failed) -> None:
    assert "exit code 7; its log says why" in failed(1, 7).text


@pytest.mark.parametrize("code", [1, 2, 75, 143])
def test_what_is_left_for_the_batch_script(code, failed, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("REPORTS", str(tmp_path / "reports"))
    assert report([failed(2, code, "what it said", seconds=5.0)]) == code
    reports = list((tmp_path / "reports").glob("*"))
    assert [path.name for path in reports] == [f"1-5.000000-rank2-code{code}.txt"]
    said = capsys.readouterr().err
    assert said.startswith("recipe: failed, first of all rank 2 on " if code == 1 else "recipe: what it said")
