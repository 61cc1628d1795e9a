"""Where a start goes on: what `run_folder.resume_point` takes, passes over and refuses."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipe import run_folder
from recipe.checkpoint.manifest import FILE as MANIFEST
from recipe.checkpoint.manifest import Manifest, describe_files
from recipe.errors import UserError
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_rank")

RUN = {"data": "0123", "seed": 42, "global_batch_size": 8}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a complete checkpoint of `RUN`, or of another run."""

    def save(step: int, run: dict[str, Any] = RUN, run_dir: Path = tmp_path) -> Path:
        folder = run_dir / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w" * step)
        Manifest(step, 8 * step, 2, run, files=describe_files(folder, ["weights"])).write(folder)
        return folder

    return save


def resume(
    run_dir: Path, asked: str | None, run: dict[str, Any] = RUN, accepted: Sequence[str] = ()
) -> tuple[Path | None, str]:
    folder, lines = run_folder.resume_point(run_dir, asked, run, accepted)
    return folder, "\n".join(lines)


# -- where a start goes on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["auto", "true", "True"])
def test_auto_goes_on_from_the_newest(asked, save, tmp_path):
    save(2), save(10), save(9)
    folder, said = resume(tmp_path, asked)
    assert folder == tmp_path / "checkpoint-10", "by number, not by name"
    assert said == f"resuming from {folder}: step 10, written by 2 ranks"


def test_auto_starts_fresh_where_there_is_nothing(tmp_path):
    assert resume(tmp_path / "new", "auto") == (None, f"fresh start (no whole checkpoint in {tmp_path}/new)")


def test_auto_passes_over_newer_ones_that_are_incomplete_and_says_why(save, tmp_path):
    """S11: the newest complete one, not the one with the highest number."""
    good, truncated, unfinished = save(2), save(4), save(6)
    (truncated / "weights").write_bytes(b"www")
    (unfinished / MANIFEST).unlink()
    folder, said = resume(tmp_path, "auto")
    assert folder == good
    assert said.splitlines() == [
        "passed over checkpoint-6: it has no manifest.json: it was never finished",
        "passed over checkpoint-4: weights has 3 bytes and was written with 4",
        f"resuming from {good}: step 2, written by 2 ranks",
    ]


def test_auto_says_what_it_passed_over_before_a_fresh_start(save, tmp_path):
    (save(4) / "weights").unlink()
    folder, said = resume(tmp_path, "auto")
    assert folder is None
    assert said.splitlines() == [
        "passed over checkpoint-4: weights is missing",
        f"fresh start (no whole checkpoint in {tmp_path})",
    ]


def test_a_named_checkpoint_may_lie_elsewhere(save, tmp_path):
    elsewhere = save(3, run_dir=tmp_path / "elsewhere")
    assert resume(tmp_path, str(elsewhere))[0] == elsewhere


def test_an_older_checkpoint_is_refused_where_newer_ones_lie(save, tmp_path, monkeypatch):
    """A later start would take the newer one again, and leave the branch that began here; however the folder is spelt,
    and wherever it lies."""
    old = save(2)
    assert resume(tmp_path, str(old))[0] == old
    elsewhere = old.parent / "elsewhere" / old.name
    shutil.copytree(old, elsewhere)
    save(4)
    link = tmp_path / "link"
    link.symlink_to(old)
    monkeypatch.chdir(tmp_path)
    for spelt in (old, Path("checkpoint-2"), tmp_path / "elsewhere" / ".." / "checkpoint-2", link, elsewhere):
        with pytest.raises(UserError, match="holds .*checkpoint-4.*, which a later start would take"):
            resume(tmp_path, str(spelt))


def test_a_named_checkpoint_has_to_be_whole(save, tmp_path):
    save(2)
    (save(4) / "weights").unlink()
    with pytest.raises(UserError, match="checkpoint-4' is not a whole checkpoint: weights is missing"):
        resume(tmp_path, str(tmp_path / "checkpoint-4"))
    with pytest.raises(UserError, match="checkpoint-5' is no folder; give 'auto', 'none' or a checkpoint's folder"):
        resume(tmp_path, str(tmp_path / "checkpoint-5"))


@pytest.mark.parametrize("asked", ["auto", "checkpoint-4"])
def test_a_checkpoint_of_another_run_is_refused(asked, save, tmp_path):
    save(4, RUN | {"seed": 7, "optim": "sgd"})
    with pytest.raises(UserError) as caught:
        resume(tmp_path, asked if asked == "auto" else str(tmp_path / asked))
    assert str(caught.value) == (
        f"{tmp_path}/checkpoint-4 is a checkpoint of a different run: optim: sgd then, None now; seed: 7 then, 42 now; "
        "set them back, or accept the change: accept_changes: [optim, seed]"
    )


def test_a_change_is_accepted_by_its_name_alone_and_said(save, tmp_path):
    folder = save(4, RUN | {"seed": 7, "optim": "sgd"})
    for some in (["optim"], ["data"]):
        with pytest.raises(UserError, match=r"different run: .*seed: 7 then, 42 now"):
            resume(tmp_path, "auto", accepted=some)
    found, said = resume(tmp_path, "auto", accepted=["optim", "seed"])
    assert found == folder
    assert said.splitlines()[:2] == ["accepted: optim: sgd then, None now", "accepted: seed: 7 then, 42 now"]
    assert "accepted:" not in resume(tmp_path, "auto", RUN | {"seed": 7, "optim": "sgd"}, accepted=["seed"])[1]


