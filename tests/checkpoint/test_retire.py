from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.checkpoint.find import candidates, newest_complete, step_of
from recipe.checkpoint.manifest import FILE, Manifest
from recipe.checkpoint.retire import retire


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., None]:
    """Write checkpoints: complete, or without a manifest."""

    def save(*steps: int, broken: tuple[int, ...] = ()) -> None:
        for step in (*steps, *broken):
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            Manifest(step, 8 * step, 1, {}).write(folder)
            if step in broken:
                (folder / FILE).unlink()

    return save


def left(run_dir: Path) -> list[int]:
    return [step_of(folder) for folder in candidates(run_dir)]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(None, [100, 30, 20, 9]), (4, [100, 30, 20, 9]), (9, [100, 30, 20, 9]), (2, [100, 30]), (1, [100])],
)
def test_the_newest_are_kept(keep, kept, save, tmp_path):
    save(9, 20, 30, 100)
    removed = retire(tmp_path, keep)
    assert left(tmp_path) == kept, "by number, not by name"
    assert sorted(step_of(folder) for folder in removed) == sorted({9, 20, 30, 100} - set(kept))


@pytest.mark.parametrize("keep", [0, -1])
def test_the_newest_is_kept_whatever_is_asked(keep, save, tmp_path):
    save(2, 4, 6)
    retire(tmp_path, keep)
    assert left(tmp_path) == [6]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_complete_one_stays_behind_newer_broken_ones(keep, save, tmp_path):
    """However many they are: it is what a resume would go on from."""
    save(2, 4, broken=(6, 8, 10))
    retire(tmp_path, keep)
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-4"
    assert 2 not in left(tmp_path)


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
    save(*range(5, 50, 5))
    retire(tmp_path, keep, keep_every)
    assert left(tmp_path) == kept


def test_nothing_is_deleted_where_none_is_good(save, tmp_path):
    """Somebody may still make something of one of them."""
    save(broken=(2, 4, 6))
    assert retire(tmp_path, 1) == [] and left(tmp_path) == [6, 4, 2]


def test_nothing_else_is_removed(save, tmp_path):
    save(2, 4)
    for name in ("export", "checkpoint-best", "checkpoint-1.tmp"):
        (tmp_path / name).mkdir()
    retire(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1.tmp",
        "checkpoint-4",
        "checkpoint-best",
        "export",
    ]
    assert retire(tmp_path / "no folder", 1) == []
