"""One rank's memory, by walking the run itself: the real model in its real depth, wrapped by the recipe's own code, on
tensors without content.

    python -m recipe.plan.dry_run < request.json > result.json

A request holds `model` (a folder with config.json) and the arguments of `walk`; the result is a `DryRun`. Tensors are
torch's fake ones (a shape, a dtype and no memory), and so is the process group, whose collectives do nothing: it takes
no GPU, weights, network or other ranks. Not counted is what PyTorch's allocator is not asked for (CUDA's context,
NCCL's buffers), and what it rounds up, cannot reuse, or keeps until another stream has got there.
"""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from recipe import noise  # noqa: F401 - for what importing it does
from recipe.errors import UserError, raise_if
from recipe.loading import StreamingLoader
from recipe.loss import attach_summed_loss
from recipe.model import load_config, meta_model, torch_dtype
from recipe.plan.ledger import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, Ledger, LookingAway
from recipe.sharding import claims, plugin, wrap
from recipe.sharding.gather import local_part

LIKE_FLASH = "dry_run"  # the name of an attention: PyTorch's own, and on packed rows no mask, as in Flash Attention


@dataclass(frozen=True)
class DryRun:
    """What one rank holds, in bytes. It is rank 0, and none holds more.

    Args:
        units: FSDP units, layers + 1.
        sharded: what rests on the rank, by kind (`recipe.plan.ledger`).
        peaks: the most that is alive at once, by phase.
        at_peak: what that is, by phase and kind.
        host_bytes: peak of the walk's own memory.
        seconds: that the walk took.
    """

    units: int
    sharded: dict[str, int]
    peaks: dict[str, int]
    at_peak: dict[str, dict[str, int]]
    host_bytes: int
    seconds: float


def walk(
    config: PretrainedConfig,
    *,
    spread: dict[str, str],
    world_size: int,
    ranks_per_node: int,
    micro_batch: int,
    seq_len: int,
    accumulation: int,
    checkpointing: bool,
    param_dtype: str,
    compute_dtype: str,
    reduce_dtype: str,
    attention: str = "flash_attention_2",
    trust_remote_code: bool = False,
) -> DryRun:
    """Load, train two steps and evaluate, as a run does: with fused AdamW, clipped gradients, a label at every token.

    Once in a process: it takes the process group, the environment, and Accelerate's state.

    Args:
        spread: what the launcher makes of the accelerate file (`recipe.launch.environment`).
        micro_batch: samples of a rank in one forward pass, in training and evaluation.
        seq_len: tokens of a sample.
        accumulation: micro-batches of a step. Two are walked at most: a third finds what the second found.
        checkpointing: whether layers are recomputed (`activation_checkpointing`).
        param_dtype: "float32" or "bfloat16", as the two that follow.
        attention: `attn_implementation`; PyTorch's own flash kernel stands in for Flash Attention.

    Raises:
        UserError: the accelerate file asks for what cannot be walked.
    """
    began = time.perf_counter()
    os.environ |= spread | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    raise_if(_problems(world_size, ranks_per_node))
    _join(world_size)
    compute, master = torch_dtype(compute_dtype), torch_dtype(param_dtype)
    flash = "flash" in attention
    model = meta_model(config, LIKE_FLASH if flash else attention, master, trust_remote_code)
    attach_summed_loss(model)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    ledger, mode = Ledger(), FakeTensorMode()
    with _taken_for_real(ledger):
        # Mixed precision is what transformers makes of `bf16`, which the recipe sets where these dtypes differ.
        accelerator = Accelerator(
            fsdp_plugin=plugin.build_plugin(compute, torch_dtype(reduce_dtype)),
            mixed_precision="no" if compute == master else "bf16",
        )
        wrapped = _load(accelerator, model, master, mode, ledger)
        units = claims.inspect_sharding(accelerator, wrapped, config.num_hidden_layers, model.num_parameters()).units
        with mode, ledger:
            optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
            shape = micro_batch, seq_len
            sharded = _train(accelerator, wrapped, optimizer, shape, min(accumulation, 2), ledger)
            if flash and not ledger.flash_calls:
                raise UserError(
                    f"attn_implementation is {attention}, and {type(model).__name__} computes attention otherwise than "
                    "by the kernel that stands in for it in a dry run (with dropout, for one); set "
                    "attn_implementation: eager for an upper bound"
                )
            _evaluate(wrapped, shape, ledger)
    at_peak = ledger.peaks()
    peaks = {name: sum(at.values()) for name, at in at_peak.items()}
    return DryRun(units, sharded, peaks, at_peak, _host_peak(), time.perf_counter() - began)


