"""The run folder: which run it belongs to, its resolved configuration, and where a start of it goes on."""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from recipe import ranks
from recipe.arguments import Arguments
from recipe.checkpoint.find import candidates, defect, step_of
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.publish import clean_leftovers
from recipe.checkpoint.verify import content_problem
from recipe.data.cache import tokenizer_digest
from recipe.errors import UserError

IDENTITY, CONFIG, EXPORT, LOCK = "run.json", "config.yaml", "export", "run.lock"
AUTO, NONE = ("auto", "true", "True"), (None, "none", "false", "False")
LOCK_SECONDS = 20.0  # for a run of the same job that is on its way out
SECRETS = ("hub_token", "push_to_hub_token")


# What decides which numbers a run computes, beside its data, its model and its tokenizer.
_DECIDING = (
    ("model", "param_dtype"),
    ("train", "global_batch_size"),
    ("train", "max_steps"),
    ("train", "seed"),
    ("train", "data_seed"),
    ("train", "max_length"),
    ("train", "packing"),
    ("train", "optim"),
    ("train", "optim_args"),
    ("train", "learning_rate"),
    ("train", "lr_scheduler_type"),
    ("train", "lr_scheduler_kwargs"),
    ("train", "warmup_steps"),
    ("train", "weight_decay"),
    ("train", "adam_beta1"),
    ("train", "adam_beta2"),
    ("train", "adam_epsilon"),
    ("train", "max_grad_norm"),
    ("train", "neftune_noise_alpha"),
)
IDENTIFYING = {"data", "model", "tokenizer", *(key for _, key in _DECIDING)}


