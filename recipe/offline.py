"""Export a checkpoint without its run: one process, no process group, no GPU, a tensor at a time.

    recipe export runs/x/checkpoint-500 exported [--dtype bfloat16] [--max_shard_size 5GB] [--model MODEL]

Reads this recipe's checkpoints, and those that stock Accelerate and transformers write under SHARDED_STATE_DICT, FSDP1
and FSDP2 alike. Neither transformers nor the model is loaded: names and shapes are the files'.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from recipe.checkpoint import manifest as manifests
from recipe.checkpoint.find import candidates
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.shards import METADATA, MODEL, Piece, Reader
from recipe.checkpoint.verify import content_problem
from recipe.errors import UserError
from recipe.export import write_export

_TOP = "model."  # Accelerate's key of the model in the state dict
_OF_THE_RUN = {manifests.FILE, "trainer_state.json", "scheduler.json"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(checkpoint: Path, out: Path, model: Path | None, dtype: str, max_shard_size: str) -> None:
    """Write a Hugging Face folder at `out`, replacing one that is there. An interrupted call can be made again, and
    goes on with the first file that is not finished.

    Args:
        checkpoint: a checkpoint's folder.
        model: a folder with the configuration and the tokenizer, where the checkpoint has none.
        dtype: of the exported weights.
        max_shard_size: largest file, such as "5GB".

    Raises:
        UserError: no checkpoint, a broken one, or one that says nothing of its model and `model` is None.
    """
    shards = _shards(checkpoint)
    described = _described_by(checkpoint, model)
    _check(checkpoint)
    try:
        reader = Reader(shards)
    except ValueError as error:
        raise UserError(f"{error}; export another checkpoint") from None
    names = _names(reader, described)
    shapes = {name: reader.shapes()[key][0] for name, key in names.items()}
    source = json.dumps([manifests.checksum(shards / METADATA), str(checkpoint.resolve()), dtype, max_shard_size])

    def tensors(wanted: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        total = sum(shapes[name].numel() for name in wanted) * _DTYPES[dtype].itemsize
        with tqdm(total=total, unit="B", unit_scale=True, desc=f"Exporting {checkpoint.name}") as bar:
            for name in wanted:
                value = torch.empty(shapes[name], dtype=_DTYPES[dtype])
                path = tuple(names[name].split(".", 1))
                reader.read([Piece(path, shapes[name], (0,) * value.dim(), value)])
                yield name, value
                bar.update(value.nbytes)

    def describe(folder: Path) -> None:
        for file in described:
            shutil.copyfile(file, folder / file.name)

    write_export(out, tensors, shapes, _DTYPES[dtype], max_shard_size, describe, source)


def _shards(checkpoint: Path) -> Path:
    for folder in (checkpoint / MODEL, checkpoint):
        if (folder / METADATA).is_file():
            return folder
    inside = candidates(checkpoint) if checkpoint.is_dir() else []
    hint = f"; did you mean {inside[0]}?" if inside else ""
    raise UserError(f"{checkpoint} is no sharded checkpoint: {MODEL}/{METADATA} is not in it{hint}")


def _described_by(checkpoint: Path, model: Path | None) -> list[Path]:
    """The files that describe the model; the checkpoint's own before those of `model`."""
    found: dict[str, Path] = {}
    for folder in (model, checkpoint):
        if folder is not None:
            if not folder.is_dir():
                raise UserError(f"--model {folder} is no folder")
            files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
            found |= {path.name: path for path in files if not path.name.endswith(_WEIGHTS)}
    found = {name: path for name, path in found.items() if name not in _OF_THE_RUN}
    if "config.json" not in found:
        raise UserError(f"{checkpoint} says nothing of its model (no config.json); give --model, the model's folder")
    return [found[name] for name in sorted(found)]


def _check(checkpoint: Path) -> None:
    """Read the weights' files back before they are exported; checkpoints of other tools have no checksums."""
    if not (checkpoint / manifests.FILE).is_file():
        tqdm.write(f"recipe: {checkpoint} has no {manifests.FILE}, so its content cannot be checked")
        return
    try:
        manifest = Manifest.read(checkpoint)
    except ValueError as error:
        raise UserError(f"{checkpoint}: {error}; export another checkpoint") from None
    names = [name for name in sorted(manifest.files) if not name.startswith("optimizer")]
    total = sum(manifest.files[name]["size"] for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Checking {checkpoint.name}") as bar:
        problems = []
        for name in names:
            problems.append(content_problem(checkpoint, manifest, name))
            bar.update(manifest.files[name]["size"])
    found = [problem for problem in problems if problem]
    if found:
        raise UserError(f"{checkpoint} is not whole: {'; '.join(found)}; export another checkpoint")


def _names(reader: Reader, described: list[Path]) -> dict[str, str]:
    """{name in the model: key in the files} of every weight, a tied head left out."""
    keys = {key.removeprefix(_TOP): key for key in reader.shapes() if key.startswith(_TOP)}
    if not keys:
        raise UserError(f"{reader.path} holds no model's weights (nothing under '{_TOP}')")
    others = [key for key in keys.values() if not reader.shapes()[key][1].is_floating_point]
    if others:
        raise UserError(f"{reader.path} holds weights that are not floating point: {', '.join(others[:5])}")
    config = json.loads(next(path for path in described if path.name == "config.json").read_text())
    if config.get("tie_word_embeddings"):
        keys.pop("lm_head.weight", None)
    return keys
