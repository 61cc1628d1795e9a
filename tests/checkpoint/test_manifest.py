import json

import pytest

from recipe.checkpoint.manifest import FILE, VERSION, Manifest, describe_files, list_files, problems


@pytest.fixture
def folder(tmp_path):
    """Two files, one in a subfolder."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"aaa")
    (tmp_path / "inner/b").write_bytes(b"b" * (1 << 22) + b"tail")
    return tmp_path


def test_it_is_read_as_it_was_written(folder):
    manifest = Manifest(7, 2, {"seed": 42}, {"tokens_seen": 10}, describe_files(folder, list_files(folder)))
    manifest.write(folder)
    assert Manifest.read(folder) == manifest


def test_files_are_listed_with_size_and_checksum_and_without_the_manifest(folder):
    Manifest(7, 2, {}).write(folder)
    assert list_files(folder) == ["a", "inner/b"]
    described = describe_files(folder, list_files(folder))
    assert described["a"] == {"size": 3, "xxh3_64": "e4ba3228795dc9ef"}, "as xxhsum -H3 says of aaa"
    assert described["inner/b"]["size"] == (1 << 22) + 4


def test_whole_files_have_no_problem(folder):
    manifest = Manifest(7, 2, {}, files=describe_files(folder, list_files(folder)))
    assert problems(folder, manifest) == problems(folder, manifest, checksums=True) == []


def test_every_broken_file_is_named(folder):
    manifest = Manifest(7, 2, {}, files=describe_files(folder, list_files(folder)))
    (folder / "a").unlink()
    (folder / "inner/b").write_bytes(b"b")
    assert problems(folder, manifest) == ["a is missing", "inner/b has 1 bytes and was written with 4,194,308"]


@pytest.mark.parametrize("at", [0, (1 << 22) + 1], ids=["first block", "last block"])
def test_a_flipped_byte_is_found_by_its_checksum(at, folder):
    manifest = Manifest(7, 2, {}, files=describe_files(folder, list_files(folder)))
    data = bytearray((folder / "inner/b").read_bytes())
    data[at] ^= 1
    (folder / "inner/b").write_bytes(data)
    assert problems(folder, manifest) == [], "sizes alone do not tell"
    assert problems(folder, manifest, checksums=True) == ["inner/b has other content than was written"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it was never finished"),
        ("", "cannot be read"),
        ('{"step": 7, "wor', "cannot be read"),
        ("[]", "cannot be read"),
        ('{"step": 7}', "cannot be read"),
        (json.dumps({"step": 7, "world_size": 2, "run": {}, "version": VERSION + 1}), f"version {VERSION + 1}"),
    ],
)
def test_a_manifest_that_cannot_be_used_says_why(text, why, tmp_path):
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=why):
        Manifest.read(tmp_path)


def test_a_later_version_is_named_whatever_fields_it_has(tmp_path):
    raw = {"step": 7, "world_size": 2, "run": {}, "version": VERSION + 1, "shards": 4}
    (tmp_path / FILE).write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"version {VERSION + 1}"):
        Manifest.read(tmp_path)
