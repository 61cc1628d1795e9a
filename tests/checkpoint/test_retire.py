from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.checkpoint.find import candidates, step_of
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.retire import retire


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write checkpoints; returns the last one."""

    def save(*steps: int) -> Path:
        for step in steps:
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            Manifest(step, 8 * step, 1, {}).write(folder)
        return folder

    return save


def left(run_dir: Path) -> list[int]:
    return [step_of(folder) for folder in candidates(run_dir)]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(None, [100, 30, 20, 9]), (4, [100, 30, 20, 9]), (9, [100, 30, 20, 9]), (2, [100, 30]), (1, [100])],
)
def test_the_newest_are_kept(keep, kept, save, tmp_path):
    removed = retire(save(9, 20, 30, 100), keep)
    assert left(tmp_path) == kept, "by number, not by name"
    assert sorted(step_of(folder) for folder in removed) == sorted({9, 20, 30, 100} - set(kept))


@pytest.mark.parametrize("keep", [0, -1])
def test_what_was_published_is_kept_whatever_is_asked(keep, save, tmp_path):
    retire(save(2, 4, 6), keep)
    assert left(tmp_path) == [6]


@pytest.mark.parametrize("keep", [1, 2])
def test_later_ones_that_a_resume_passed_over_take_no_place(keep, save, tmp_path):
    """However many they are, and though their sizes are right: a flipped bit does not show."""
    save(2, 4, 20, 30, 40)
    retire(save(6), keep)
    assert left(tmp_path) == [40, 30, 20, 6, 4][: 3 + keep]


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [
        (1, 10, [45, 40, 30, 20, 10]),
        (2, 20, [45, 40, 20]),
        (3, 30, [45, 40, 35, 30]),
        (1, 100, [45]),
        (1, None, [45]),
        (None, 20, [45, 40, 35, 30, 25, 20, 15, 10, 5]),
    ],
)
def test_every_so_manieth_is_kept_too(keep, keep_every, kept, save, tmp_path):
    retire(save(*range(5, 50, 5)), keep, keep_every)
    assert left(tmp_path) == kept


def test_nothing_else_is_removed(save, tmp_path):
    for name in ("export", "checkpoint-best", "checkpoint-1.tmp"):
        (tmp_path / name).mkdir()
    retire(save(2, 4), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1.tmp",
        "checkpoint-4",
        "checkpoint-best",
        "export",
    ]
