"""bitsandbytes' optimizers under FSDP: they step on this rank's plain shard, and show dense moments to checkpoints.

bitsandbytes knows neither DTensors (FSDP2) nor FSDP's optimizer state dicts: its `step` is a Python int, and its 8-bit
state is codes with one scale for every 256 elements of the local shard, whose bounds move with the number of ranks
(bitsandbytes#1381, #782, accelerate#1362). In a checkpoint the moments are fp32 and shaped like their parameters, under
the names that torch's AdamW has, so any number of ranks can load them.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recipe.sharding.gather import local_part

if TYPE_CHECKING:  # bitsandbytes looks for its libraries when it is imported, and says so; most runs do not need it
    from bitsandbytes.optim.optimizer import Optimizer8bit

BLOCK_SIZE = 256  # elements that share a scale (bitsandbytes' Optimizer2State.init_state)
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}  # torch's names, and the suffix of bitsandbytes'


class LocalShardOptimizer(torch.optim.Optimizer):
    """Runs a bitsandbytes optimizer on the local shards of its parameters.

    Args:
        params: parameter groups, of plain tensors (FSDP1) or DTensors (FSDP2).
        inner: makes the bitsandbytes optimizer from parameter groups of plain tensors.
        lr: initial learning rate.

    Attributes:
        in_32_bits: parameters whose moments are never quantised; embeddings, whose gradients are sparse.
    """

    def __init__(self, params: Any, inner: Callable[[list[dict[str, Any]]], "Optimizer8bit"], lr: float):
        super().__init__(params, {"lr": lr})
        self.in_32_bits: list[nn.Parameter] = []
        self._make_inner = inner
        self._inner: Optimizer8bit | None = None
        self._local: dict[nn.Parameter, nn.Parameter] = {}

    @property
    def inner(self) -> "Optimizer8bit":
        """Made at its first use: until the model is wrapped, Accelerate exchanges the parameters in the groups."""
        if self._inner is None:
            self._local = {p: nn.Parameter(local_part(p)) for p in self._parameters() if local_part(p).numel()}
            groups = [
                {**group, "params": [self._local[p] for p in group["params"] if p in self._local]}
                for group in self.param_groups
            ]
            self._inner = self._make_inner(groups)
            kept = [self._local[p] for p in self.in_32_bits if p in self._local]
            self._inner.mng.register_parameters(groups)
            for local in kept:
                self._inner.mng.override_config(local, "optim_bits", 32)
            for group, own in zip(self._inner.param_groups, self.param_groups, strict=True):
                own.update({key: value for key, value in group.items() if key != "params"})
        return self._inner

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        inner = self.inner
        for group, own in zip(inner.param_groups, self.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
        for parameter, local in self._local.items():
            local.data = local_part(parameter)  # FSDP2 may have put the shard in other memory when it was first used
            local.grad = None if parameter.grad is None else local_part(parameter.grad)
        inner.step()
        for local in self._local.values():
            local.grad = None

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def dense(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """What a torch AdamW would have as the state of each parameter's local shard. 32-bit moments are not copied;
        others go to host memory, one at a time."""
        inner = self.inner
        dense: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for parameter in self._parameters():
            state = inner.state.get(self._local.get(parameter), {})
            dense[parameter] = {"step": torch.tensor(float(state.get("step", 0)))}
            for name, suffix in MOMENTS.items():
                shard = local_part(parameter)
                dense[parameter][name] = (
                    _dense(state, suffix) if state else torch.zeros_like(shard, dtype=torch.float32)
                )
        return dense

    @torch.no_grad()
    def take_dense(self, states: dict[nn.Parameter, dict[str, torch.Tensor]]) -> None:
        """Put moments that were loaded where bitsandbytes keeps them, in its own precision."""
        inner = self.inner
        indices = {id(p): (g, i) for g, group in enumerate(inner.param_groups) for i, p in enumerate(group["params"])}
        for parameter, local in self._local.items():
            g, i = indices[id(local)]
            inner.init_state(inner.param_groups[g], local, g, i)
            state, dense = inner.state[local], states[parameter]
            state["step"] = int(dense["step"])
            for name, suffix in MOMENTS.items():
                _store(state, suffix, dense[name])
        inner.initialized = True


def _dense(state: dict[str, Any], suffix: str) -> torch.Tensor:
    """A moment in fp32, such that quantising it again gives the same codes and scales.

    Quantising scales a block by its largest magnitude. There is a code for 1 and none for -1, so where that element
    was negative its code stands for less, and it is given back the scale, which is what it was.
    """
    codes = state[f"state{suffix}"]
    if codes.dtype != torch.uint8:
        return codes
    scales, table = state[f"absmax{suffix}"], state[f"qmap{suffix}"]
    from bitsandbytes.functional import dequantize_blockwise

    dense = dequantize_blockwise(codes, absmax=scales, code=table, blocksize=BLOCK_SIZE)
    blocks = _blocks(dense)
    lowest = blocks.argmin(dim=1, keepdim=True)
    rounded = blocks.amax(dim=1) < scales  # so the scale was a negative element's magnitude
    blocks.scatter_(1, lowest, torch.where(rounded, -scales, blocks.gather(1, lowest).squeeze(1)).unsqueeze(1))
    return blocks.view(-1)[: codes.numel()].view_as(codes).cpu()


def _store(state: dict[str, Any], suffix: str, dense: torch.Tensor) -> None:
    codes = state[f"state{suffix}"]
    dense = dense.to(codes.device)
    if codes.dtype != torch.uint8:
        codes.copy_(dense)
        return
    # Not by bitsandbytes' own quantize_blockwise: on a CPU it gives some values that are a code's the code beside it.
    table, blocks = state[f"qmap{suffix}"], _blocks(dense)
    scales = blocks.abs().amax(dim=1)
    shares = blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny).unsqueeze(1)
    nearest = torch.bucketize(shares, (table[1:] + table[:-1]) / 2)
    codes.copy_(nearest.view(-1)[: codes.numel()].view_as(codes))
    state[f"absmax{suffix}"].copy_(scales)


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in rows of `BLOCK_SIZE`, [blocks, BLOCK_SIZE], the last one filled up with zeros; a copy."""
    flat = tensor.reshape(-1)
    return nn.functional.pad(flat, (0, -flat.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE).clone()
