"""Rank 0 streams safetensors into FSDP, unit by unit, as it wraps: no rank ever holds the model.

The model is on meta on every rank. FSDP1 asks `StreamingLoader` for each module of a unit just before it flattens the
unit, so a rank holds its own shard and one unit; FSDP2 shards meta tensors, and the loader fills them one tensor at a
time. Rank 0 reads from a memory map, the others receive.
"""

import ctypes
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from recipe.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# RoPE's frequencies were saved in older Llama checkpoints (Meta's conversion of Llama-2 among them) and are computed
# today (transformers#22402 made the buffer non-persistent).
OBSOLETE_SUFFIXES = ("rotary_emb.inv_freq",)
TRIM_EVERY_BYTES = 256 << 20
MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries have none

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies, from a safetensors header."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class Weights:
    """The safetensors of one model folder: what is in them, read from the headers, and one tensor at a time.

    Raises:
        UserError: no safetensors, a shard that the index names is missing, or a file shorter than its header says.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        problems: list[str] = []
        for path in self._paths():
            try:
                self.entries.update(read_header(path))
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*problems)
        self._open: dict[Path, safe_open] = {}

    def _paths(self) -> list[Path]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file():
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{index} is no index of safetensors files; fetch the model again") from None
            return [self.folder / name for name in sorted(names)]
        if single.is_file():
            return [single]
        pickled = sorted(p.name for p in self.folder.glob("*.bin"))
        if pickled:
            raise UserError(
                f"{self.folder} holds pickled weights ({pickled[0]}) and no safetensors; convert it once with "
                f"`AutoModelForCausalLM.from_pretrained('{self.folder}').save_pretrained('OUT')` and set "
                "model_name_or_path: OUT"
            )
        raise UserError(f"{self.folder} holds neither {SINGLE} nor {INDEX}; set model_name_or_path to a model's folder")

    def problems(self, model: nn.Module) -> list[str]:
        """Everything that differs between the files and `model`: missing, unexpected and wrongly shaped tensors."""
        expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
        tied = set(tied_names(model))
        missing = sorted(expected.keys() - self.entries.keys() - tied)
        unexpected = sorted(n for n in self.entries.keys() - expected.keys() if not n.endswith(OBSOLETE_SUFFIXES))
        found = []
        if missing:
            found.append(f"{self.folder} lacks {len(missing)} tensors of the model: {', '.join(missing)}")
        if unexpected:
            found.append(f"{self.folder} has {len(unexpected)} tensors that the model lacks: {', '.join(unexpected)}")
        for name in sorted(expected.keys() & self.entries.keys()):
            entry = self.entries[name]
            if entry.shape != expected[name]:
                found.append(
                    f"{name} is {list(entry.shape)} in {entry.path.name}, and {list(expected[name])} by config.json"
                )
            if entry.dtype not in _DTYPES:
                found.append(f"{name} is {entry.dtype} in {entry.path.name}; one of {', '.join(_DTYPES)} can be loaded")
        return found

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.entries[name].dtype]

    def read(self, name: str) -> torch.Tensor:
        """One tensor in the file's dtype, on the CPU, backed by the memory map (no anonymous memory)."""
        path = self.entries[name].path
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_tensor(name)

    def close(self) -> None:
        self._open.clear()


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, and whether the file is as long as its header says.

    Raises:
        UserError: the file is missing, truncated, or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = path.stat().st_size
            header = json.loads(file.read(length)) if length < size else None
    except FileNotFoundError:
        raise UserError(f"{path} is named by {INDEX} and missing; fetch the model again") from None
    except (struct.error, ValueError):
        header = None
    if header is None:
        raise UserError(f"{path} is no complete safetensors file (its header cannot be read); fetch the model again")
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise UserError(f"{path} has {size:,} bytes and its header says {end:,}; fetch the model again")
    return {name: TensorEntry(path, e["dtype"], tuple(e["shape"])) for name, e in header.items()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameters that share another's memory, as {name: name of the one that owns it}; {} for an untied model."""
    owners: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


class StreamingLoader:
    """Gives meta parameters their memory and values. Called in the same order on every rank: each call is collective.

    Args:
        model: the whole model on meta, before FSDP wraps it; the names in the files are its names.
        weights: the files on rank 0, None on the other ranks. `None` on every rank leaves the memory uninitialised,
            for a checkpoint that is loaded next.
        dtype: master dtype; each tensor is cast to it on its own.
        broadcast: whether this loader sends rank 0's values to the other ranks; False where FSDP does
            (FSDP1 on a GPU, `sync_module_states`).
        on_tensor: called with the name of each tensor before it is loaded.

    Raises:
        UserError: on all ranks, before anything is sent: files and model differ (`Weights.problems`).
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Weights | None,
        dtype: torch.dtype,
        broadcast: bool,
        on_tensor: Callable[[str], object] = lambda name: None,
    ):
        self.weights, self.dtype, self.broadcast, self.on_tensor = weights, dtype, broadcast, on_tensor
        # By identity, since FSDP renames modules as it wraps. A tied parameter goes by its owner's name, and is the
        # only kind kept after it is loaded. The parameter itself is kept so that its id stays its own.
        self._names = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        owners = dict(model.named_parameters())
        self._tied: dict[int, nn.Parameter | None] = {id(owners[owner]): None for owner in tied_names(model).values()}
        self._freed = 0
        plan: list[Any] = [None, None]
        if dist.get_rank() == 0 and weights is not None:
            plan = [weights.problems(model), {n: weights.dtype(n) for n in weights.entries}]
        dist.broadcast_object_list(plan, src=0)
        if plan[0]:
            raise UserError(*plan[0])
        self.file_dtypes: dict[str, torch.dtype] | None = plan[1]

    def materialize(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Replace `module`'s own meta parameters by real ones on `device`. FSDP1's `param_init_fn`; returns the
        module."""
        for key, meta in list(module.named_parameters(recurse=False)):
            if meta.is_meta:
                module.register_parameter(key, self._parameter(meta, device))
        return module

    def _parameter(self, meta: nn.Parameter, device: torch.device) -> nn.Parameter:
        parameter = self._tied.get(id(meta))
        if parameter is None:
            value = self.full(self._names[id(meta)][0], meta.shape, device).to(self.dtype)
            parameter = nn.Parameter(value, requires_grad=meta.requires_grad)
            if id(meta) in self._tied:
                self._tied[id(meta)] = parameter
        return parameter

    def full(self, name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """The whole tensor `name` on `device`, in the file's dtype: the file's values on rank 0, and on every rank if
        this loader broadcasts."""
        self.on_tensor(name)
        self._return_freed_memory(shape.numel() * self.dtype.itemsize)
        if self.file_dtypes is None:
            return torch.empty(shape, dtype=self.dtype, device=device)
        if self.weights is not None:
            tensor = self._read(name).to(device)
        elif self.broadcast:
            tensor = torch.empty(shape, dtype=self.file_dtypes[name], device=device)
        else:
            return torch.empty(shape, dtype=self.dtype, device=device)
        if self.broadcast:
            dist.broadcast(tensor, src=0)
        return tensor

    def _return_freed_memory(self, nbytes: int) -> None:
        """Give what was freed back to the system now and then: glibc keeps blocks below 32 MB, most of a layer's
        tensors, in its heap, which grew by a fifth of a unit with every unit (2.1 GiB at 1.3 B parameters)."""
        self._freed += nbytes
        if self._freed > TRIM_EVERY_BYTES and MALLOC_TRIM is not None:
            MALLOC_TRIM(0)
            self._freed = 0

    def _read(self, name: str) -> torch.Tensor:
        assert self.weights is not None
        try:
            return self.weights.read(name)
        except SafetensorError as error:
            raise UserError(f"{self.weights.entries[name].path}: {error}; fetch the model again") from None

    def release(self) -> None:
        """Drop every reference to parameters and files, once the model is wrapped."""
        self._tied.clear()
        self._names.clear()
        if self.weights is not None:
            self.weights.close()
