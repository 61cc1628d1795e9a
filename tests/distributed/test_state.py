"""Model and optimizer through checkpoints: between FSDP1 and FSDP2, every way to shard, and any number of ranks."""

import math
import os
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from recipe.checkpoint.shards import MODEL, OPTIMIZER, Piece, Reader
from recipe.model import load_config, meta_model
from recipe.sharding import gather, state
from tests.checkpoint.test_shards import box, write_all
from tests.distributed.ranks import run_ranks
from tests.distributed.test_loading import wrapped

LAYOUTS = {
    "FULL_SHARD, 1 rank": ("1", "FULL_SHARD", 1),
    "FULL_SHARD, 2 ranks": ("1", "FULL_SHARD", 2),
    "FULL_SHARD, 3 ranks": ("1", "FULL_SHARD", 3),
    "SHARD_GRAD_OP, 2 ranks": ("1", "SHARD_GRAD_OP", 2),
    "NO_SHARD, 2 ranks": ("1", "NO_SHARD", 2),
    "FSDP2, 1 rank": ("2", "", 1),
    "FSDP2, 2 ranks": ("2", "", 2),
    "FSDP2, 3 ranks": ("2", "", 3),
}
IDLE = "lm_head.weight"  # never has a gradient


def on(layout: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    version, strategy, world_size = LAYOUTS[layout]
    return run_ranks(with_strategy, strategy, function, *args, world_size=world_size, version=version)


def with_strategy(strategy: str, function: Callable[..., Any], *args: Any) -> Any:
    if strategy:
        os.environ["FSDP_SHARDING_STRATEGY"] = strategy
    return function(*args)


def sharded(folder: Path) -> tuple[nn.Module, state.ShardMap]:
    _, model = wrapped(folder)
    shapes = {name: p.shape for name, p in meta_model(load_config(folder), None, torch.float32).named_parameters()}
    return model, state.ShardMap(model, shapes)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(folder: Path, shard_map: state.ShardMap, optimizer: torch.optim.Optimizer) -> None:
    write_all(folder / MODEL, state.model_pieces(shard_map))
    write_all(folder / OPTIMIZER, state.optimizer_pieces(shard_map, optimizer))


def train(folder: Path, out: Path) -> None:
    model, shard_map = sharded(folder)
    optimizer = optimizer_of(model)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ids = torch.randint(300, (2, 16), generator=draw)
        model(input_ids=ids, output_hidden_states=True).hidden_states[-1].pow(3).sum().backward()
        shard_map.parameters[IDLE].grad = None  # FSDP1 makes zeros
        optimizer.step()
        optimizer.zero_grad()
    save(out, shard_map, optimizer)


def plain(piece: Piece) -> tuple[Any, ...]:
    return piece.path, tuple(piece.shape), piece.offsets, piece.data.clone().numpy()


def load_and_save(folder: Path, sources: list[Path], outs: list[Path]) -> dict[str, Any]:
    """Load each source and save it anew; returns what this rank holds of the last, and its whole parameters."""
    model, shard_map = sharded(folder)
    for source, out in zip(sources, outs, strict=True):
        optimizer = optimizer_of(model)
        for parameter in model.parameters():
            gather.local_part(parameter).fill_(math.nan)
        Reader(source / MODEL).read(state.model_pieces(shard_map))
        state.load_optimizer(shard_map, optimizer, partial(read, source / OPTIMIZER))
        optimizer.zero_grad()
        save(out, shard_map, optimizer)
    return {
        "model": [plain(piece) for piece in state.model_pieces(shard_map)],
        "optimizer": [plain(piece) for piece in state.optimizer_pieces(shard_map, optimizer)],
        "whole": {name: tensor.clone().numpy() for name, tensor in gather.full_parameters(model)},
        "stateless": [name for name, p in shard_map.parameters.items() if p not in optimizer.state],
    }


def read(folder: Path, pieces: list[Piece]) -> None:
    Reader(folder).read(pieces)


@cache
def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, as stock torch reads it."""
    found = {}
    for name in (MODEL, OPTIMIZER):
        dcp_to_torch_save(folder / name, folder / f"{name}.pt")
        found |= flattened(torch.load(folder / f"{name}.pt", weights_only=True))
    return found


def flattened(nested: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for key, value in nested.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of FSDP1 on two ranks and of FSDP2 on three, after three steps."""
    folders = []
    for layout in ("FULL_SHARD, 2 ranks", "FSDP2, 3 ranks"):
        folders.append(tmp_path_factory.mktemp("trained"))
        on(layout, train, tiny_model, folders[-1])
    return folders


@pytest.fixture(scope="module", params=LAYOUTS)
def loaded(
    request: pytest.FixtureRequest, tiny_model: Path, trained: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], list[Path]]:
    """What the ranks of each layout made of them: what they hold, and where they saved it anew."""
    outs = [tmp_path_factory.mktemp("anew") for _ in trained]
    return on(request.param, load_and_save, tiny_model, trained, outs), outs


@pytest.mark.slow
def test_what_one_layout_wrote_another_loads_bit_for_bit(loaded: Any, trained: list[Path]) -> None:
    """R2, R8: FSDP1 to FSDP2 and back, parameters, moments and step counts."""
    _, outs = loaded
    for source, out in zip(trained, outs, strict=True):
        before, after = whole(source), whole(out)
        assert before.keys() == after.keys() and len(before) == 4 * len([n for n in before if n.startswith("model.")])
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
            assert tensor.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["FSDP1", "FSDP2"])
def test_a_parameter_that_never_had_a_gradient_has_no_moments(number: int, trained: list[Path]) -> None:
    """And is loaded and saved like any other."""
    found = whole(trained[number])
    for name, tensor in found.items():
        if name.startswith("optimizer.state."):
            assert bool(tensor.any()) is (IDLE not in name), name
            assert not name.endswith(".step") or tensor == (0 if IDLE in name else 3), name


@pytest.mark.slow
def test_the_pieces_of_all_ranks_tile_every_tensor(loaded: Any, trained: list[Path]) -> None:
    """Each element once, or (replicated) once on each rank; and they equal the whole parameters."""
    ranks, _ = loaded
    expected = {f"model.{name}": torch.from_numpy(tensor) for name, tensor in ranks[0]["whole"].items()}
    assert expected and all(torch.equal(tensor, whole(trained[1])[name]) for name, tensor in expected.items())
    for kind in ("model", "optimizer"):
        pieces = [
            Piece(path, torch.Size(shape), offsets, torch.from_numpy(data))
            for rank in ranks
            for path, shape, offsets, data in rank[kind]
        ]
        held = {piece.index: piece for piece in pieces}
        copies = Counter(piece.index for piece in pieces)
        counts: dict[str, torch.Tensor] = {}
        for index, piece in held.items():
            assert copies[index] in (1, len(ranks)) or piece.path[-1] == "step"
            counts.setdefault(index.fqn, torch.zeros(piece.shape, dtype=torch.int64))[box(piece)] += 1
            assert torch.equal(whole(trained[1])[index.fqn][box(piece)], piece.data)
        assert all(count.eq(1).all() for count in counts.values())
        kinds = ("exp_avg", "exp_avg_sq", "step") if kind == "optimizer" else ("",)
        assert len(counts) == len(expected) * len(kinds)
    assert all(rank["stateless"] == [] for rank in ranks), "every parameter has a state, also one of no elements here"
