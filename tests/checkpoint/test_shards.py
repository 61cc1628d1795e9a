import itertools
import math
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from recipe import ranks
from recipe.checkpoint.manifest import describe_files, list_files
from recipe.checkpoint.shards import METADATA, Piece, Reader, agree, finish, flat_pieces, write
from tests.distributed.ranks import run_ranks

# -- rectangles --------------------------------------------------------------------------------------------------------

SHAPES = [(), (1,), (5,), (3, 4), (1, 6), (6, 1), (2, 3, 4), (3, 1, 2), (1, 1, 3), (2, 2, 3, 2), (2, 1, 2, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_tile_any_run_of_elements_in_order(shape):
    size = math.prod(shape)
    whole = torch.arange(size).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        flat = torch.arange(start, stop)
        pieces = list(flat_pieces(("a", "b"), whole.shape, start, flat))
        for piece in pieces:
            assert torch.equal(whole[box(piece)], piece.data), (start, stop, piece.offsets)
            assert piece.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr(), "reading fills it"
        in_order = torch.cat([piece.data.flatten() for piece in pieces]) if pieces else flat
        assert torch.equal(in_order, flat)
        assert len(pieces) <= max(1, 2 * len(shape) - 1), "few"
        assert all(piece.path == ("a", "b") and piece.shape == whole.shape for piece in pieces)


def box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.data.shape, strict=True))


# -- writing, by several ranks -----------------------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"weight": (7, 5), "cube": (3, 4, 5), "bias": (2,), "norm": (64, 33)}
    found = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return found | {"norm": found["norm"].bfloat16(), "step": torch.tensor(7.0), "shared": torch.arange(1000.0)}


REPLICATED = ("step", "shared")


