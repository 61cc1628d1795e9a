"""All plans of a kind that fit: the fastest for each number of GPUs, and the fewest GPUs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from recipe.plan import memory, speed
from recipe.plan.advice import FITS, TOO_LARGE, verdict
from recipe.plan.host import resting
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Setup

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# What this recipe trains with; ZERO1 and DDP are for comparison alone.
SEARCHED_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")


@dataclass(frozen=True)
class Candidate:
    """A plan that fits.

    Args:
        needed: bytes of the card.
        host: bytes of a node's host memory, for what rests there.
        tokens_per_second: of all GPUs together.
    """

    setup: Setup
    optimizer: str
    verdict: str
    needed: float
    host: float
    speed: speed.Speed

    @property
    def tokens_per_second(self) -> float:
        return self.speed.tokens_per_second_per_gpu * self.setup.world_size

    def values(self) -> dict[str, object]:
        fast = self.speed
        return self.keys() | {
            "verdict": self.verdict,
            "needed_bytes": self.needed,
            "host_bytes": self.host,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": fast.tokens_per_second_per_gpu,
            "mfu": fast.mfu,
            "step_seconds": fast.step,
        }

    def keys(self) -> dict[str, object]:
        """What the plan asks for, by the keys of the run's and the accelerate file's."""
        setup = self.setup
        strategy: dict[str, object] = {"fsdp_sharding_strategy": setup.strategy.name}
        if setup.fsdp == 2:
            strategy = {"fsdp_reshard_after_forward": not setup.strategy.stays_whole}
        return strategy | {
            "num_machines": setup.num_nodes,
            "num_processes": setup.world_size,
            "max_length": setup.seq_len,
            "per_device_train_batch_size": setup.micro_batch,
            "global_batch_size": setup.micro_batch * setup.accumulation * setup.world_size,
            "activation_checkpointing": setup.checkpointing != "none",
            "optim": self.optimizer,
            "param_dtype": "float32" if setup.master_bytes == 4 else "bfloat16",
            "fsdp_offload_params": setup.offload,
        }


def search(
    start: Setup,
    global_batch: int | None,
    most_nodes: int,
    lengths: Sequence[int] = (),
    host_memory: float | None = None,
) -> list[Candidate]:
    """Every combination that fits, fastest first.

    Args:
        start: what the plans have in common, such as the model, the GPU and the network.
        global_batch: samples of `start`'s length in a step, whose tokens every plan has, rounded down to whole samples;
            None: whatever the micro-batches come to.
        most_nodes: to try; one node is tried with a part of its GPUs too.
        lengths: values of max_length to try; none: that of `start`.
        host_memory: bytes of a node's; None: as much as it takes.
    """
    sizes = [(1, gpus) for gpus in _powers(start.gpus_per_node)]
    sizes += [(nodes, start.gpus_per_node) for nodes in _powers(most_nodes) if nodes > 1]
    judged = (_judged(setup, name) for setup, name in _combinations(start, global_batch, sizes, lengths))
    found = [one for one in judged if one is not None and (host_memory is None or one.host <= host_memory)]
    return sorted(found, key=lambda one: -one.tokens_per_second)


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    return sorted({*(2**k for k in range(most.bit_length()) if 2**k <= most), most})


def _judged(setup: Setup, optimizer: str) -> Candidate | None:
    said = verdict(setup)
    if said == TOO_LARGE:
        return None
    return Candidate(setup, optimizer, said, memory.needed(setup), resting(setup), speed.estimate(setup))


def _combinations(
    start: Setup, global_batch: int | None, sizes: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> Iterator[tuple[Setup, str]]:
    dtypes = (4, 2) if start.compute_bytes == 2 else (4,)
    choices = product(
        sizes,
        SEARCHED_STRATEGIES,
        lengths or (start.seq_len,),
        MICRO_BATCHES,
        ("none", "full"),
        OPTIMIZERS,
        dtypes,
        (False, True),
    )
    for (nodes, gpus), strategy, length, micro, checkpointing, optimizer, master, offload in choices:
        together = nodes * gpus * micro
        batch = None if global_batch is None else global_batch * start.seq_len // length
        if batch is not None and (batch < together or batch % together):
            continue
        if offload and optimizer != "adamw_torch_fused":
            continue
        if strategy == "HYBRID_SHARD" and (nodes == 1 or gpus == 1 or start.fsdp == 2):
            continue  # the same as FULL_SHARD, or not to be had
        if strategy == "NO_SHARD" and start.fsdp == 2:
            continue
        setup = replace(
            start,
            num_nodes=nodes,
            gpus_per_node=gpus,
            strategy=STRATEGIES[strategy],
            seq_len=length,
            micro_batch=micro,
            accumulation=batch // together if batch else start.accumulation,
            checkpointing=checkpointing,
            optimizer=OPTIMIZERS[optimizer],
            master_bytes=master,
            offload=offload,
        )
        if setup.trains:
            yield setup, optimizer


def lines(best: Sequence[Candidate], tokens: float | None) -> Iterator[str]:
    """A table of `best_by_size`.

    Args:
        tokens: of the run, for hours and GPU-hours; None where not known.
    """
    if not best:
        yield "\nno plan fits; try more nodes (--nodes), a larger GPU, or a shorter max_length"
        return
    setup = best[0].setup
    fewest = min(one.setup.world_size for one in best)
    yield f"\nthe fewest that will do: {fewest} {setup.gpu.name}, if the host has the memory"
    yield f"best plans that fit, by dtype of the weights and number of {setup.gpu.name}"
    yield (
        f"{'GPUs':>5s} {'strategy':13s} {'batch':>9s} {'length':>7s} {'recompute':9s} {'optim':18s} {'weights':8s} "
        f"{'offload':7s} {'host GB':>7s} {'GiB':>5s} {'tokens/s/GPU':>12s} {'MFU':>6s} {'hours':>6s} {'GPU-hours':>9s}"
    )
    for one in best:
        setup, keys = one.setup, one.keys()
        hours = None if tokens is None else tokens / one.tokens_per_second / 3600
        yield (
            f"{setup.world_size:5d} {setup.strategy.name:13s} {f'{setup.micro_batch} x {setup.accumulation}':>9s} "
            f"{setup.seq_len:7,d} {'yes' if keys['activation_checkpointing'] else 'no':9s} {one.optimizer:18s} "
            f"{keys['param_dtype']!s:8s} {'yes' if setup.offload else 'no':7s} {one.host / 1e9:7,.0f} "
            f"{one.needed / 2**30:5.1f} "
            f"{one.speed.tokens_per_second_per_gpu:12,.0f} {one.speed.mfu:6.1%} "
            + ("     -         -" if hours is None else f"{hours:6.1f} {hours * setup.world_size:9,.0f}")
            + ("  tight" if one.verdict != FITS else "")
        )


def best_by_size(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best for each number of GPUs, max_length, and dtype of the weights (which decides how well it trains); fewest
    GPUs first."""
    best: dict[tuple[int, int, int], Candidate] = {}
    for one in candidates:
        key = (-one.setup.master_bytes, one.setup.seq_len, one.setup.world_size)
        if key not in best or _worth(one) > _worth(best[key]):
            best[key] = one
    return [best[key] for key in sorted(best)]


def _worth(one: Candidate) -> float:
    """Tokens a second; a plan that is tight, or whose moments are in 8 bits or paged, has to be faster by more than the
    prediction is off."""
    doubts = (one.verdict != FITS) + (one.optimizer != "adamw_torch_fused")
    return one.tokens_per_second * (1 - 0.04 * doubts)
