import json
import os
import shutil
import time
from pathlib import Path

import pytest
import xxhash

from recipe.data import digests
from recipe.data.digests import Digests
from recipe.errors import UserError


@pytest.fixture
def memo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are remembered at once."""
    monkeypatch.setattr(digests, "RACY_SECONDS", 0)
    return tmp_path / "memo" / "digests.json"


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    time.sleep(0.02)  # more than the resolution of a file's time of change
    return path


def forge(memo: Path) -> None:
    """Make the memo say 'remembered' of every file that it knows."""
    known = json.loads(memo.read_text())
    memo.write_text(json.dumps({place: {**entry, "digest": "remembered"} for place, entry in known.items()}))


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)) * 40_000])
def test_the_digest_is_of_the_whole_content(content, tmp_path, memo):
    path = write(tmp_path / "a", content)
    assert Digests(memo).of(path) == Digests(memo).of(path) == digest(content)


def test_a_file_is_read_once(tmp_path, memo, monkeypatch):
    a, b = write(tmp_path / "a", b"a"), write(tmp_path / "b", b"b")
    assert [Digests(memo).of(path) for path in (a, b)] == [digest(b"a"), digest(b"b")]
    forge(memo)
    (tmp_path / "link").symlink_to(a)
    monkeypatch.chdir(tmp_path)
    assert {Digests(memo).of(path) for path in (a, b, Path("a"), tmp_path / "link")} == {"remembered"}
    assert Digests(memo).of(Path(shutil.copy(a, tmp_path / "c"))) == digest(b"a")


def test_a_change_that_keeps_size_inode_and_time_is_seen(tmp_path, memo):
    path = write(tmp_path / "a", b"abc")
    before = path.stat()
    Digests(memo).of(path)
    forge(memo)
    with path.open("r+b") as file:
        file.write(b"xyz")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert all(getattr(before, name) == getattr(after, name) for name in ("st_size", "st_ino", "st_mtime_ns"))
    assert Digests(memo).of(path) == digest(b"xyz")


def test_a_file_in_the_place_of_another_is_seen(tmp_path, memo):
    path = write(tmp_path / "a", b"abc")
    Digests(memo).of(path)
    forge(memo)
    write(tmp_path / "b", b"xyz").replace(path)
    assert Digests(memo).of(path) == digest(b"xyz")


def test_nothing_is_remembered_of_a_young_file(tmp_path):
    path, memo = write(tmp_path / "a", b"abc"), tmp_path / "digests.json"
    os.utime(path, (0, 0))  # its content may say so, and is as young
    assert Digests(memo).of(path) == digest(b"abc") and not memo.exists()
    time.sleep(digests.RACY_SECONDS)
    assert Digests(memo).of(path) == digest(b"abc") and memo.exists()


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"5"])
def test_a_broken_memo_is_written_anew(text, tmp_path, memo):
    path = write(tmp_path / "a", b"abc")
    memo.parent.mkdir()
    memo.write_bytes(text)
    assert Digests(memo).of(path) == digest(b"abc")
    forge(memo)
    assert Digests(memo).of(path) == "remembered"


@pytest.mark.parametrize("entry", ["x", None, {}, {"state": None}, {"digest": "x"}, "no digest", "a number"])
def test_a_broken_entry_is_not_believed(entry, tmp_path, memo):
    path = write(tmp_path / "a", b"abc")
    Digests(memo).of(path)
    state = json.loads(memo.read_text())[str(path)]["state"]
    entries = {"no digest": {"state": state}, "a number": {"state": state, "digest": 5}}
    memo.write_text(json.dumps({str(path): entries.get(entry, entry) if isinstance(entry, str) else entry}))
    assert Digests(memo).of(path) == digest(b"abc")
    assert json.loads(memo.read_text())[str(path)] == {"state": state, "digest": digest(b"abc")}


@pytest.mark.parametrize("memo_name", ["file/digests.json", "folder"])
def test_a_memo_that_cannot_be_written_is_no_error(memo_name, tmp_path, memo):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "file", b"abc")
    assert Digests(tmp_path / memo_name).of(tmp_path / "file") == digest(b"abc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_file_that_has_gone_is_named(tmp_path, memo):
    with pytest.raises(UserError) as error:
        Digests(memo).of(tmp_path / "a")
    assert str(error.value) == f"{tmp_path / 'a'} cannot be read: No such file or directory"
