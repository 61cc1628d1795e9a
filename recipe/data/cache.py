"""Prepared data sets on disk: one folder for each fingerprint, built once, whole or not there at all.

Any number of processes on any number of nodes may ask for the same folder. A file lock lets one build while the others
wait for it; no collective is involved, so no collective can time out while a long data set is tokenized.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


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
    """
    if folder.is_dir():
        return False
    logger.info("preparing %s, or waiting for the process that does", folder)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return False
        # On NFS a file that is still mapped cannot be deleted for good: a leftover is no reason to fail.
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
        ) as temporary:
            scratch, result = Path(temporary) / "scratch", Path(temporary) / "result"
            scratch.mkdir()
            result.mkdir()
            build(scratch, result)
            try:
                result.rename(folder)
            except OSError:
                # A file system that does not lock across nodes let another build too, and it was first.
                if not folder.is_dir():
                    raise
                return False
    return True
