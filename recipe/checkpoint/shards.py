"""The sharded files of a checkpoint: the format of torch's distributed checkpoint (DCP), under Accelerate's names.

A rank says what it holds as `Piece`s: rectangles of tensors, as they lie in its memory. Writing them gathers nothing,
and reading fills them in place from the files of any number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from recipe import ranks
from recipe.checkpoint.unpickle import read_metadata

# Accelerate's names, so that stock tools (`accelerate merge-weights`) read these checkpoints.
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
METADATA = ".metadata"


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, in this rank's memory.

    Attributes:
        path: where the tensor is in the state dict, such as ("model", "lm_head.weight").
        shape: of the whole tensor.
        offsets: of the rectangle in it; its sizes are those of `data`.
        data: reading writes into it.
    """

    path: tuple[str, ...]
    shape: torch.Size
    offsets: tuple[int, ...]
    data: torch.Tensor

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(".".join(self.path), self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.data.shape)


_Rectangle = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, sizes, first element


def flat_pieces(path: tuple[str, ...], shape: torch.Size, start: int, flat: torch.Tensor) -> Iterator[Piece]:
    """The elements `flat` [n], which begin at element `start` of a tensor of `shape` in row-major order, as rectangles:
    at most a part of a row, whole rows, and a part of a row, for each dimension."""
    for offsets, sizes, begin in _rectangles(tuple(shape), start, start + flat.numel()):
        data = flat[begin - start : begin - start + math.prod(sizes)].view(sizes)
        yield Piece(path, shape, offsets, data)


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[_Rectangle]:
    """Rectangles that make up the elements [start, stop) of a tensor of `shape`."""
    if start == stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,), start) if shape else ((), (), 0)
        return
    row = math.prod(shape[1:])
    whole = range(-(-start // row), stop // row)
    if len(whole):
        head, tail = (start, whole.start * row), (whole.stop * row, stop)
    else:  # no whole row: parts of one, or of two beside each other
        middle = min(whole.start * row, stop)
        head, tail = (start, middle), (middle, stop)
    yield from _part_of_row(shape, row, *head)
    if len(whole):
        yield (whole.start, *(0,) * (len(shape) - 1)), (len(whole), *shape[1:]), whole.start * row
    yield from _part_of_row(shape, row, *tail)


def _part_of_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[_Rectangle]:
    number = start // row
    for offsets, sizes, begin in _rectangles(shape[1:], start - number * row, stop - number * row):
        yield (number, *offsets), (1, *sizes), number * row + begin


# -- writing -------------------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """Which rank writes what, agreed once for all saves of a run.

    Attributes:
        mine: this rank's plan.
        plans: every rank's, on rank 0; None elsewhere.
        metadata: what the files hold, on rank 0.
    """

    mine: SavePlan
    plans: list[SavePlan] | None
    metadata: Metadata | None


def agree(pieces: Sequence[Piece]) -> Layout:
    """Gather what every rank holds; of what several hold, one writes it. Collective.

    Raises:
        RuntimeError: on every rank: the pieces of all ranks do not make up every tensor exactly once.
    """
    items = [
        WriteItem(
            piece.index,
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(piece.chunk, TensorProperties.create_from_tensor(piece.data), piece.shape),
        )
        for piece in pieces
    ]
    mine = SavePlan(items, planner_data={piece.index.fqn: piece.path for piece in pieces})
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, gathered if ranks.is_main() else None)
    plans, metadata = None, None
    with ranks.all_or_none("planning a checkpoint"):
        if ranks.is_main():
            plans, metadata = DefaultSavePlanner().create_global_plan(gathered)
            for name, described in metadata.state_dict_metadata.items():  # torch does not look where one rank saves
                assert isinstance(described, TensorStorageMetadata), "pieces are of tensors"
                if sum(math.prod(chunk.sizes) for chunk in described.chunks) != described.size.numel():
                    raise ValueError(f"the pieces of {name} do not make up the whole")
            plans = dcp.FileSystemWriter(".").prepare_global_plan(plans)
    box: list[Any] = [None]
    dist.scatter_object_list(box, plans)
    return Layout(box[0], plans, metadata)


@dataclass
class Written:
    """What a rank wrote, in JSON's types: {file relative to the folder: size and checksum}, and where each item of its
    plan lies, as [file, offset, length] (bytes)."""

    files: dict[str, dict[str, Any]]
    items: list[list[Any]]


def write(
    folder: Path,
    layout: Layout,
    data: Mapping[MetadataIndex, torch.Tensor],
    on_item: Callable[[], object] = lambda: None,
) -> Written:
    """Write this rank's part of a tensor set into `folder`, sum it on the way, and sync it. Not collective.

    Args:
        data: the pieces' data by `Piece.index`, on any device.
        on_item: called before each is written.

    Raises:
        OSError: such as a full disk.
    """
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    writer.fs = _SummingFileSystem()
    writer.fs.mkdir(folder)
    planner = DefaultSavePlanner()

    def lookup(index: MetadataIndex) -> torch.Tensor:
        on_item()
        return data[index]

    planner.lookup_object = lookup  # type: ignore[method-assign]
    results = {result.index: result.storage_data for result in writer.write_data(layout.mine, planner).wait()}
    places = [results[item.index] for item in layout.mine.items]
    items = [[place.relative_path, place.offset, place.length] for place in places]
    return Written({path.name: summed for path, summed in writer.fs.sums.items()}, items)


def finish(folder: Path, layout: Layout, items_of_ranks: Sequence[list[list[Any]]]) -> None:
    """Write what says where everything lies, once every rank has written. On rank 0."""
    assert layout.plans is not None and layout.metadata is not None, "rank 0 knows"
    results = [
        [
            WriteResult(item.index, length, _StorageInfo(file, offset, length))
            for item, (file, offset, length) in zip(plan.items, items, strict=True)
        ]
        for plan, items in zip(layout.plans, items_of_ranks, strict=True)
    ]
    dcp.FileSystemWriter(folder, sync_files=True).finish(layout.metadata, results)


_SUM_BYTES = 1 << 18  # summed and then written from the processor's cache


class _SummingFile:
    """A file that is written from its beginning to its end, and summed on the way."""

    def __init__(self, raw: IO[bytes]):
        self.raw, self.size, self.digest = raw, 0, xxhash.xxh3_64()
        self.tell, self.flush, self.fileno, self.close = raw.tell, raw.flush, raw.fileno, raw.close

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _SUM_BYTES):
            block = view[begin : begin + _SUM_BYTES]
            self.digest.update(block)
            self.raw.write(block)
        self.size += len(view)
        return len(view)


class _SummingFileSystem(FileSystem):
    """DCP's, which keeps the size and checksum of every file that was written through it."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[Path, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as raw:
            file = _SummingFile(raw)  # type: ignore[arg-type]
            yield file
            self.sums[Path(path)] = {"size": file.size, "xxh3_64": file.digest.hexdigest()}


# -- reading -------------------------------------------------------------------------------------------------------


class Reader(dcp.FileSystemReader):
    """One folder of sharded files, read without unpickling anything that could run code.

    Raises:
        ValueError: its metadata is missing, cut off, or names what no checkpoint needs.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.metadata: Metadata = read_metadata(folder / METADATA)
        self.set_up_storage_reader(self.metadata, is_coordinator=False)

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every tensor, by its name in the state dict (`Piece.index.fqn`)."""
        found = self.metadata.state_dict_metadata.items()
        return {name: (md.size, md.properties.dtype) for name, md in found if isinstance(md, TensorStorageMetadata)}

    def read(self, pieces: Sequence[Piece], on_piece: Callable[[Piece], object] = lambda piece: None) -> None:
        """Fill `pieces` from the files, whatever number of ranks wrote them.

        Raises:
            ValueError: tensors that the files lack, or have in another shape (all of them, by name).
            OSError, EOFError, RuntimeError, UnpicklingError: the files cannot be read.
        """
        known = self.shapes()
        problems = []
        for piece in {piece.index.fqn: piece for piece in pieces}.values():
            name = piece.index.fqn
            if name not in known:
                problems.append(f"{name} is not in it")
            elif known[name][0] != piece.shape:
                problems.append(f"{name} is {list(known[name][0])} in it and {list(piece.shape)} in the model")
        if problems:
            raise ValueError(f"{self.path}: {len(problems)} tensors do not fit: {'; '.join(problems[:10])}")
        items: list[ReadItem] = []
        for piece in pieces:
            described = self.metadata.state_dict_metadata[piece.index.fqn]
            assert isinstance(described, TensorStorageMetadata), "it has a shape"
            found = create_read_items_for_chunk_list(piece.index.fqn, described, [piece.chunk])
            if sum(math.prod(item.lengths) for item in found) != piece.data.numel():
                raise ValueError(f"{self.path}: its parts of {piece.index.fqn} do not make up the whole")
            items += found
        planner = DefaultLoadPlanner()
        targets = {piece.index: piece for piece in pieces}

        def lookup(index: MetadataIndex) -> torch.Tensor:
            on_piece(targets[index])
            return targets[index].data

        planner.lookup_tensor = lookup  # type: ignore[method-assign]
        self.read_data(LoadPlan(items), planner)
