import shutil
from pathlib import Path

import pytest

from recipe.checkpoint import publish
from recipe.checkpoint.find import candidates, defect, newest_complete
from recipe.checkpoint.manifest import FILE, Manifest, describe_files, list_files
from recipe.checkpoint.verify import verify

NAME = "checkpoint-4"


def write(run_dir: Path, text: str = "weights") -> Path:
    draft = publish.begin(run_dir, 4)
    (draft / "inner").mkdir()
    (draft / "inner/weights").write_text(text)
    (draft / "trainer_state.json").write_text("{}")
    return draft


def manifest_of(draft: Path) -> Manifest:
    return Manifest(4, 32, 1, {"seed": 42}, {"tokens_seen": 10}, describe_files(draft, list_files(draft)))


def published(run_dir: Path, text: str = "weights") -> Path:
    draft = write(run_dir, text)
    return publish.publish(draft, manifest_of(draft))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_published_describes_itself(tmp_path):
    folder = published(tmp_path / "runs/new")
    assert folder == tmp_path / "runs/new" / NAME
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.samples_seen, manifest.world_size, manifest.run) == (4, 32, 1, {"seed": 42})
    assert list(verify(folder, fast=False, processes=1)) == [("inner/weights", None), ("trainer_state.json", None)]
    assert names(folder.parent) == [NAME], "nothing else is left"


def test_until_it_is_published_no_folder_has_its_name_or_a_manifest(tmp_path):
    """S11."""
    draft = write(tmp_path)
    assert names(tmp_path) == [draft.name] and FILE not in names(draft)
    assert candidates(tmp_path) == []


def test_a_manifest_that_cannot_be_written_publishes_nothing(tmp_path):
    draft = write(tmp_path)
    (draft / FILE).mkdir()
    with pytest.raises(OSError):
        publish.publish(draft, Manifest(4, 32, 1, {}))
    assert names(tmp_path) == [draft.name]


def test_a_draft_that_was_begun_does_not_touch_the_checkpoint_that_is_there(tmp_path):
    folder = published(tmp_path, "old")
    publish.discard(write(tmp_path, "new"))
    assert defect(folder) is None and (folder / "inner/weights").read_text() == "old"
    assert names(tmp_path) == [NAME]


def test_a_broken_folder_of_the_same_step_is_replaced_whole(tmp_path):
    broken = tmp_path / NAME
    broken.mkdir()
    (broken / "left over").write_text("")
    folder = published(tmp_path)
    assert defect(folder) is None and not (folder / "left over").exists()
    assert names(tmp_path) == [NAME]


def test_every_draft_has_a_name_of_its_own(tmp_path):
    """A rank that was cut off and comes back writes into no later one."""
    drafts = {publish.begin(tmp_path, 4).name for _ in range(3)}
    assert len(drafts) == 3 and candidates(tmp_path) == []
    assert len(publish.clean_leftovers(tmp_path)) == 3 and names(tmp_path) == []


class PowerCut(BaseException):
    pass


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path, monkeypatch):
    """A deletion that ends in its middle leaves nothing that looks like a checkpoint, and the next start removes it."""
    published(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(publish.shutil, "rmtree", cut_unless_absent)
        with pytest.raises(PowerCut):
            publish.discard(tmp_path / NAME)
    assert names(tmp_path) == [f"{NAME}.old.tmp"] and newest_complete(tmp_path) == (None, [])
    folder = published(tmp_path)
    publish.discard(folder)
    assert names(tmp_path) == [], "also what an earlier deletion of the same step left"


def cut_unless_absent(folder: Path, ignore_errors: bool = False) -> None:
    if folder.exists():
        raise PowerCut


def test_leftovers_are_removed_and_named_and_checkpoints_stay(tmp_path):
    folder = published(tmp_path)
    for name in ("checkpoint-6.tmp", "checkpoint-5.tmp", "checkpoint-2.old.tmp", "export.tmp"):
        shutil.copytree(folder, tmp_path / name)
    assert newest_complete(tmp_path) == (folder, []), "a draft is no candidate"
    left = ("checkpoint-2.old.tmp", "checkpoint-5.tmp", "checkpoint-6.tmp")
    assert publish.clean_leftovers(tmp_path) == [f"removed {name}, left by an interrupted save" for name in left]
    assert names(tmp_path) == [NAME, "export.tmp"]
    assert publish.clean_leftovers(tmp_path) == publish.clean_leftovers(tmp_path / "no folder") == []
