"""Publish a checkpoint whole or not at all: a temporary folder, every file synced, the manifest last, one rename.

For one process, that of rank 0; `recipe.checkpoint.saver` is what all ranks do together.
"""

import os
import shutil
import uuid
from pathlib import Path

from recipe.checkpoint.find import name_of
from recipe.checkpoint.manifest import Manifest

TEMPORARY = ".tmp"


def begin(run_dir: Path, step: int) -> Path:
    """An empty folder to write checkpoint `step` into. Its name is its own: a rank of an earlier start that was cut
    off, and comes back, writes into no other's."""
    draft = run_dir / f"{name_of(step)}.{uuid.uuid4().hex[:8]}{TEMPORARY}"
    draft.mkdir(parents=True)
    return draft


def publish(draft: Path, manifest: Manifest) -> Path:
    """Write the manifest of `draft`, whose files are written and synced, and give the folder its final name."""
    manifest.write(draft)
    for folder in [draft, *(p for p in draft.rglob("*") if p.is_dir())]:
        sync(folder)
    final = draft.with_name(name_of(manifest.step))
    if final.exists():
        discard(final)  # a broken folder of that name: a good one would have been resumed from
    draft.rename(final)
    sync(final.parent)
    return final


def discard(folder: Path) -> None:
    """Delete a checkpoint or a draft. A checkpoint loses its name first, so that at no moment a part of it has that
    name."""
    if folder.suffix != TEMPORARY:
        going = folder.with_name(f"{folder.name}.old{TEMPORARY}")
        shutil.rmtree(going, ignore_errors=True)
        folder = folder.rename(going)
    shutil.rmtree(folder)


def sync(path: Path) -> None:
    """Until the disk has it: a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clean_leftovers(run_dir: Path) -> list[str]:
    """Remove what interrupted saves and deletions left behind; returns lines for the log."""
    lines = []
    for folder in sorted(run_dir.glob(f"{name_of('*')}{TEMPORARY}")):
        try:
            discard(folder)
            lines.append(f"removed {folder.name}, left by an interrupted save")
        except OSError as error:  # a file that somebody holds open on a network file system: it is only in the way
            lines.append(f"{folder.name}, left by an interrupted save, cannot be removed ({error})")
    return lines
