"""Delete old checkpoints: on rank 0, after a newer one is published, never the newest complete one."""

from pathlib import Path

from recipe.checkpoint.find import candidates, newest_complete
from recipe.checkpoint.publish import discard


def retire(run_dir: Path, keep: int | None) -> list[Path]:
    """Keep the newest `keep` checkpoints of `run_dir` (None: all); returns the folders removed."""
    if keep is None:
        return []
    newest, _ = newest_complete(run_dir)
    old = [folder for folder in candidates(run_dir)[max(1, keep) :] if folder != newest]
    for folder in old:
        discard(folder)
    return old
