"""What the run asked for, asserted on what it got: a run that is not what it says it is ends before its first step."""

from collections import Counter
from dataclasses import dataclass

import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from recipe import ranks
from recipe.loading import Weights
from recipe.sharding.gather import clean_name, full_parameters, local_part
from recipe.sharding.quantized import LocalShardOptimizer


@dataclass(frozen=True)
class Sharding:
    """What FSDP made of the model."""

    version: int
    strategy: str
    wrap: str
    units: int
    parameters: int
    trainable: int
    dtypes: dict[str, int]
    compute_dtype: str

    def lines(self) -> list[str]:
        dtypes = ", ".join(f"{n:,} in {name}" for name, n in self.dtypes.items())
        return [
            f"FSDP{self.version}, {self.strategy}, {self.units} units (layers + 1), compute in {self.compute_dtype}",
            f"{self.parameters:,} parameters, {self.trainable:,} trainable; this rank's shard: {dtypes}",
        ]


def inspect_sharding(accelerator: Accelerator, model: nn.Module, num_layers: int, num_parameters: int) -> Sharding:
    """Describe the wrapped model, and raise where it is not what was asked for.

    Args:
        num_layers: transformer layers of the model; each has to be a unit of its own. None is checked for other wrap
        policies.
        num_parameters: parameters of the whole unwrapped model.

    Raises:
        RuntimeError: FSDP is not on, or the number of units is not layers + 1.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        raise RuntimeError(f"FSDP was asked for and Accelerate runs {accelerator.distributed_type}")
    plugin = accelerator.state.fsdp_plugin
    units = count_units(model, plugin.transformer_cls_names_to_wrap or [])
    if plugin.transformer_cls_names_to_wrap and units != num_layers + 1:
        raise RuntimeError(
            f"{units} FSDP units where {num_layers} layers + 1 were expected; check "
            f"fsdp_transformer_layer_cls_to_wrap ({plugin.transformer_cls_names_to_wrap}) in the accelerate file"
        )
    dtypes = Counter[str]()
    for parameter in model.parameters():
        dtypes[str(parameter.dtype).removeprefix("torch.")] += local_part(parameter).numel()
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    if plugin.fsdp_version == 2:
        strategy = "FULL_SHARD" if plugin.reshard_after_forward else "SHARD_GRAD_OP"
    return Sharding(
        version=plugin.fsdp_version,
        strategy=getattr(strategy, "name", str(strategy)),
        wrap=", ".join(plugin.transformer_cls_names_to_wrap or ["by size"]),
        units=units,
        parameters=num_parameters,
        trainable=num_parameters,
        dtypes=dict(dtypes),
        compute_dtype=str(plugin.mixed_precision_policy.param_dtype).removeprefix("torch."),
    )


def count_units(model: nn.Module, layer_classes: list[str]) -> int:
    """FSDP units: for FSDP1 its wrapped modules with parameters. For FSDP2 the wrapped layers, and 1 for the rest,
    which Accelerate may split in groups (embedding; final norm and head) that are gathered on their own."""
    if isinstance(model, FSDP):
        return sum(unit._has_params for unit in FSDP.fsdp_modules(model))
    wrapped = (m for m in model.modules() if isinstance(m, FSDPModule) and m._get_fsdp_state()._fsdp_param_groups)
    return 1 + sum(any(cls.__name__ in layer_classes for cls in type(module).__mro__) for module in wrapped)


def verify_weights(model: nn.Module, weights: Weights | None, dtype: torch.dtype) -> list[str]:
    """Compare sampled parameters with the files, bit for bit, on every rank. Collective.

    Args:
        weights: the files on rank 0, None elsewhere.

    Returns:
        The names compared.

    Raises:
        RuntimeError: on all ranks, if one rank's weights are not the files'.
    """
    expected = None
    if weights is not None:
        names = sorted({clean_name(name) for name, _ in model.named_parameters()} & weights.entries.keys())
        sampled = [names[i * (len(names) - 1) // 3] for i in range(4)]
        expected = {name: digest(weights.read(name).to(dtype)) for name in sampled}
        weights.close()
    expected = ranks.from_main(expected)
    with ranks.all_or_none("checking the loaded weights"):
        for name, tensor in full_parameters(model, only=expected):
            if digest(tensor) != expected[name]:
                raise RuntimeError(f"{name} on rank {ranks.rank()} is not what the file holds")
    return list(expected)


def digest(tensor: torch.Tensor) -> str:
    """xxh3 of a tensor's bytes."""
    # A copy: FSDP frees a unit by resizing its storage, which torch refuses once numpy has seen it.
    flat = torch.clone(tensor.detach(), memory_format=torch.contiguous_format).cpu().view(-1).view(torch.uint8)
    return xxhash.xxh3_64(flat.numpy().data).hexdigest()


def check_dtypes(model: nn.Module, optimizer: torch.optim.Optimizer, master_dtype: torch.dtype) -> str:
    """Say in which dtypes weights and moments are once the optimizer has stepped, and raise if weights left the master
    dtype, or torch's moments did (what is set up right can still be cast by the first forward pass; accelerate#3979).
    """
    quantized = isinstance(optimizer, LocalShardOptimizer)
    states = (optimizer.inner if isinstance(optimizer, LocalShardOptimizer) else optimizer).state.values()
    kept = ("state1", "state2") if quantized else ("exp_avg", "exp_avg_sq")
    weights = {p.dtype for p in model.parameters()}
    moments = {state[key].dtype for state in states for key in kept if key in state}
    if weights != {master_dtype} or not (quantized or moments == {master_dtype}):
        raise RuntimeError(
            f"param_dtype asks for weights and moments in {master_dtype}; after step 1 the weights are in "
            f"{_names(weights)} and the moments in {_names(moments)}"
        )
    return f"after step 1: weights in {_names(weights)}, moments in {_names(moments)}"


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