def _problems(world_size: int, ranks_per_node: int) -> list[str]:
    problems = plugin.spread_problems()
    if world_size < 2 or ranks_per_node < 1 or world_size % ranks_per_node:
        problems.append(
            f"a dry run is of 2 ranks or more, the same number on every node; {world_size} ranks with {ranks_per_node} "
            "on a node were asked for; set num_processes and num_machines in the accelerate file"
        )
    if plugin.offload_asked():
        problems.append(
            "fsdp_offload_params is true and a dry run counts one memory, not the GPU's and the host's; set it to false"
        )
    return problems


def _join(world_size: int) -> None:
    """Be rank 0 of a process group whose other ranks do not exist."""
    assert not dist.is_initialized(), "a walk takes the process group; give it a process of its own"
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    PartialState(cpu=True)
    plugin.open_cpu_door()
    AttentionInterface.register(LIKE_FLASH, sdpa_attention_forward)
    AttentionMaskInterface.register(LIKE_FLASH, flash_attention_mask)


@contextmanager
def _taken_for_real(ledger: Ledger) -> Iterator[None]:
    """Let FSDP treat fake tensors as real ones, and `ledger` see what is no operator."""
    resize, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

    def resize_and_say(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        ledger.resized(storage)

    def address_of(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return address(storage)
        return storage._cdata if storage.nbytes() else 0

    replaced: list[tuple[Any, str, Any]] = [
        # FSDP allocates and frees whole parameters by resizing their storages.
        (torch.UntypedStorage, "resize_", resize_and_say),
        # FSDP1 tells tensors apart by their addresses, of which fake ones have none.
        (torch.UntypedStorage, "data_ptr", address_of),
        (FakeTensor, "data_ptr", lambda tensor: address_of(tensor.untyped_storage())),
        # FSDP2 takes the accelerator that PyTorch was built for, which need not be there.
        (torch._C, "_get_accelerator", lambda: torch.device("cpu")),
        (ShardingPropagator, "_fake_mode_lock", LookingAway(ledger)),
    ]
    with ExitStack() as stack:
        for where, name, instead in replaced:
            stack.enter_context(mock.patch.object(where, name, instead))
        yield


class _NothingToRead(StreamingLoader):
    """Gives tensors without content."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, mode: FakeTensorMode):
        super().__init__(model, None, dtype, broadcast=False)
        self.mode = mode

    def full(self, name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
        with self.mode:
            return super().full(name, shape, device)


def _load(
    accelerator: Accelerator, model: nn.Module, dtype: torch.dtype, mode: FakeTensorMode, ledger: Ledger
) -> nn.Module:
    """The model sharded as training does it."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, mode.from_tensor(buffer))
    loader = _NothingToRead(model, dtype, mode)
    ledger.phase("load")
    ledger.hold(model.buffers(), BUFFERS)
    # FSDP2 makes device meshes as it wraps, whose tensors need their content.
    with nullcontext() if accelerator.is_fsdp2 else mode, ledger:
        model = wrap.shard(accelerator, model, loader)
    ledger.hold(map(local_part, model.parameters()), PARAMETERS)
    for unit in FSDP.fsdp_modules(model):
        if unit._flat_param is not None:
            unit._flat_param.register_post_accumulate_grad_hook(ledger.whole_gradient)
    return model


def _train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, int],
    accumulation: int,
    ledger: Ledger,
) -> dict[str, int]:
    """Two steps as transformers' loop makes them; returns what rests on the rank."""
    for step in (1, 2):
        for _ in range(accumulation):
            ledger.phase(f"forward {step}")
            loss = model(**_batch(shape), summed_loss=True) / math.prod(shape)
            ledger.leave(ACTIVATIONS)
            ledger.phase(f"backward {step}")
            accelerator.backward(loss)
            del loss
            grads = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
            gradients = ledger.hold(map(local_part, grads), GRADIENTS)
        ledger.phase(f"optimizer {step}")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        states = (tensor for state in optimizer.state.values() for tensor in state.values())
        moments = ledger.hold(map(local_part, states), OPTIMIZER)
        model.zero_grad()
    return {
        PARAMETERS: ledger.hold(map(local_part, model.parameters()), PARAMETERS),
        GRADIENTS: gradients,
        OPTIMIZER: moments,
        BUFFERS: ledger.hold(model.buffers(), BUFFERS),
    }


def _evaluate(model: nn.Module, shape: tuple[int, int], ledger: Ledger) -> None:
    ledger.phase("evaluation")
    model.eval()
    with torch.no_grad():
        model(**_batch(shape), summed_loss=True)
    wrap.reshard(model)


def _batch(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What a packed batch consists of."""
    return {key: torch.zeros(shape, dtype=torch.int64) for key in ("input_ids", "labels", "position_ids")}


def _host_peak() -> int:
    """Bytes of memory that this process took at most."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> int:
    """Walk what stdin asks for; the result goes to stdout, and a user's mistake to stderr with exit code 2."""
    request = json.load(sys.stdin)
    try:
        config = load_config(Path(request.pop("model")), request.get("trust_remote_code", False))
        found = walk(config, **request)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(dataclasses.asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
