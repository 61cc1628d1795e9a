"""Prepared data sets on disk: one folder for each fingerprint, built once, whole or not there at all.

Any number of processes on any number of nodes may ask for the same folder. A file lock lets one build while the others
wait for it; no collective is involved, so no collective can time out while a long data set is tokenized.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from recipe.errors import UserError

logger = logging.getLogger(__name__)

TAKES_NO_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
LEFT_SECONDS = 24 * 3600


def fingerprint(settings: dict[str, Any]) -> str:
    """16 hexadecimal digits that change when any of `settings` (JSON values) does."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a tokenizer does, as a digest: its backend and its special tokens, not its name or its place on disk."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    del backend["truncation"], backend["padding"]  # left behind by the last call, and set anew by the next
    return fingerprint({"backend": backend, "special_tokens": tokenizer.special_tokens_map})


def build_once(folder: Path, build: Callable[[Path, Path], None]) -> bool:
    """See to it that `folder` exists, in a folder that does, built by exactly one of the processes that ask.

    Args:
        build: Called with two empty folders beside `folder`: one for scratch files, which are deleted afterwards, and
            one that becomes `folder` when the call returns. After an exception nothing is left of either.

    Returns:
        Whether this call built it.

    Raises:
        UserError: the folder around `folder` is full, or may not be written to.
    """
    if folder.is_dir():
        return False
    logger.info("preparing %s, or waiting for the process that does", folder)
    try:
        with FileLock(f"{folder}.lock"):
            return False if folder.is_dir() else _build(folder, build)
    except OSError as error:
        elsewhere = isinstance(error.filename, str) and not _is_in(Path(error.filename), folder.parent)
        if error.errno not in TAKES_NO_FILES or elsewhere:
            raise
        raise UserError(
            f"data_cache_dir: {folder.parent} takes no files: {error.strerror}; set another data_cache_dir, or make "
            "room"
        ) from error


def _build(folder: Path, build: Callable[[Path, Path], None]) -> bool:
    prefix = f".{folder.name}.{os.uname().nodename}"
    _remove_leftovers(folder.parent, prefix)
    # On NFS a file that is still mapped cannot be deleted for good: a leftover is no reason to fail.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{prefix}.", ignore_cleanup_errors=True) as temporary:
        scratch, result = Path(temporary) / "scratch", Path(temporary) / "result"
        scratch.mkdir()
        result.mkdir()
        build(scratch, result)
        for path in [*result.rglob("*"), result]:  # or the name could survive a crash of the node, and the files not
            _sync(path)
        try:
            result.rename(folder)
        except OSError:
            # A file system that does not lock across nodes let another build too, and it was first.
            if not folder.is_dir():
                raise
            return False
        _sync(folder.parent)
    return True


def _remove_leftovers(cache: Path, prefix: str) -> None:
    """Remove the temporary folders of builders that were killed.

    With the lock held, nobody on this host builds the same folder, so those with `prefix` are left over. A file system
    that does not lock across nodes, and the locks of other folders, say nothing of the rest: they are left over once
    nothing in them has changed for a day.
    """
    for folder in cache.glob(f".{'[0-9a-f]' * 16}.*"):  # nothing else that a user may keep there
        if folder.name.rpartition(".")[0] == prefix or time.time() - _changed(folder) > LEFT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _changed(folder: Path) -> float:
    """When something in `folder` last changed; seconds since the epoch."""
    times = []
    for path in [folder, *folder.rglob("*")]:
        with suppress(OSError):  # its builder lives, and deletes
            times.append(path.lstat().st_mtime)
    return max(times, default=time.time())


def _sync(path: Path) -> None:
    """Until the disk has it: a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_in(path: Path, folder: Path) -> bool:
    return path.absolute().is_relative_to(folder.absolute())
