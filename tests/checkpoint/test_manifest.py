import json

import pytest

from recipe.checkpoint.find import defect
from recipe.checkpoint.manifest import FILE, VERSION, Manifest, describe_files, list_files


@pytest.fixture
def folder(tmp_path):
    """Two files, one in a subfolder."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"aaa")
    (tmp_path / "inner/b").write_bytes(b"b" * (1 << 22) + b"tail")
    return tmp_path


def test_it_is_read_as_it_was_written(folder):
    manifest = Manifest(7, 56, 2, {"seed": 42}, {"tokens_seen": 10}, describe_files(folder, list_files(folder)))
    manifest.write(folder)
    assert Manifest.read(folder) == manifest


def test_files_are_listed_with_size_and_checksum_and_without_the_manifest(folder):
    Manifest(7, 56, 2, {}).write(folder)
    assert list_files(folder) == ["a", "inner/b"]
    described = describe_files(folder, list_files(folder))
    assert described["a"] == {"size": 3, "xxh3_64": "e4ba3228795dc9ef"}, "as xxhsum -H3 says of aaa"
    assert described["inner/b"]["size"] == (1 << 22) + 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it was never finished"),
        ("", "cannot be read"),
        ('{"step": 7, "wor', "cannot be read"),
        ("[]", "cannot be read"),
        ('{"step": 7}', "cannot be read"),
        (
            json.dumps({"step": 7, "samples_seen": 56, "world_size": 2, "run": {}, "version": VERSION + 1}),
            f"version {VERSION + 1}",
        ),
    ],
)
def test_a_manifest_that_cannot_be_used_says_why(text, why, tmp_path):
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=why):
        Manifest.read(tmp_path)


def test_a_later_version_is_named_whatever_fields_it_has(tmp_path):
    raw = {"step": 7, "samples_seen": 56, "world_size": 2, "run": {}, "version": VERSION + 1, "shards": 4}
    (tmp_path / FILE).write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"version {VERSION + 1}"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_is_refused_or_says_the_same(bit, folder):
    """Between the values of JSON it may say the same; everywhere else it would be another step, or another sample."""
    manifest = Manifest(7, 56, 2, {"seed": 42}, {"tokens_seen": 10}, describe_files(folder, ["a"]))
    manifest.write(folder)
    whole = (folder / FILE).read_bytes()
    for at in range(len(whole)):
        (folder / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        why = defect(folder)
        assert FILE in why if why is not None else Manifest.read(folder) == manifest
