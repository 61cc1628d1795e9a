"""The trained model as a Hugging Face folder: whole weights, streamed unit by unit into sharded safetensors.

This is the one place where the state-dict type is FULL_STATE_DICT. All ranks take part in gathering a unit; rank 0
writes each tensor to the place in its file that was planned for it, so no rank ever holds more than one unit.
"""

import copy
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from recipe.checkpoint import publish
from recipe.loading import INDEX, MALLOC_TRIM, TRIM_EVERY_BYTES

if TYPE_CHECKING:  # an export of a checkpoint needs no model, and no memory for transformers
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PATTERN = "model{suffix}.safetensors"
SOURCE = "source.txt"  # in a draft: what it is an export of
Part = tuple[str, torch.Tensor, Sequence[int]]  # name, a rectangle of it, the rectangle's offsets


class SafetensorsWriter:
    """Sharded safetensors, written tensor by tensor, or part by part, in any order. (The library's own writer wants a
    whole file in memory.) One is on its way to the disk while the next is gathered.

    A file gets its name once all its tensors are written. Those that have theirs already, from a writer of the same
    arguments that was interrupted, stay.

    Args:
        folder: where the files go; it exists.
        shapes: of every tensor that will come, by name; the files hold them in the order of their names, numbers in
            them by value.
        dtype: of all of them.
        max_shard_size: largest file, such as "5GB".

    Attributes:
        missing: names of the tensors that are still to be written, in the order of the files.

    Raises:
        KeyError: a tensor that was not announced, or that has come already.
        ValueError: a tensor of another shape; on `close`, tensors that never came whole.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, torch.Size], dtype: torch.dtype, max_shard_size: str):
        self.folder, self.dtype = folder, dtype
        self.plan = split_state_dict_into_shards_factory(
            {name: shapes[name] for name in sorted(shapes, key=_natural)},
            get_storage_size=lambda shape: shape.numel() * dtype.itemsize,
            filename_pattern=PATTERN,
            max_shard_size=max_shard_size,
        )
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._freed = 0
        self._files: dict[str, _File] = {}
        self._places: dict[str, _Place] = {}
        for filename, names in self.plan.filename_to_tensors.items():
            if not (folder / filename).exists():
                self._begin(filename, {name: shapes[name] for name in names})
        self.missing = list(self._places)

    def _begin(self, filename: str, shapes: dict[str, torch.Size]) -> None:
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + shape.numel() * self.dtype.itemsize
            header[name] = {"dtype": _NAMES[self.dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        raw = (self.folder / f"{filename}.part").open("wb")
        raw.write(len(text).to_bytes(8, "little") + text)
        raw.truncate(8 + len(text) + end)
        for name, shape in shapes.items():
            begin, end = (8 + len(text) + offset for offset in header[name]["data_offsets"])
            self._places[name] = _Place(filename, begin, shape, left=end - begin)
        self._files[filename] = _File(raw, left=len(shapes))

    def write(self, name: str, tensor: torch.Tensor, offsets: Sequence[int] | None = None) -> None:
        """Write a tensor, or the rectangle of it that begins at `offsets`; no two may overlap."""
        place = self._places[name]
        if offsets is None:
            if tensor.shape != place.shape:
                raise ValueError(f"{name} is {list(tensor.shape)} and was announced as {list(place.shape)}")
            offsets = (0,) * tensor.dim()
        # A copy: FSDP frees a unit by resizing its storage, which torch refuses once numpy has seen it.
        data = tensor.detach().to("cpu", self.dtype, copy=True).contiguous().view(-1).view(torch.uint8)
        self._wait()
        self._return_freed_memory(data.numel())
        place.left -= data.numel()
        if place.left <= 0:
            del self._places[name]
        begins = [place.begin + first * self.dtype.itemsize for first in run_begins(place.shape, offsets, tensor.shape)]
        self._writing = self._disk.submit(self._write_at, place.filename, begins, data, place.left <= 0)

    def _write_at(self, filename: str, begins: Sequence[int], data: torch.Tensor, is_last: bool) -> None:
        file = self._files[filename]
        for begin, run in zip(begins, data.chunk(len(begins)) if data.numel() else (), strict=False):
            file.raw.seek(begin)
            file.raw.write(run.numpy().data)
        file.left -= is_last
        if not file.left:
            file.raw.close()
            (self.folder / f"{filename}.part").rename(self.folder / filename)

    def _return_freed_memory(self, nbytes: int) -> None:
        """glibc keeps freed blocks below 32 MB (see `recipe.loading.StreamingLoader`)."""
        self._freed += nbytes
        if self._freed > TRIM_EVERY_BYTES and MALLOC_TRIM is not None:
            MALLOC_TRIM(0)
            self._freed = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()  # raises what the write raised
            self._writing = None

    def close(self) -> None:
        self._wait()
        self._abandon()
        if self._places:
            raise ValueError(f"{len(self._places)} tensors were never written: {', '.join(sorted(self._places))}")
        if self.plan.is_sharded:
            index = {"metadata": self.plan.metadata, "weight_map": self.plan.tensor_to_filename}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _abandon(self) -> None:
        self._disk.shutdown()
        for file in self._files.values():
            file.raw.close()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()


@dataclass
class _Place:
    filename: str
    begin: int  # byte in the file
    shape: torch.Size
    left: int  # bytes that are still to be written


@dataclass
class _File:
    raw: BinaryIO
    left: int  # tensors that are still to be written


def run_begins(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The elements of a row-major tensor of `shape` at which the runs of a rectangle in it begin, which are equally
    long: one run where the rectangle is as wide as the tensor in all dimensions but the first."""
    split = next((d for d in reversed(range(len(shape))) if sizes[d] != shape[d]), 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    rows = itertools.product(*(range(offsets[d], offsets[d] + sizes[d]) for d in range(split)))
    return [sum(map(math.prod, zip((*row, *offsets[split:]), strides, strict=True))) for row in rows]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def write_export(
    out: Path,
    tensors: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor] | Part]],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    max_shard_size: str,
    describe: Callable[[Path], object],
    source: str | None = None,
) -> None:
    """Write a Hugging Face folder at `out`, replacing one that is there; weights first, then what describes them.

    Args:
        tensors: gives those parameters that it is asked for, each once, whole or in parts, in any order and dtype.
        shapes: of every parameter, by name, a tied one under its owner's alone.
        describe: writes the configuration and the tokenizer into a folder; and raises if the weights there, which it
            finds written, are not the model's.
        source: what is exported, and how; an interrupted export of the same is gone on with. None: begin anew.
    """
    draft = out.with_name(out.name + ".tmp")
    marker = draft / SOURCE
    if source is None or not marker.is_file() or marker.read_text() != source:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        marker.write_text(source or "")
    with SafetensorsWriter(draft, shapes, dtype, max_shard_size) as writer:
        for item in tensors(writer.missing):
            writer.write(*item)
    describe(draft)
    _set_dtype(draft / "config.json", dtype)
    marker.unlink()
    for path in [*draft.iterdir(), draft]:
        publish.sync(path)
    _replace(out, draft)


def describe(
    folder: Path,
    fresh: "PreTrainedModel",
    config: "PretrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    generation: "GenerationConfig",
) -> None:
    """Write what a model's folder holds beside its weights, of a model like `fresh`."""
    described = copy.deepcopy(config)
    described.use_cache, described.architectures = True, [type(fresh).__name__]
    described.pad_token_id, described.eos_token_id = generation.pad_token_id, generation.eos_token_id
    described.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation.save_pretrained(folder)


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    values = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    values.pop("torch_dtype", None)  # transformers 4's name of it
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _replace(out: Path, draft: Path) -> None:
    """Put `draft` in the place of `out`, which is moved aside first, so that there is a whole export at every
    moment, under one name or the other."""
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    draft.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Take part in the gathers that are left."""
    for _ in tensors:
        pass
