"""What this rank holds of model and optimizer, as pieces of whole tensors, for checkpoints of any number of ranks.

A piece is memory that the model or the optimizer uses: nothing is gathered to save it, and loading fills it in place.
Accelerate 1.15's loader asks a fresh FSDP1 optimizer for its state, gets none, and so loads none without a word
(`accelerate.utils.fsdp_utils.load_fsdp_optimizer`).

Names and shapes are the unwrapped model's: FSDP1 and FSDP2 read each other's checkpoints.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recipe.checkpoint.shards import Piece, flat_pieces
from recipe.sharding.gather import clean_name, local_part
from recipe.sharding.quantized import MOMENTS, LocalShardOptimizer


class ShardMap:
    """Which part of each parameter this rank holds. Collective.

    Args:
        model: sharded by FSDP1 (with original parameters) or FSDP2; its parameters are their shards, as they are
            between two steps.
        shapes: of the unwrapped model's parameters, by name.

    Raises:
        RuntimeError: the shards of FSDP1's ranks do not make up a parameter.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, torch.Size]):
        self.shapes = shapes
        self.parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
        self.starts = _flat_starts(model, self.parameters, shapes) if isinstance(model, FSDP) else {}

    def pieces(self, path: tuple[str, ...], name: str, local: torch.Tensor) -> Iterator[Piece]:
        """`local`, sharded as the parameter `name` is, as pieces of the tensor at `path`."""
        shape, parameter = self.shapes[name], self.parameters[name]
        if name in self.starts:
            yield from flat_pieces(path, shape, self.starts[name], local.view(-1))
        elif local.numel():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            _, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
            yield Piece(path, shape, tuple(offsets), local)


def _flat_starts(
    model: FSDP, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]
) -> dict[str, int]:
    """The element of each parameter at which this rank's shard of it begins: FSDP1 cuts a unit, laid out flat, into as
    many parts as there are ranks."""
    mine = {name: parameter.numel() for name, parameter in parameters.items()}
    if model.sharding_strategy == ShardingStrategy.NO_SHARD:
        return dict.fromkeys(mine, 0)
    group = model.process_group
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for name in mine:
        held, whole = sum(one[name] for one in everyone), shapes[name].numel()
        if held != whole:
            raise RuntimeError(f"the ranks' shards of {name} have {held:,} elements and the parameter has {whole:,}")
    before = everyone[: dist.get_rank(group)]
    return {name: sum(one[name] for one in before) for name in mine}


def model_pieces(shards: ShardMap) -> list[Piece]:
    return [
        piece
        for name, parameter in shards.parameters.items()
        for piece in shards.pieces(("model", name), name, local_part(parameter))
    ]


State = dict[str, torch.Tensor]  # {"step": how many a parameter has taken, "exp_avg": ..., "exp_avg_sq": ...}


def optimizer_pieces(shards: ShardMap, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Every parameter's moments, and how many steps it has taken."""
    states: Mapping[Any, State] = optimizer.state
    if isinstance(optimizer, LocalShardOptimizer):
        states = optimizer.dense()
    return [
        piece
        for name, parameter in shards.parameters.items()
        if parameter.requires_grad
        for piece in _state_pieces(shards, name, states.get(parameter) or _fresh_state(parameter, optimizer))
        if local_part(parameter).numel()  # some rank that holds a part of it says the rest
    ]


def load_optimizer(shards: ShardMap, optimizer: torch.optim.Optimizer, read: Callable[[list[Piece]], object]) -> None:
    """Give an optimizer that has not stepped the state of a checkpoint.

    Args:
        read: fills pieces from it.
    """
    if isinstance(optimizer, LocalShardOptimizer):
        states = optimizer.dense()
    else:
        states = {p: _fresh_state(p, optimizer) for p in shards.parameters.values() if p.requires_grad}
    names = {parameter: name for name, parameter in shards.parameters.items()}
    read([piece for parameter in states for piece in _state_pieces(shards, names[parameter], states[parameter])])
    if isinstance(optimizer, LocalShardOptimizer):
        optimizer.take_dense(states)
    else:
        for parameter, state in states.items():
            optimizer.state[parameter] = state


def _state_pieces(shards: ShardMap, name: str, state: State) -> Iterator[Piece]:
    path = ("optimizer", "state", name)
    for moment in MOMENTS:
        yield from shards.pieces((*path, moment), name, local_part(state[moment]))
    yield Piece((*path, "step"), torch.Size(), (), local_part(state["step"]))


def _fresh_state(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> State:
    """What torch's AdamW makes for a parameter at its first step (`torch.optim.Adam._init_group`)."""
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return {"step": step} | {m: torch.zeros_like(parameter, memory_format=torch.preserve_format) for m in MOMENTS}
