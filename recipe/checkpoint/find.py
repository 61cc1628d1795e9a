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


def newest_complete(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of `run_dir` without a defect (or None), and why each newer one was passed over."""
    passed_over: list[str] = []
    for folder in candidates(run_dir):
        why = defect(folder)
        if why is None:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {why}")
    return None, passed_over
