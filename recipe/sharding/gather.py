"""Whole parameters again, one FSDP unit at a time: for the export and for checking what was loaded."""

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """A parameter's name as the unwrapped model has it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or of what is sharded like it: a plain tensor under FSDP1 and FSDP2."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def sharded_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of a tensor that is sharded as `like` is; itself under FSDP1."""
    if not isinstance(like, DTensor):
        return local
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def full_parameters(model: nn.Module, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor in the master dtype) of every parameter, in the order of the model's FSDP units.

    Collective: every rank iterates to the end, in step. At most one unit (FSDP1) or one tensor (FSDP2) is whole at a
    time, on the ranks' device; a tensor is valid until the next one is asked for. A tied parameter comes once.

    Args:
        only: names to yield; units that hold none of them are not gathered. None: all.
    """
    if isinstance(model, FSDP):
        for unit in FSDP.fsdp_modules(model):
            # The root goes first and always: FSDP takes the first module that it makes whole for the root.
            if only is None or unit is model or any(name in only for name, _ in _own_parameters(model, unit)):
                with FSDP.summon_full_params(unit, recurse=False, writeback=False):
                    yield from ((n, p) for n, p in _own_parameters(model, unit) if only is None or n in only)
    else:
        for raw, parameter in model.named_parameters():
            name, value = clean_name(raw), parameter.detach()
            if only is None or name in only:
                yield name, value.full_tensor() if isinstance(value, DTensor) else value


def _own_parameters(model: FSDP, unit: FSDP) -> list[tuple[str, torch.Tensor]]:
    """The parameters of one FSDP1 unit, without those of the units inside it."""
    prefix = next(name for name, module in model.named_modules() if module is unit)
    inner = {id(p) for nested in FSDP.fsdp_modules(unit) if nested is not unit for p in nested.parameters()}
    return [(clean_name(n), p.detach()) for n, p in unit.named_parameters(prefix) if id(p) not in inner]
