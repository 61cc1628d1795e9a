"""The trained model as a Hugging Face folder: whole weights, streamed unit by unit into sharded safetensors.

This is the one place where the state-dict type is FULL_STATE_DICT. All ranks take part in gathering a unit; rank 0
writes each tensor to the place in its file that was planned for it, so no rank ever holds more than one unit.
"""

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipe.loading import INDEX, Weights, tied_names

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PATTERN = "model{suffix}.safetensors"


class SafetensorsWriter:
    """Sharded safetensors, written tensor by tensor in any order. (The library's own writer wants a whole file in
    memory.) One tensor is on its way to the disk while the next is gathered.

    Args:
        folder: where the files go; it exists.
        shapes: every tensor that will come, by name, on meta.
        dtype: of all of them.
        max_shard_size: largest file, such as "5GB".

    Raises:
        KeyError: a tensor that was not announced.
        ValueError: a tensor of another shape; on `close`, tensors that never came.
    """

    def __init__(self, folder: Path, shapes: dict[str, torch.Tensor], dtype: torch.dtype, max_shard_size: str):
        self.folder, self.dtype = folder, dtype
        self.plan = split_state_dict_into_shards_factory(
            shapes,
            get_storage_size=lambda t: t.numel() * dtype.itemsize,
            filename_pattern=PATTERN,
            max_shard_size=max_shard_size,
        )
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._files: dict[str, BinaryIO] = {}
        self._places: dict[str, tuple[str, int, torch.Size]] = {}
        for filename, names in self.plan.filename_to_tensors.items():
            self._begin(filename, {name: shapes[name] for name in names})

    def _begin(self, filename: str, shapes: dict[str, torch.Tensor]) -> None:
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in shapes.items():
            begin, end = end, end + tensor.numel() * self.dtype.itemsize
            header[name] = {"dtype": _NAMES[self.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = (self.folder / filename).open("wb")
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in shapes.items():
            self._places[name] = (filename, 8 + len(text) + header[name]["data_offsets"][0], tensor.shape)
        file.truncate(8 + len(text) + end)
        self._files[filename] = file

    def write(self, name: str, tensor: torch.Tensor) -> None:
        filename, offset, shape = self._places.pop(name)
        if tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)} and was announced as {list(shape)}")
        # A copy: FSDP frees a unit by resizing its storage, which torch refuses once numpy has seen it.
        data = tensor.detach().to("cpu", self.dtype, copy=True).contiguous().view(-1).view(torch.uint8)
        self._wait()
        self._writing = self._disk.submit(_write_at, self._files[filename], offset, data)

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
            file.close()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()


def _write_at(file: BinaryIO, offset: int, data: torch.Tensor) -> None:
    file.seek(offset)
    file.write(data.numpy().data)


def export_shapes(model: nn.Module) -> dict[str, torch.Tensor]:
    """What an export of the unwrapped `model` (on meta) holds: its state dict, a tied tensor under its owner's name
    alone."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def write_export(
    out: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    fresh: PreTrainedModel,
    dtype: torch.dtype,
    max_shard_size: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
) -> None:
    """Write a Hugging Face folder at `out`, replacing one that is there; weights first, then what describes them.

    Args:
        tensors: every parameter once, whole, in any order and dtype.
        fresh: the model on meta, unwrapped, that the export has to load into with nothing missing or left over.

    Raises:
        RuntimeError: the written files do not match `fresh`.
    """
    draft = out.with_name(out.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with SafetensorsWriter(draft, export_shapes(fresh), dtype, max_shard_size) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)
    described = copy.deepcopy(config)
    described.dtype, described.use_cache, described.architectures = dtype, True, [type(fresh).__name__]
    described.pad_token_id = generation.pad_token_id
    described.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    generation.save_pretrained(draft)
    found = Weights(draft).problems(fresh)
    if found:
        raise RuntimeError("the export does not match the model: " + "; ".join(found))
    _replace(out, draft)


def _replace(out: Path, draft: Path) -> None:
    """Put `draft` in the place of `out`, which is moved aside first, so that there is a whole export at every
    moment."""
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
