"""The run folder: which run it belongs to, its resolved configuration, and where a start of it goes on."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from recipe.arguments import Arguments
from recipe.checkpoint.find import candidates, newest_complete, require_complete, step_of
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.publish import clean_leftovers
from recipe.data.cache import tokenizer_digest
from recipe.errors import UserError

IDENTITY, CONFIG, EXPORT = "run.json", "config.yaml", "export"
SECRETS = ("hub_token", "push_to_hub_token")


def fingerprint(
    arguments: Arguments, data_fingerprint: str, model_folder: Path, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What makes a run this run and not another: a checkpoint of a run with other values cannot be gone on from."""
    _, model, train = arguments
    return {
        "data": data_fingerprint,
        "model": _hash((model_folder / "config.json").read_text()),
        "tokenizer": tokenizer_digest(tokenizer),
        "global_batch_size": train.global_batch_size,
        "seed": train.seed,
        "data_seed": train.data_seed,
        "max_length": train.max_length,
        "packing": train.packing,
        "param_dtype": model.param_dtype,
        "optim": str(train.optim),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """Each value that changed, as "key: old then, new now"; [] where there is nothing to compare with."""
    if old is None:
        return []
    return [
        f"{key}: {old.get(key)} then, {new.get(key)} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def claim(run_dir: Path, run: dict[str, Any]) -> None:
    """Make `run_dir` this run's, or raise `UserError` if it is another's. Rank 0."""
    identity = run_dir / IDENTITY
    changed = differences(_read_identity(identity), run)
    if changed and candidates(run_dir):
        raise UserError(
            f"output_dir {run_dir} belongs to a different run ({'; '.join(changed)}); set another output_dir, or "
            "remove that folder"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    draft = identity.with_suffix(".tmp")
    draft.write_text(json.dumps(run, indent=1) + "\n")
    draft.rename(identity)


def _read_identity(path: Path) -> dict[str, Any] | None:
    """None where there is none, or where a crash cut it off: checkpoints have their own."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def resume_point(run_dir: Path, asked: str | None, run: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, or None for a fresh start; and lines for the log. Rank 0.

    Args:
        asked: `resume_from_checkpoint`: 'auto', 'none' or a folder.

    Raises:
        UserError: a named checkpoint is incomplete or of a different run, or 'none' over existing checkpoints.
    """
    lines = [f"removed {name}, left by an interrupted save" for name in clean_leftovers(run_dir)]
    if asked in (None, "none", "false", "False"):
        found = candidates(run_dir)
        if found:
            raise UserError(
                f"resume_from_checkpoint is none and {run_dir} holds {found[0].name}; set another output_dir, remove "
                "the checkpoints, or set resume_from_checkpoint: auto"
            )
        return None, [*lines, "fresh start (resume_from_checkpoint: none)"]
    if asked in ("auto", "true", "True"):
        folder, passed_over = newest_complete(run_dir)
        lines += [f"passed over {why}" for why in passed_over]
        if folder is None:
            return None, [*lines, f"fresh start: no complete checkpoint in {run_dir}"]
    else:
        folder = require_complete(Path(asked))
    newer = [c.name for c in candidates(run_dir) if step_of(c) > step_of(folder)] if folder.parent == run_dir else []
    if newer and asked not in ("auto", "true", "True"):
        raise UserError(
            f"resume_from_checkpoint is {folder.name} and {run_dir} holds newer ones ({', '.join(newer)}), which a "
            "later start would take; remove them, or set another output_dir"
        )
    manifest = Manifest.read(folder)
    changed = differences(manifest.run, run)
    if changed:
        raise UserError(f"{folder} is a checkpoint of a different run: {'; '.join(changed)}")
    return folder, [*lines, f"resuming from {folder}: step {manifest.step}, written by {manifest.world_size} ranks"]


def resolved(arguments: Arguments) -> dict[str, Any]:
    """Every key of the configuration with its value, as plain YAML types; hub tokens are left out."""
    names = {
        item.name: group for group in arguments for item in fields(group) if item.init and item.name not in SECRETS
    }
    return {name: _plain(getattr(group, name)) for name, group in sorted(names.items())}


def write_config(run_dir: Path, values: dict[str, Any]) -> None:
    (run_dir / CONFIG).write_text(yaml.safe_dump(values))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
