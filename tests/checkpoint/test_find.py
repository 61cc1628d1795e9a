import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.checkpoint.find import candidates, defect, newest_complete, step_of
from recipe.checkpoint.manifest import FILE, Manifest, describe_files

FILES = ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "trainer_state.json")


@pytest.fixture
def save(tmp_path: Path) -> Callable[[int], Path]:
    """Write a complete checkpoint."""

    def save(step: int) -> Path:
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "pytorch_model_fsdp_0").mkdir(parents=True)
        for name in FILES:
            (folder / name).write_bytes(b"0123456789")
        Manifest(step, 8 * step, 2, {}, files=describe_files(folder, FILES)).write(folder)
        return folder

    return save


def test_candidates_are_folders_of_the_right_name_newest_first(save, tmp_path):
    expected = [save(step) for step in (1000, 200, 30)]
    for name in ("checkpoint-9.tmp", "checkpoint-best", "checkpoint-", "old-checkpoint-9", "export"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5000").write_text("a file")
    assert candidates(tmp_path) == expected
    assert [step_of(folder) for folder in expected] == [1000, 200, 30]
    assert candidates(tmp_path / "no folder") == []


def test_a_complete_checkpoint_has_no_defect(save):
    assert defect(save(2)) is None


def spoil_manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / FILE).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / FILE).unlink(), "it has no manifest.json: it was never finished"),
        (lambda folder: (folder / FILES[0]).unlink(), f"{FILES[0]} is missing"),
        (lambda folder: (folder / FILES[2]).unlink(), f"{FILES[2]} is missing"),
        (lambda folder: os.truncate(folder / FILES[1], 9), f"{FILES[1]} has 9 bytes and was written with 10"),
        (lambda folder: (folder / FILES[1]).write_bytes(b"0" * 11), f"{FILES[1]} has 11 bytes and was written with 10"),
        (spoil_manifest('{"step": 4, '), "its manifest.json cannot be read"),
        (spoil_manifest('{"a": 1}'), "its manifest.json cannot be read"),
        (
            spoil_manifest('{"step": 4, "world_size": 2, "run": {}, "version": 1}'),
            "version 1, and this code reads version 2",
        ),
    ],
    ids=[
        "no manifest",
        "no metadata",
        "no state",
        "truncated",
        "too long",
        "cut-off manifest",
        "other manifest",
        "old version",
    ],
)
def test_the_newest_is_passed_over_if_it_is_not_complete(spoil, why, save, tmp_path):
    """S11, S8: and it is said why."""
    good, bad = save(2), save(4)
    spoil(bad)
    folder, (passed_over,) = newest_complete(tmp_path)
    assert folder == good
    assert passed_over.startswith("checkpoint-4: ") and why in passed_over
    assert why in str(defect(bad))


def test_all_that_is_missing_is_named(save):
    folder = save(2)
    for name in FILES[:2]:
        (folder / name).unlink()
    assert defect(folder) == f"{FILES[0]} is missing; {FILES[1]} is missing"


def test_older_ones_are_not_looked_at(save, tmp_path):
    (save(2) / FILE).unlink()
    good = save(4)
    assert newest_complete(tmp_path) == (good, [])


def test_there_may_be_none(save, tmp_path):
    assert newest_complete(tmp_path) == (None, [])
    (save(2) / FILE).unlink()
    folder, passed_over = newest_complete(tmp_path)
    assert folder is None and len(passed_over) == 1
