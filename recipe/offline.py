"""Export a checkpoint without its run: one process, no process group, no GPU, a tensor at a time.

    recipe export runs/x/checkpoint-500 exported [--dtype bfloat16] [--max_shard_size 5GB] [--model MODEL]

Reads this recipe's checkpoints, and those that stock Accelerate and transformers write under SHARDED_STATE_DICT, FSDP1
and FSDP2 alike. Neither transformers nor the model is loaded: names and shapes are the files'.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, cast

import torch
from huggingface_hub.serialization._base import parse_size_to_int
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from tqdm.auto import tqdm

from recipe.checkpoint import manifest as manifests
from recipe.checkpoint.find import candidates
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.shards import METADATA, MODEL, Reader
from recipe.checkpoint.verify import content_problem
from recipe.errors import UserError
from recipe.export import Part, write_export

_TOP = "model."  # Accelerate's key of the model in the state dict
_OF_THE_RUN = {manifests.FILE, "trainer_state.json", "scheduler.json"}
_NO_DESCRIPTION = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".index.json", ".gguf", ".h5", ".msgpack", ".onnx")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # a draft is not synced, so one from before a power cut is no use
_BLOCK_BYTES = 1 << 20  # read, cast and written at a time; more of it fragments the heap, and is no faster


def export_checkpoint(checkpoint: Path, out: Path, model: Path | None, dtype: str, max_shard_size: str) -> None:
    """Write a Hugging Face folder at `out`, replacing one that is there. An interrupted call can be made again, and
    goes on with the first file that is not finished.

    Beside the libraries it needs a few megabytes of memory, whatever the model.

    Args:
        checkpoint: a checkpoint's folder.
        model: a folder with the configuration and the tokenizer, where the checkpoint has none.
        dtype: of the exported weights.
        max_shard_size: largest file, such as "5GB".

    Raises:
        UserError: no checkpoint, a broken one, or one that says nothing of its model and `model` is None; or `out`
            holds anything but an export.
    """
    checkpoint, out = checkpoint.resolve(), out.resolve()
    shards = _shards(checkpoint)
    if shards == checkpoint and checkpoint.name == MODEL:
        checkpoint = checkpoint.parent
    described = _described_by(checkpoint, model)
    _may_be_written(out, max_shard_size)
    _check(checkpoint)
    try:
        reader = Reader(shards)
    except ValueError as error:
        raise UserError(f"{error}; export another checkpoint") from None
    names = _names(reader, described)
    shapes = {name: reader.shapes()[key][0] for name, key in names.items()}
    kind = [manifests.checksum(shards / METADATA), str(checkpoint), dtype, max_shard_size]
    source = json.dumps([*kind, _BOOT.read_text() if _BOOT.is_file() else ""])

    def tensors(wanted: Sequence[str]) -> Iterator[Part]:
        total = sum(shapes[name].numel() for name in wanted) * _DTYPES[dtype].itemsize
        with tqdm(total=total, unit="B", unit_scale=True, desc=f"Exporting {checkpoint.name}") as bar:
            for name in wanted:
                for offsets, part in _parts(reader, names[name]):
                    yield name, part, offsets
                    bar.update(part.numel() * _DTYPES[dtype].itemsize)

    def describe(folder: Path) -> None:
        for file in described:
            shutil.copyfile(file, folder / file.name)

    try:
        write_export(out, tensors, shapes, _DTYPES[dtype], max_shard_size, describe, source)
    except OSError as error:
        raise UserError(f"{out} could not be written: {error}; run it again to go on") from None


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
            found |= {path.name: path for path in files if not path.name.endswith(_NO_DESCRIPTION)}
    found = {name: path for name, path in found.items() if name not in _OF_THE_RUN}
    if "config.json" not in found:
        raise UserError(f"{checkpoint} says nothing of its model (no config.json); give --model, the model's folder")
    return [found[name] for name in sorted(found)]


def _may_be_written(out: Path, max_shard_size: str) -> None:
    """What is at `out` is deleted in the end, so it has to be an export, or nothing."""
    try:
        size = parse_size_to_int(max_shard_size)
    except ValueError:
        size = 0
    if size <= 0:
        raise UserError(f"--max_shard_size '{max_shard_size}' is no size such as 5GB or 500MB")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file; give a folder to write")
    inside = list(out.iterdir())
    is_export = (out / "config.json").is_file() and not (out / manifests.FILE).exists()
    if inside and (not is_export or any(path.is_dir() for path in inside)):
        raise UserError(f"{out} holds something else than an export, which would be deleted; give another folder")


def _check(checkpoint: Path) -> None:
    """Read the weights' files back before they are exported; checkpoints of other tools have no checksums."""
    if not (checkpoint / manifests.FILE).is_file():
        warning = f"recipe: warning: {checkpoint} has no {manifests.FILE}, so its content cannot be checked"
        tqdm.write(warning, file=sys.stderr)
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


def _parts(reader: Reader, key: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """A tensor of the files, in rectangles of at most `_BLOCK_BYTES` (or a row), each with its offsets."""
    described = reader.metadata.state_dict_metadata[key]
    assert isinstance(described, TensorStorageMetadata), "it has a shape"
    if sum(math.prod(chunk.sizes) for chunk in described.chunks) != described.size.numel():
        raise UserError(f"{reader.path}: its parts of {key} do not make up the whole; export another checkpoint")
    for chunk in described.chunks:
        for begin, rows in _stored(reader, MetadataIndex(key, chunk.offsets), chunk.sizes):
            yield (chunk.offsets[0] + begin, *chunk.offsets[1:]) if rows.dim() else (), rows


def _stored(reader: Reader, index: MetadataIndex, sizes: torch.Size) -> Iterator[tuple[int, torch.Tensor]]:
    """What a rank wrote as one, by rows, each with the number of the first. DCP's own `read_data` would hold it
    twice."""
    place = reader.storage_data.get(index)
    if place is None:
        raise UserError(f"{reader.path}: nothing says where {index.fqn} lies; export another checkpoint")
    path = Path(reader.path) / place.relative_path
    try:
        with path.open("rb") as file:
            view = cast(IO[bytes], _create_file_view(file, place.offset, place.length))
            like = torch.load(view, map_location="meta", weights_only=True)
            if not isinstance(like, torch.Tensor) or like.shape != sizes or not _is_plain(like):
                raise UserError(f"{path} does not hold {index.fqn} as its {METADATA} says; export another checkpoint")
            view.seek(0)
            archive = torch._C.PyTorchFileReader(view)
            file.seek(place.offset + archive.get_record_offset("data/0"))  # type: ignore[attr-defined]
            count = sizes[0] if sizes else 1
            at_once = max(1, _BLOCK_BYTES * count // max(1, like.nbytes))
            for begin in range(0, count, at_once):
                shape = (min(at_once, count - begin), *sizes[1:]) if sizes else ()
                rows = torch.empty(shape, dtype=like.dtype)
                if file.readinto(rows.view(-1).view(torch.uint8).numpy().data) != rows.nbytes:
                    raise EOFError("it is cut off")
                yield begin, rows
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise UserError(f"{path} cannot be read ({error}); export another checkpoint") from None


def _is_plain(stored: torch.Tensor) -> bool:
    """Its elements are all that its file has, in their order; DCP writes no other."""
    return stored.is_contiguous() and stored.untyped_storage().nbytes() == stored.nbytes