def fingerprint(
    arguments: Arguments, data_fingerprint: str, model_folder: Path, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What makes a run this run and not another: a checkpoint of a run with other values is not gone on from, unless
    each difference is accepted by name. The arguments are settled."""
    groups = {"model": arguments[1], "train": arguments[2]}
    return {
        "data": data_fingerprint,
        "model": _hash((model_folder / "config.json").read_text()),
        "tokenizer": tokenizer_digest(tokenizer),
    } | {key: _plain(getattr(groups[group], key)) for group, key in _DECIDING}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: dict[str, Any] | None, new: dict[str, Any], accepted: Collection[str] = ()) -> list[str]:
    """Each value that changed and was not accepted, as "key: old then, new now"; [] where there is nothing to compare
    with."""
    if old is None:
        return []
    return [
        f"{key}: {old.get(key)} then, {new.get(key)} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and key not in accepted
    ]


def claim(run_dir: Path, run: dict[str, Any], accepted: Collection[str] = ()) -> None:
    """Make `run_dir` this run's, or raise `UserError` if it is another's, or in use. Rank 0."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock(run_dir)
    identity = run_dir / IDENTITY
    changed = differences(_read_identity(identity), run, accepted)
    if changed and candidates(run_dir):
        raise UserError(
            f"output_dir {run_dir} belongs to a different run ({'; '.join(changed)}); set another output_dir, remove "
            f"that folder, or accept what changed: accept_changes: [{_keys(changed)}]"
        )
    draft = identity.with_suffix(".tmp")
    draft.write_text(json.dumps(run, indent=1) + "\n")
    draft.rename(identity)


def _keys(changed: list[str]) -> str:
    return ", ".join(text.split(":")[0] for text in changed)


def _read_identity(path: Path) -> dict[str, Any] | None:
    """None where there is none, or where a crash cut it off: checkpoints have their own."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def lock(run_dir: Path) -> None:
    """Hold `run_dir` until this process ends, however it ends; raises `UserError` with who holds it.

    A POSIX record lock: the kernel (or the file server) drops it with its process, a child does not inherit it, and
    it holds between the nodes of a shared file system that has locks.
    """
    path = run_dir / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    patience = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(f"recipe: warning: {run_dir} cannot be locked ({error.strerror}): nothing keeps a second run out")
                break
            if time.monotonic() > patience:
                owner = os.pread(handle, 1000, 0).decode(errors="replace").strip()
                raise UserError(
                    f"output_dir {run_dir} is in use by another run ({owner}); wait for it, end it, or set another "
                    "output_dir"
                ) from None
            time.sleep(0.5)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"host {os.uname().nodename}, pid {os.getpid()}\n".encode(), 0)
    _HELD.append(handle)  # any close of the file, by whichever handle, would give the lock up


_HELD: list[int] = []


def resume_point(
    run_dir: Path,
    asked: str | None,
    run: dict[str, Any],
    accepted: Collection[str] = (),
    alive: Callable[[str], object] = lambda doing: None,
) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, read back and found whole, or None for a fresh start; and lines for the log.
    Collective: the ranks share the reading; rank 0 decides.

    Args:
        asked: `resume_from_checkpoint`: 'auto', 'none' or a folder.
        accepted: keys in which the checkpoint's run may differ from `run`.
        alive: called with what is being done, whenever that gets further.

    Raises:
        UserError: a named checkpoint is not whole or of a different run, or 'none' over existing checkpoints.
    """
    lines: list[str] = []
    found: list[Path] = []
    with ranks.all_or_none("looking for checkpoints"):
        if ranks.is_main():
            lines += clean_leftovers(run_dir)
            found = _candidates(run_dir, asked)
    automatic = asked in AUTO
    for folder in ranks.from_main(found):
        why = _defect(folder, alive)
        if why is None:
            manifest = Manifest.read(folder)
            with ranks.all_or_none("opening a checkpoint"):
                changed = differences(manifest.run, run, accepted)
                if changed:
                    raise UserError(
                        f"{folder} is a checkpoint of a different run: {'; '.join(changed)}; set them back, or accept "
                        f"the change: accept_changes: [{_keys(changed)}]"
                    )
            taken = [f"accepted: {text}" for text in differences(manifest.run, run)]
            went = f"resuming from {folder}: step {manifest.step}, written by {manifest.world_size} ranks"
            return folder, [*lines, *taken, went]
        if not automatic:
            raise UserError(f"resume_from_checkpoint '{folder}' is not a whole checkpoint: {why}")
        lines.append(f"passed over {folder.name}: {why}")
    none = "resume_from_checkpoint: none" if asked in NONE else f"no whole checkpoint in {run_dir}"
    return None, [*lines, f"fresh start ({none})"]


def _candidates(run_dir: Path, asked: str | None) -> list[Path]:
    """The folders to look at, best first. Rank 0."""
    there = candidates(run_dir)
    if asked in AUTO:
        return there
    if asked in NONE:
        if there:
            raise UserError(
                f"resume_from_checkpoint is none and {run_dir} holds {there[0].name}; set another output_dir, remove "
                "the checkpoints, or set resume_from_checkpoint: auto"
            )
        return []
    folder = Path(asked or "")
    if not folder.is_dir():
        raise UserError(f"resume_from_checkpoint '{folder}' is no folder; give 'auto', 'none' or a checkpoint's folder")
    try:
        step = Manifest.read(folder).step
    except ValueError as error:
        raise UserError(f"resume_from_checkpoint '{folder}' is not a whole checkpoint: {error}") from None
    # From whichever folder it comes, this run's checkpoints will be among them.
    newer = [c.name for c in there if step_of(c) > step or (step_of(c) == step and c.resolve() != folder.resolve())]
    if newer:
        raise UserError(
            f"resume_from_checkpoint is {folder} (step {step}) and {run_dir} holds {', '.join(newer)}, which a later "
            "start would take; remove them, or set another output_dir"
        )
    return [folder]


def _defect(folder: Path, alive: Callable[[str], object]) -> str | None:
    """Why `folder` is no whole checkpoint, its content read back, each rank its share of it; None if it is one.
    Collective."""
    why = ranks.from_main(defect(folder) if ranks.is_main() else None)
    if why is not None:
        return why
    manifest = Manifest.read(folder)
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name]["size"])
    mine = by_size[ranks.rank() :: ranks.world_size()]
    on_block = partial(alive, f"reading back {folder.name}")
    problems = [content_problem(folder, manifest, name, on_block) for name in mine]
    everyone = ranks.gather([problem for problem in problems if problem is not None])
    return "; ".join(sorted(problem for one in everyone for problem in one)) or None


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
