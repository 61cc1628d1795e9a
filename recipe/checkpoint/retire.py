"""Delete old checkpoints: on rank 0, after a newer one is published, never the newest complete one."""

from pathlib import Path

from recipe.checkpoint.find import candidates, defect, step_of
from recipe.checkpoint.publish import discard


def retire(run_dir: Path, keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Keep the newest `keep` checkpoints of `run_dir` (None: all), and those whose step is a multiple of `keep_every`;
    returns the folders removed."""
    if keep is None:
        return []
    found = candidates(run_dir)
    newest = next((folder for folder in found if defect(folder) is None), None)
    if newest is None:
        return []  # somebody may still make something of one of them
    old = [
        folder
        for folder in found[max(1, keep) :]
        if folder != newest and not (keep_every and step_of(folder) % keep_every == 0)
    ]
    for folder in old:
        discard(folder)
    return old
