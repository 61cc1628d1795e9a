"""Sharded state dicts of model and optimizer, for `torch.distributed.checkpoint`, in the layout of Accelerate's files.

Accelerate 1.15's loader asks a fresh FSDP1 optimizer for its state, gets none, and so loads none without a word
(`accelerate.utils.fsdp_utils.load_fsdp_optimizer`); torch's own functions below initialise the optimizer first and
serve FSDP1 and FSDP2 alike.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recipe.sharding.quantized import LocalShardOptimizer


def _options(device: torch.device) -> StateDictOptions:
    # On a GPU the copy that the file writer needs is made unit by unit in host memory, not beside the shard.
    return StateDictOptions(cpu_offload=device.type != "cpu")


def model_state(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """{name: this rank's part} of the parameters, under the unwrapped model's names. Collective."""
    return get_model_state_dict(model, options=_options(device))


def load_model_state(model: nn.Module, state: dict[str, Any], device: torch.device) -> None:
    set_model_state_dict(model, state, options=_options(device))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """{"state": {name: moments}, "param_groups": ...}, sharded like the parameters. Collective."""
    if isinstance(optimizer, LocalShardOptimizer):
        optimizer.show_dense()
    state = get_optimizer_state_dict(model, optimizer, options=_options(device))
    if isinstance(optimizer, LocalShardOptimizer):
        optimizer.hide_dense()
    return state


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], device: torch.device
) -> None:
    """The inverse of `optimizer_state`. Collective."""
    if isinstance(optimizer, LocalShardOptimizer):
        optimizer.show_dense()
    set_optimizer_state_dict(model, optimizer, state, options=_options(device))
    if isinstance(optimizer, LocalShardOptimizer):
        optimizer.take_dense()
