"""Digests of files, remembered: the content of a large data set is read for its name once, not at every start."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from recipe.errors import UserError

RACY_SECONDS = 2.0  # a file this young may change again without a change of its time


class Digests:
    """Digests by content, kept in the file `memo` beside what they were taken for: place, size, inode, time of change.

    The rule is git's for its index: a file with the same of all these has the same content, unless it was changed
    within the resolution of the clock; so nothing is remembered of a file that is younger than two seconds.
    """

    def __init__(self, memo: Path):
        self.memo = memo

    def of(self, path: Path) -> str:
        """xxh3 (128 bits) of the content, in hexadecimal digits.

        Raises:
            UserError: the file cannot be read, or has gone.
        """
        try:
            return self._of(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None

    def _of(self, path: Path) -> str:
        known = self._read()
        place, state = str(path.resolve()), _state(path)
        entry = known.get(place)
        if isinstance(entry, dict) and entry.get("state") == state and isinstance(entry.get("digest"), str):
            return entry["digest"]
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            block = memoryview(bytearray(1 << 22))
            while size := file.readinto(block):
                digest.update(block[:size])
        if _state(path) == state and time.time() - state["changed"] / 1e9 > RACY_SECONDS:
            self._write(self._read() | {place: {"state": state, "digest": digest.hexdigest()}})
        return digest.hexdigest()

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.memo.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, known: dict[str, Any]) -> None:
        draft = self.memo.with_name(f"{self.memo.name}.{os.uname().nodename}.{os.getpid()}")
        with suppress(OSError):  # a folder that takes no file costs the next start the reading, and nothing else
            self.memo.parent.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_text(json.dumps(known, indent=1))
                draft.replace(self.memo)
            finally:
                draft.unlink(missing_ok=True)


def _state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "inode": stat.st_ino, "modified": stat.st_mtime_ns, "changed": stat.st_ctime_ns}
