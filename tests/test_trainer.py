from types import SimpleNamespace
from typing import Any

import pytest

from recipe.checkpoint.saver import Outcome
from recipe.errors import UserError
from recipe.trainer import RecipeTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
WELL = Outcome(2, pause=0.1, total=2.0, published=True)
STALE = Outcome(4, failures=["OSError: Stale file handle"] * 2)
FULL = Outcome(4, failures=["OSError: No space left on device"] * 2, disk=True)


def noted(*outcomes: Outcome, last: bool = False) -> list[dict[str, Any]]:
    """What a trainer logs of saves that end like this, one after the other."""
    logged: list[dict[str, Any]] = []
    trainer: Any = SimpleNamespace(save_failed=False, log=logged.append)
    for number, outcome in enumerate(outcomes, 1):
        RecipeTrainer._note(trainer, outcome, last=last and number == len(outcomes))
    return logged


def test_a_save_that_ends_well_is_logged() -> None:
    assert noted(WELL) == [{"save_step": 2, "save_pause_seconds": 0.1, "save_total_seconds": 2.0}]


def test_one_failed_save_does_not_stop_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """As long as the next one goes well, and it was not the disk."""
    assert len(noted(WELL, STALE, WELL, STALE, WELL)) == 3
    assert (
        capsys.readouterr().out.count(
            "warning: checkpoint-4 could not be written: OSError: Stale file handle; going on"
        )
        == 2
    )


def test_two_in_a_row_do() -> None:
    with pytest.raises(RuntimeError, match="checkpoint-4 could not be written, twice: OSError: Stale file handle"):
        noted(WELL, STALE, STALE)


def test_the_last_one_does() -> None:
    with pytest.raises(RuntimeError, match="earlier ones are unharmed"):
        noted(WELL, STALE, last=True)


def test_a_disk_that_will_not_take_it_does() -> None:
    with pytest.raises(UserError, match="Mend output_dir's disk"):
        noted(WELL, FULL)
