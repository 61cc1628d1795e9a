from pathlib import Path

import pytest

from recipe.checkpoint.find import defect, newest_complete
from recipe.checkpoint.manifest import FILE, Manifest, problems
from recipe.checkpoint.publish import clean_leftovers, publishing
from recipe.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")


def describe() -> Manifest:
    return Manifest(4, 1, {"seed": 42}, {"tokens_seen": 10})


def publish(run_dir: Path, text: str = "weights") -> Path:
    with publishing(run_dir, 4, describe) as draft:
        (draft / "inner").mkdir()
        (draft / "inner/weights").write_text(text)
        (draft / "trainer_state.json").write_text("{}")
    return run_dir / "checkpoint-4"


def test_what_is_published_describes_itself(tmp_path):
    folder = publish(tmp_path / "runs/new")
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.world_size, manifest.run) == (4, 1, {"seed": 42})
    assert {name: entry["size"] for name, entry in manifest.files.items()} == {
        "inner/weights": 7,
        "trainer_state.json": 2,
    }
    assert problems(folder, manifest, checksums=True) == []
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-4"], "nothing else is left"


def test_the_manifest_is_written_when_all_else_is(tmp_path):
    """S11: until then the folder has another name, and no manifest."""

    def check() -> Manifest:
        draft = tmp_path / "checkpoint-4.tmp"
        assert sorted(path.name for path in draft.iterdir()) == ["weights"]
        assert not (tmp_path / "checkpoint-4").exists()
        return describe()

    with publishing(tmp_path, 4, check) as draft:
        (draft / "weights").write_text("w")
    assert (tmp_path / "checkpoint-4" / FILE).is_file()


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("NCCL"), KeyboardInterrupt()])
def test_a_body_that_fails_leaves_nothing(error, tmp_path):
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught, publishing(tmp_path, 4, describe) as draft:
        (draft / "weights").write_text("w")
        raise error
    if isinstance(error, Exception):
        assert f"writing checkpoint-4 failed on 1 of 1 ranks: rank 0: {type(error).__name__}: {error}" in str(
            caught.value
        )
        assert caught.value.__cause__ is error
    assert list(tmp_path.iterdir()) == []


def test_a_users_mistake_in_the_body_stays_one(tmp_path):
    with pytest.raises(UserError, match="no room"), publishing(tmp_path, 4, describe):
        raise UserError("no room")
    assert list(tmp_path.iterdir()) == []


def test_a_description_that_fails_leaves_nothing(tmp_path):
    def fail() -> Manifest:
        raise ValueError("no sharding")

    with (
        pytest.raises(RuntimeError, match="writing the manifest of checkpoint-4.tmp"),
        publishing(tmp_path, 4, fail) as draft,
    ):
        (draft / "weights").write_text("w")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_does_not_touch_the_checkpoint_that_is_there(tmp_path):
    folder = publish(tmp_path, "old")
    with pytest.raises(RuntimeError), publishing(tmp_path, 4, describe):
        raise OSError("No space left on device")
    assert defect(folder) is None and (folder / "inner/weights").read_text() == "old"


def test_a_broken_folder_of_the_same_step_is_replaced_whole(tmp_path):
    broken = tmp_path / "checkpoint-4"
    broken.mkdir()
    (broken / "left over").write_text("")
    folder = publish(tmp_path)
    assert defect(folder) is None and not (folder / "left over").exists()


def test_the_draft_of_an_interrupted_save_is_not_written_into(tmp_path):
    draft = tmp_path / "checkpoint-4.tmp"
    draft.mkdir()
    (draft / "left over").write_text("")
    assert not (publish(tmp_path) / "left over").exists()


def test_leftovers_are_removed_and_named_and_checkpoints_stay(tmp_path):
    folder = publish(tmp_path)
    for name in ("checkpoint-6.tmp", "checkpoint-5.tmp", "export.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("w")
    assert newest_complete(tmp_path) == (folder, []), "a draft is no candidate"
    assert clean_leftovers(tmp_path) == ["checkpoint-5.tmp", "checkpoint-6.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "export.tmp"]
    assert clean_leftovers(tmp_path) == clean_leftovers(tmp_path / "no folder") == []