@pytest.mark.parametrize("asked", [None, "none", "false", "False"])
def test_none_starts_fresh_and_never_over_existing_checkpoints(asked, save, tmp_path):
    assert resume(tmp_path, asked) == (None, "fresh start (resume_from_checkpoint: none)")
    save(2)
    with pytest.raises(
        UserError, match="resume_from_checkpoint is none and .* holds checkpoint-2; set another output_dir"
    ):
        resume(tmp_path, asked)


def test_what_an_interrupted_save_left_is_removed_and_named(save, tmp_path):
    save(2)
    leftover = tmp_path / "checkpoint-4.tmp"
    leftover.mkdir()
    (leftover / "weights").write_bytes(b"w")
    folder, said = resume(tmp_path, "auto")
    assert folder == tmp_path / "checkpoint-2" and not leftover.exists()
    assert said.splitlines()[0] == "removed checkpoint-4.tmp, left by an interrupted save"


# -- what is read back -------------------------------------------------------------------------------------------------

FILES = ("optimizer_0/.metadata", "optimizer_0/__0_0.distcp", "trainer_state.json")
BLOCK = 1 << 22


def write_checkpoint(run_dir: Path, step: int) -> Path:
    """Of files of each kind, one of more than a block."""
    folder = run_dir / f"checkpoint-{step}"
    (folder / "optimizer_0").mkdir(parents=True)
    for number, name in enumerate(FILES):
        (folder / name).write_bytes(bytes([number]) * (BLOCK + 5 if name.endswith("distcp") else 9))
    Manifest(step, 8 * step, 2, RUN, files=describe_files(folder, FILES)).write(folder)
    return folder


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    os.truncate(path, 0)


SPOILS = {cut_off: "bytes and was written with", flip_a_bit: "other content", empty: "has 0 bytes"}
SPOILS |= {Path.unlink: "is missing"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_broken_file_of_any_kind_is_passed_over_and_named(spoil, name, tmp_path):
    """S11, R5: also where its size is right."""
    good, bad = write_checkpoint(tmp_path, 2), write_checkpoint(tmp_path, 4)
    spoil(bad / name)
    folder, said = resume(tmp_path, "auto")
    assert folder == good
    (passed_over,) = [line for line in said.splitlines() if line.startswith("passed over checkpoint-4: ")]
    assert name in passed_over and SPOILS[spoil] in passed_over
    with pytest.raises(UserError, match=f"is not a whole checkpoint: {name} "):
        resume(tmp_path, str(bad))


@pytest.mark.parametrize(
    ("spoil", "why"), [(cut_off, "cannot be read"), (empty, "cannot be read"), (Path.unlink, "it was never finished")]
)
def test_a_broken_manifest_is_passed_over(spoil, why, tmp_path):
    good, bad = write_checkpoint(tmp_path, 2), write_checkpoint(tmp_path, 4)
    spoil(bad / MANIFEST)
    folder, said = resume(tmp_path, "auto")
    assert folder == good and "passed over checkpoint-4: " in said and why in said


def test_everything_broken_is_named_and_the_whole_ones_stay_unread(tmp_path):
    for step in (2, 4):
        write_checkpoint(tmp_path, step)
    for name in FILES[:2]:
        flip_a_bit(tmp_path / "checkpoint-4" / name)
    read: list[str] = []
    folder, lines = run_folder.resume_point(tmp_path, "auto", RUN, alive=read.append)
    assert lines[0] == (
        "passed over checkpoint-4: optimizer_0/.metadata has other content than was written; optimizer_0/__0_0.distcp "
        "has other content than was written"
    )
    assert read == ["reading back checkpoint-4"] * 4 + ["reading back checkpoint-2"] * 4, "a word every few megabytes"
    (tmp_path / "checkpoint-2/optimizer_0/__0_0.distcp").unlink()
    read.clear()
    write_checkpoint(tmp_path, 6)
    assert run_folder.resume_point(tmp_path, "auto", RUN, alive=read.append)[0] == tmp_path / "checkpoint-6"
    assert set(read) == {"reading back checkpoint-6"}


def resume_on_ranks(run_dirs: list[Path], asked: str) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for run_dir in run_dirs:
        read: list[str] = []
        try:
            folder, lines = run_folder.resume_point(run_dir, asked, RUN, alive=read.append)
            found.append((folder, "\n".join(lines), len(read)))
        except UserError as error:
            found.append((None, f"UserError: {error}", len(read)))
    return found


@pytest.mark.slow
def test_ranks_share_the_reading_and_come_to_one_end(tmp_path):
    """Whichever of two ranks reads the broken file; also where it is no run that this one may go on from."""
    cases = [(spoil, name) for spoil in SPOILS for name in FILES]
    run_dirs = [tmp_path / str(number) for number in range(len(cases) + 3)]
    for run_dir, (spoil, name) in zip(run_dirs, cases, strict=False):
        write_checkpoint(run_dir, 2)
        spoil(write_checkpoint(run_dir, 4) / name)
    *_, whole, other, nothing = run_dirs
    write_checkpoint(whole, 4)
    Manifest(4, 32, 2, RUN | {"seed": 7}).write(write_checkpoint(other, 4))
    first, second = run_ranks(resume_on_ranks, run_dirs, "auto")
    assert [found[:2] for found in first] == [found[:2] for found in second]
    for run_dir, (spoil, name), (folder, said, _) in zip(run_dirs, cases, first, strict=False):
        assert folder == run_dir / "checkpoint-2" and name in said and SPOILS[spoil] in said
    assert first[-3][0] == whole / "checkpoint-4" and [first[-3][2], second[-3][2]] == [3, 1], "blocks of each rank"
    assert first[-2][1].startswith("UserError: ") and "seed: 7 then, 42 now" in first[-2][1]
    assert first[-1][:2] == (None, f"fresh start (no whole checkpoint in {nothing})")
