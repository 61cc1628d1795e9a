import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.checkpoint.manifest import FILE, Manifest, describe_files, list_files
from recipe.checkpoint.verify import content_problem, size_problem, verify

BLOCK = 1 << 22


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a small file, an empty one, and one of more than a block in a subfolder."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"aaa")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "inner/b").write_bytes(b"b" * BLOCK + b"tail")
    Manifest(7, 56, 2, {}, files=describe_files(tmp_path, list_files(tmp_path))).write(tmp_path)
    return tmp_path


def problems(folder: Path, fast: bool = False) -> dict[str, str]:
    return {name: problem for name, problem in verify(folder, fast=fast, processes=2) if problem is not None}


@pytest.mark.parametrize("fast", [True, False])
def test_every_file_of_a_whole_checkpoint_is_named_without_a_problem(fast, folder):
    assert list(verify(folder, fast=fast, processes=2)) == [("a", None), ("empty", None), ("inner/b", None)]


@pytest.mark.parametrize("fast", [True, False])
def test_every_broken_file_is_named(fast, folder):
    (folder / "a").unlink()
    (folder / "empty").write_bytes(b"0")
    os.truncate(folder / "inner/b", 1)
    assert problems(folder, fast) == {
        "a": "a is missing",
        "empty": "empty has 1 bytes and was written with 0",
        "inner/b": "inner/b has 1 bytes and was written with 4,194,308",
    }


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, BLOCK + 3])
def test_a_flipped_bit_is_found_by_its_checksum(at, folder):
    data = bytearray((folder / "inner/b").read_bytes())
    data[at] ^= 1
    (folder / "inner/b").write_bytes(data)
    assert problems(folder, fast=True) == {}, "sizes alone do not tell"
    assert problems(folder) == {"inner/b": "inner/b has other content than was written"}


def swap_for_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_a_file_that_cannot_be_read_is_a_problem_and_no_crash(folder):
    swap_for_folder(folder / "a")
    manifest = Manifest.read(folder)
    manifest.files["a"]["size"] = (folder / "a").stat().st_size
    assert size_problem(folder, manifest, "a") is None
    assert content_problem(folder, manifest, "a") == "a cannot be read (Is a directory)"


def test_reading_says_that_it_goes_on(folder):
    blocks: list[None] = []
    assert content_problem(folder, Manifest.read(folder), "inner/b", lambda: blocks.append(None)) is None
    assert len(blocks) == 2


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 20)], ids=["missing", "cut off"])
def test_without_a_manifest_there_is_nothing_to_compare_with(spoil: Callable[[Path], None], folder):
    spoil(folder / FILE)
    with pytest.raises(ValueError, match=FILE):
        list(verify(folder, fast=True, processes=1))
