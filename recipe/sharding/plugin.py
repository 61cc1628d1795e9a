"""What the accelerate file asked for, as Accelerate's FSDP plugin; and the door to real FSDP on CPU ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

_LOADING_SWITCHES = ("FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def spread_problems() -> list[str]:
    """What this recipe needs of the accelerate file and does not find in the environment that the launcher made of
    it."""
    if os.environ.get("WORLD_SIZE") is None:
        return [
            "no launcher: WORLD_SIZE is not set; start with `bash launch/train.sh CONFIG` or "
            "`accelerate launch --config_file configs/accelerate/<spread>.yaml -m recipe.train --config CONFIG`"
        ]
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return ["the accelerate file does not ask for FSDP; set distributed_type: FSDP in it"]
    problems = []
    fsdp1 = os.environ.get("FSDP_VERSION", "1") == "1"
    if _asked("STATE_DICT_TYPE", "SHARDED_STATE_DICT") != "SHARDED_STATE_DICT":
        problems.append(
            f"fsdp_state_dict_type is {_asked('STATE_DICT_TYPE')}; set SHARDED_STATE_DICT: a full gather at every "
            "checkpoint outlives NCCL's time-out at 70B, and the export gathers by itself"
        )
    if _asked("CPU_RAM_EFFICIENT_LOADING", "false") != "true":
        problems.append("fsdp_cpu_ram_efficient_loading is false; set it to true: only rank 0 may read the weights")
    if fsdp1 and _asked("SYNC_MODULE_STATES", "false") != "true":
        problems.append(
            "fsdp_sync_module_states is false; set it to true: only rank 0 reads the weights and the other ranks "
            "would train on uninitialised memory"
        )
    if "HYBRID" in _asked("SHARDING_STRATEGY") and os.environ.get("LOCAL_WORLD_SIZE") == "1":
        # FSDP1 turns a shard group of one into NO_SHARD, and then averages no gradients at all between the nodes.
        problems.append("fsdp_sharding_strategy is HYBRID_SHARD with one rank a node; set FULL_SHARD or NO_SHARD")
    if fsdp1 and _asked("USE_ORIG_PARAMS", "false") != "true":
        problems.append(
            "fsdp_use_orig_params is false; set it to true: norms and biases take no weight decay, which needs "
            "the original parameters"
        )
    return problems


def device_problems(num_gpus: int) -> list[str]:
    """What the accelerate file asks for and the `num_gpus` GPUs that this process sees (0: CPU ranks) cannot do."""
    asked = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower()  # of recipe.launch; Accelerate's own does not say
    problems = []
    if num_gpus and use_cpu == "true":
        problems.append(f"the accelerate file has use_cpu: true and there are {num_gpus} GPUs; take a file for GPUs")
    if num_gpus and asked > num_gpus:
        problems.append(f"{asked} ranks were started here and there are {num_gpus} GPUs; start a rank for each GPU")
    if not num_gpus and use_cpu == "false":
        problems.append("the accelerate file asks for GPUs and there is none; take one with use_cpu: true")
    if not num_gpus and offload_asked():
        problems.append(
            "fsdp_offload_params is true and there is no GPU: parameters are in host memory already; set it to false"
        )
    return problems


def idle_gpus(num_gpus: int) -> list[str]:
    """Allowed, and often a variable that was left over."""
    asked = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return [f"{asked} ranks were started here and there are {num_gpus} GPUs; the others idle"] * (asked < num_gpus)


def activation_checkpointing_asked() -> bool:
    """Whether the accelerate file turns on FSDP's own activation checkpointing."""
    return _asked("ACTIVATION_CHECKPOINTING", "false") == "true"


def offload_asked() -> bool:
    """Whether parameters, gradients and moments rest in host memory."""
    return _asked("OFFLOAD_PARAMS", "false") == "true"


def version_asked() -> int:
    return int(os.environ.get("FSDP_VERSION", "1"))


def strategy_asked() -> str:
    """FSDP1's name of the strategy, for FSDP2 too."""
    if version_asked() == 1:
        strategy = _asked("SHARDING_STRATEGY", "FULL_SHARD")
        return {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}.get(strategy, strategy)
    return "FULL_SHARD" if _asked("RESHARD_AFTER_FORWARD", "true") == "true" else "SHARD_GRAD_OP"


def ranks_that_share(local: int, world_size: int) -> int:
    """Among how many ranks each parameter is split, with `local` ranks on a node."""
    strategy = _asked("SHARDING_STRATEGY")
    return 1 if strategy == "NO_SHARD" else local if "HYBRID" in strategy else world_size


def _asked(key: str, default: str = "") -> str:
    value = os.environ.get(f"FSDP_{key}", default)
    return value.lower() if value.lower() in ("true", "false") else value


def open_cpu_door() -> None:
    """Make Accelerate run real FSDP on CPU ranks (gloo) by its normal path.

    Accelerate turns FSDP on for GPU-like distributed types alone and runs plain DDP on CPU without a word
    (accelerate's `AcceleratorState.__init__`). Told that the ranks are of such a type, it takes its ordinary FSDP
    branch. FSDP1 refuses the indexed device `cpu:0` that Accelerate would use. Call it once the process group is up
    and before an `Accelerator` exists; on a GPU it does nothing.
    """
    state = PartialState()
    if state.device.type != "cpu":
        return
    assert dist.is_initialized() and state.num_processes == int(os.environ["WORLD_SIZE"]), (
        "every rank would train alone"
    )
    state.distributed_type = DistributedType.MULTI_GPU
    state.device = torch.device("cpu")


@contextmanager
def ranks_of_a_node() -> Iterator[None]:
    """Tell FSDP1 how many CPU ranks a node has; it takes the number of devices for it, which torch says is 1 on a
    CPU, and
    HYBRID_SHARD would shard over none of them."""
    said = torch.cpu.device_count
    torch.cpu.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    try:
        yield
    finally:
        torch.cpu.device_count = said


@contextmanager
def _without_loading_switches() -> Iterator[None]:
    saved = {key: os.environ.pop(key) for key in _LOADING_SWITCHES if key in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


def build_plugin(compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> FullyShardedDataParallelPlugin:
    """Accelerate's plugin from the launcher's environment, with this recipe's precision.

    Buffers stay fp32 whatever the compute dtype: RoPE's inverse frequencies in bf16 cannot tell positions above 256
    apart (transformers#25681). `sync_module_states` and `cpu_ram_efficient_loading` are taken out while the plugin is
    built, since without an accelerator it raises on them and with FSDP2 it would copy the whole model through rank 0;
    `wrap.shard` does what they stand for.

    Args:
        compute_dtype: dtype of forward and backward.
        reduce_dtype: dtype of the gradient reduce-scatter.
    """
    with _without_loading_switches():
        plugin = FullyShardedDataParallelPlugin()
    plugin.cpu_ram_efficient_loading = False
    if plugin.fsdp_version == 1:
        from torch.distributed.fsdp import MixedPrecision

        plugin.mixed_precision_policy = MixedPrecision(
            param_dtype=compute_dtype, reduce_dtype=reduce_dtype, buffer_dtype=torch.float32
        )
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    return plugin
