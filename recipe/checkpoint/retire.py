"""Delete old checkpoints: on rank 0, after a newer one is published, and never that one."""

from pathlib import Path

from recipe.checkpoint.find import candidates, step_of
from recipe.checkpoint.publish import discard


def retire(published: Path, keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Keep the newest `keep` checkpoints (None: all) up to the one just `published`, and those whose step is a multiple
    of `keep_every`; returns the folders removed.

    Those of later steps stay: a resume passed them over, and somebody may want to know why.
    """
    if keep is None:
        return []
    step = step_of(published)
    up_to = [folder for folder in candidates(published.parent) if step_of(folder) <= step]
    old = [f for f in up_to[max(1, keep) :] if not (keep_every and step_of(f) % keep_every == 0)]
    for folder in old:
        discard(folder)
    return old
