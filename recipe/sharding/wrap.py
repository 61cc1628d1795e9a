"""Shard a model that is on meta, streaming its weights in: FSDP1 while it wraps, FSDP2 right after."""

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, distribute_tensor

from recipe.loading import StreamingLoader
from recipe.sharding.gather import clean_name, sharded_like
from recipe.sharding.plugin import ranks_of_a_node


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDP | FSDPModule)


def loader_broadcasts(accelerator: Accelerator) -> bool:
    """Whether the loader has to send the weights itself: FSDP1 on a GPU does it (`sync_module_states`)."""
    return accelerator.is_fsdp2 or accelerator.device.type == "cpu"


def shard(accelerator: Accelerator, model: nn.Module, loader: StreamingLoader) -> nn.Module:
    """Wrap `model` by Accelerate's own code, with its weights streamed in by `loader`.

    Args:
        model: on meta, with real buffers (RoPE) on every rank.

    Returns:
        The wrapped model: a new root for FSDP1, the same object for FSDP2.
    """
    plugin = accelerator.state.fsdp_plugin
    if not accelerator.is_fsdp2:
        # FSDP1 refuses to broadcast CPU tensors, so there the loader does; with nothing to read nobody needs to.
        plugin.sync_module_states = accelerator.device.type != "cpu" and loader.file_dtypes is not None
        plugin.param_init_fn = lambda module: loader.materialize(module, accelerator.device)
        with ranks_of_a_node():
            model = accelerator.prepare(model)
    else:
        plugin.set_auto_wrap_policy(model)
        if plugin.activation_checkpointing:
            model = fsdp2_apply_ac(accelerator, model)
            plugin.activation_checkpointing = False  # `Accelerator.prepare` sees the model again, with its optimizer
        model = fsdp2_prepare_model(accelerator, model)
        resting = torch.device("cpu") if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else accelerator.device
        _fill(model, loader, accelerator.device, resting)
    loader.release()
    return model


def reshard(model: nn.Module) -> None:
    """Give up whole parameters that a forward pass without a backward left behind: FSDP2 keeps those of the last unit
    (final norm and head), or of all under SHARD_GRAD_OP, in the compute dtype and in the place of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fill(model: nn.Module, loader: StreamingLoader, device: torch.device, resting: torch.device) -> None:
    """Give every meta shard of an FSDP2 model its memory and values, one whole tensor at a time.

    Args:
        device: where whole tensors are received.
        resting: where the shards stay; the CPU under parameter offload.
    """
    filled: dict[int, nn.Parameter] = {}
    for name, meta in list(model.named_parameters(remove_duplicate=False)):
        if id(meta) not in filled:
            assert isinstance(meta, DTensor), f"{name} was not sharded"
            local = _local_shard(loader.full(clean_name(name), meta.shape, device), meta, loader.dtype).to(resting)
            value = sharded_like(local, meta)
            filled[id(meta)] = nn.Parameter(value, requires_grad=meta.requires_grad)
        module, _, key = name.rpartition(".")
        model.get_submodule(module).register_parameter(key, filled[id(meta)])


def _local_shard(full: torch.Tensor, like: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """This rank's part, in `dtype`, of a tensor that every rank holds; a copy, so that the whole can be freed."""
    sharded = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local().to(dtype, copy=True)
