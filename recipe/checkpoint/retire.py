"""Delete old checkpoints: on rank 0, after a newer one is published, never the newest complete one."""

from pathlib import Path

from recipe.checkpoint.find import candidates, newest_complete, step_of
from recipe.checkpoint.publish import discard


def retire(run_dir: Path, keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Keep the newest `keep` checkpoints of `run_dir` (None: all), and those whose step is a multiple of `keep_every`;
    returns the folders removed."""
    if keep is None:
        return []
    newest, _ = newest_complete(run_dir)
    if newest is None:
        return []  # somebody may still make something of one of them
    old = [
        folder
        for folder in candidates(run_dir)[max(1, keep) :]
        if folder != newest and not (keep_every and step_of(folder) % keep_every == 0)
    ]
    for folder in old:
        discard(folder)
    return old
