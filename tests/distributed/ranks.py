"""Run a function on real gloo ranks, each a fresh process in the environment that `accelerate launch` would give it."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

FSDP = {
    "1": {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_USE_ORIG_PARAMS": "true"},
    "2": {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
}
COMMON = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_CPU": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "OMP_NUM_THREADS": "1",
}


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, version: str = "1", timeout: float = 120
) -> list:
    """Call `function(*args)` on `world_size` ranks under FSDP `version`; returns each rank's result, in order of rank.

    Raises:
        AssertionError: a rank raised (with its traceback) or did not end in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(results, rank, world_size, port, version, function, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get(timeout=timeout) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    for rank, (error, _) in sorted(found.items()):
        assert error is None, f"rank {rank}:\n{error}"
    return [found[rank][1] for rank in range(world_size)]


def _rank(results: Any, rank: int, world_size: int, port: int, version: str, function: Callable, args: tuple) -> None:
    os.environ.update(COMMON | FSDP[version])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        from accelerate import PartialState

        from recipe import noise  # noqa: F401
        from recipe.sharding.plugin import open_cpu_door

        PartialState(cpu=True)
        open_cpu_door()
        results.put((rank, (None, function(*args))))
    except BaseException:  # noqa: BLE001 - handed to the test, which raises it
        results.put((rank, (traceback.format_exc(), None)))
