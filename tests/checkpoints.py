"""Checkpoints written by the recipe's own code in one process, without a run; and spoilt ones."""

import io
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from recipe.checkpoint import shards
from recipe.checkpoint.manifest import FILE, Manifest, describe_files, list_files

DESCRIPTION = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def pieces(name: str, tensor: torch.Tensor, parts: int = 3) -> Iterator[shards.Piece]:
    """As FSDP1's ranks would hold a tensor: parts of it laid out flat, which begin and end within rows."""
    cuts = [tensor.numel() * i // parts for i in range(parts + 1)]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        yield from shards.flat_pieces(("model", name), tensor.shape, begin, tensor.detach().reshape(-1)[begin:end])


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], model: Path, parts: int = 3) -> Path:
    """A checkpoint of `tensors` with the description that `model` has, in the process group of this process alone."""
    held = [piece for name, tensor in tensors.items() for piece in pieces(name, tensor, parts)]
    layout = shards.agree(held)
    written = shards.write(folder / shards.MODEL, layout, {piece.index: piece.data for piece in held})
    shards.finish(folder / shards.MODEL, layout, [written.items])
    for name in DESCRIPTION:
        shutil.copyfile(model / name, folder / name)
    sign(folder)
    return folder


def sign(folder: Path) -> None:
    """Write a manifest that fits the files as they are, as an attacker can."""
    Manifest(3, 24, 1, {}, files=describe_files(folder, list_files(folder))).write(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- spoiling ----------------------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    """In its middle, where a shard has weights."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


SPOIL = {"flipped": flip_a_bit, "truncated": truncate, "empty": empty, "missing": Path.unlink}


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def plant_metadata(shard_folder: Path, evil: Evil) -> None:
    """A `.metadata` that is right, and brings code along."""
    path = shard_folder / shards.METADATA
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {**(metadata.planner_data or {}), "evil": evil}
    path.write_bytes(pickle.dumps(metadata))


def plant_item(shard_folder: Path, evil: Evil) -> str:
    """Code in the place of a weight; returns the file's name."""
    path = shard_folder / shards.METADATA
    metadata = pickle.loads(path.read_bytes())
    buffer = io.BytesIO()
    torch.save(evil, buffer)
    name = next(iter(metadata.storage_data.values())).relative_path
    for index in metadata.storage_data:
        metadata.storage_data[index] = _StorageInfo(name, 0, len(buffer.getvalue()))
    (shard_folder / name).write_bytes(buffer.getvalue())
    path.write_bytes(pickle.dumps(metadata))
    return name


def redo_checksums(folder: Path) -> None:
    """As an attacker would."""
    if (folder / FILE).exists():
        manifest = Manifest.read(folder)
        manifest.files = describe_files(folder, list_files(folder))
        manifest.write(folder)