def pieces_of(whole: dict[str, torch.Tensor], rank: int, world_size: int) -> list[Piece]:
    """What a rank holds: a part of each tensor laid out flat, as FSDP1 cuts it, and all of some."""
    pieces = []
    for name, tensor in whole.items():
        parts = 1 if name in REPLICATED else world_size
        size = -(-tensor.numel() // parts)
        start = min(rank % parts * size, tensor.numel())
        flat = tensor.flatten()[start : start + size]
        pieces += list(flat_pieces(("model", name), tensor.shape, start, flat))
    return pieces


def write_all(folder: Path, pieces: list[Piece]) -> dict[str, Any]:
    """Write what all ranks hold, and say what this one wrote. Collective."""
    layout = agree(pieces)
    written = write(folder, layout, {piece.index: piece.data for piece in pieces})
    items = ranks.gather(written.items)
    if ranks.is_main():
        finish(folder, layout, items)
    return {"files": written.files, "names": [item.index.fqn for item in layout.mine.items]}


def span(start: int, stop: int, shape: tuple[int, ...] = (10,)) -> Piece:
    return Piece(("model", "bias"), torch.Size(shape), (start,), torch.zeros(stop - start))


# What two ranks say they hold of a tensor of ten elements.
DISAGREEMENTS = {
    "a gap": ([span(0, 4)], [span(5, 10)]),
    "an overlap": ([span(0, 6)], [span(5, 10)]),
    "too few": ([span(0, 6)], []),
    "past the end": ([span(0, 6)], [span(6, 11)]),
    "another shape": ([span(0, 5, (12,))], [span(5, 10)]),
}


def refusal(pieces: list[Piece]) -> str:
    try:
        agree(pieces)
    except RuntimeError as error:
        return str(error)
    return "agreed"


def write_and_disagree(folder: Path) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    said = write_all(folder, pieces_of(tensors(), rank, world_size))
    if world_size == 1:
        said["refusals"] = {"too few": refusal(DISAGREEMENTS["too few"][0])}
    if world_size == 2:
        said["refusals"] = {name: refusal(held[rank]) for name, held in DISAGREEMENTS.items()}
    return said


Written = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.slow)], ids="written by {}".format)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A folder that so many ranks wrote, and what each of them said."""
    folder = tmp_path_factory.mktemp("shards") / "model"
    return folder, run_ranks(write_and_disagree, folder, world_size=request.param)


def test_sums_are_those_of_the_files(written: Written):
    folder, said = written
    files = {name: entry for one in said for name, entry in one["files"].items()}
    assert list_files(folder) == sorted([METADATA, *files]), "one file a rank, or more"
    assert describe_files(folder, files) == files


def test_what_several_ranks_hold_one_writes(written: Written):
    _, said = written
    names = [name for one in said for name in one["names"]]
    assert [names.count(f"model.{name}") for name in REPLICATED] == [1, 1]
    assert len(said) == 1 or all(one["names"] for one in said)


def test_stock_torch_reads_it(written: Written, tmp_path: Path):
    """And puts each tensor where its path says."""
    folder, _ = written
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert found.keys() == {"model"} and same(found["model"], tensors())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def blank(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, math.nan) for name, tensor in whole.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 64])
def test_any_number_of_ranks_reads_it(world_size: int, written: Written):
    """Each fills its own parts, and nothing beside them."""
    folder, _ = written
    target = blank(tensors())
    seen: list[str] = []
    for rank in range(world_size):
        before = {name: tensor.clone() for name, tensor in target.items()}
        mine = pieces_of(target, rank, world_size)
        Reader(folder).read(mine, lambda piece: seen.append(piece.path[-1]))
        for piece in mine:
            before[piece.path[-1]][box(piece)] = piece.data
        assert all(torch.equal(before[name].nan_to_num(), target[name].nan_to_num()) for name in target)
    assert same(target, tensors())
    assert set(seen) == set(tensors())


def test_pieces_that_do_not_make_up_a_tensor_are_refused_on_every_rank(written: Written):
    _, said = written
    expected = {1: ["too few"], 2: list(DISAGREEMENTS), 3: []}[len(said)]
    for one in said:
        refused = {name: text.split(" failed")[0] for name, text in one.get("refusals", {}).items()}
        assert refused == dict.fromkeys(expected, "planning a checkpoint")


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A folder that torch wrote."""
    dcp.save({"model": tensors(), "epoch": 3}, checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


def test_what_stock_torch_wrote_is_read(stock: Path):
    target = blank(tensors())
    reader = Reader(stock)
    reader.read(pieces_of(target, 0, 1))
    assert same(target, tensors())
    assert reader.shapes() == {f"model.{name}": (t.shape, t.dtype) for name, t in tensors().items()}


def test_every_tensor_that_is_missing_or_of_another_shape_is_named(stock: Path):
    asked = tensors() | {"weight": torch.full((7, 6), -1.0), "extra": torch.full((2,), -1.0)}
    with pytest.raises(ValueError) as caught:
        Reader(stock).read(pieces_of(asked, 0, 1))
    assert str(caught.value) == (
        f"{stock}: 2 tensors do not fit: model.weight is [7, 5] in it and [7, 6] in the model; model.extra is not in it"
    )
    assert asked["weight"].eq(-1).all(), "nothing was read"


def test_a_tensor_of_which_parts_are_not_in_it(stock: Path):
    reader = Reader(stock)
    reader.metadata.state_dict_metadata["model.cube"].chunks[0].sizes = torch.Size((3, 4, 4))
    with pytest.raises(ValueError, match=r"its parts of model\.cube do not make up the whole"):
        reader.read(pieces_of(tensors(), 0, 1))


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 100)], ids=["missing", "cut off"])
def test_files_that_cannot_be_read_raise(spoil, stock: Path):
    for path in stock.glob("*.distcp"):
        spoil(path)
    with pytest.raises((OSError, EOFError, RuntimeError, UnpicklingError)):
        Reader(stock).read(pieces_of(tensors(), 0, 1))


@pytest.mark.parametrize(("spoil", "why"), [(Path.unlink, "is missing"), (lambda p: os.truncate(p, 50), "cannot be")])
def test_a_folder_without_usable_metadata_is_not_opened(spoil, why, stock: Path):
    spoil(stock / METADATA)
    with pytest.raises(ValueError, match=why):
        Reader(stock)
