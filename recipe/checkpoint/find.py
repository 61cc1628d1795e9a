"""Find the checkpoint to resume from: the newest that is whole, not the one with the highest number."""

import re
from pathlib import Path

from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.verify import size_problem

_NAME = re.compile(r"checkpoint-(\d+)$")


def name_of(step: int | str) -> str:
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int:
    match = _NAME.search(folder.name)
    assert match is not None, folder
    return int(match[1])


def candidates(run_dir: Path) -> list[Path]:
    """Every folder named like a checkpoint, newest step first."""
    found = [p for p in run_dir.glob(name_of("*")) if p.is_dir() and _NAME.search(p.name)]
    return sorted(found, key=step_of, reverse=True)


def defect(folder: Path) -> str | None:
    """Why `folder` is no complete checkpoint, by its manifest and its files' sizes; None if it is one."""
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        return str(error)
    return "; ".join(filter(None, (size_problem(folder, manifest, name) for name in sorted(manifest.files)))) or None
