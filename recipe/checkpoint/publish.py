"""Publish a checkpoint whole or not at all: a temporary folder, every file synced, the manifest last, one rename."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipe import ranks
from recipe.checkpoint import manifest as manifests
from recipe.checkpoint.find import name_of
from recipe.checkpoint.manifest import Manifest

TEMPORARY = ".tmp"


@contextmanager
def publishing(
    run_dir: Path, step: int, describe: Callable[[], Manifest], on_file: Callable[[], object] = lambda: None
) -> Iterator[Path]:
    """A folder to write checkpoint `step` into, the same on every rank; it becomes `checkpoint-<step>` when the body
    has ended well on all ranks. Collective.

    If the body or the publishing fails on any rank, the folder is removed and every rank raises: what a resume could
    pick up is complete or absent.

    Args:
        describe: makes the manifest, without its files; called on rank 0 once everything else is written.
        on_file: called before each file that this rank sums.
    """
    final = run_dir / name_of(step)
    draft = run_dir / f"{final.name}{TEMPORARY}"
    try:
        with ranks.all_or_none(f"making {draft}"):
            if ranks.is_main():
                discard(draft)
                draft.mkdir(parents=True)
        with ranks.all_or_none(f"writing {final.name}"):
            yield draft
        _seal(draft, describe, on_file)
        with ranks.all_or_none(f"publishing {final}"):
            if ranks.is_main():
                discard(final)  # an unfinished or broken folder of that name; a good one would have been resumed from
                draft.rename(final)
                _sync(run_dir)
    except BaseException:
        if ranks.is_main():
            discard(draft)
        raise


def _seal(draft: Path, describe: Callable[[], Manifest], on_file: Callable[[], object]) -> None:
    """Sum the files, each rank its share of them, and write the manifest."""
    parts: list = [None] * dist.get_world_size()
    with ranks.all_or_none(f"reading back {draft.name}"):
        mine = manifests.list_files(draft)[ranks.rank() :: dist.get_world_size()]
        files: dict[str, dict[str, Any]] = {}
        for name in mine:
            on_file()
            files |= manifests.describe_files(draft, [name])
            _sync(draft / name)
    dist.all_gather_object(parts, files)
    with ranks.all_or_none(f"writing the manifest of {draft.name}"):
        if ranks.is_main():
            manifest = describe()
            manifest.files = {name: entry for part in parts for name, entry in sorted(part.items())}
            manifest.write(draft)
            for folder in [draft, *(p for p in draft.rglob("*") if p.is_dir())]:
                _sync(folder)


def discard(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clean_leftovers(run_dir: Path) -> list[str]:
    """Remove what interrupted saves left behind; returns the names removed."""
    leftovers = sorted(run_dir.glob(f"{name_of('*')}{TEMPORARY}"))
    for folder in leftovers:
        discard(folder)
    return [folder.name for folder in leftovers]
