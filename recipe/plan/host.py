"""Host memory of a node while a run loads, trains, saves and exports; and what it writes to disk.

Ranks with a GPU have weights, gradients and moments there, unless they are offloaded or paged. CPU ranks have all of it
in their own memory, and what comes and goes too.
"""

from dataclasses import dataclass, fields, replace

from recipe.plan import fitted, memory, sharded, speed
from recipe.plan.setup import Optimizer, Setup


@dataclass(frozen=True)
class Rank:
    """Bytes of one process, at the peak of each phase. Files that are mapped lie in the page cache beside it.

    Args:
        train: before the first checkpoint.
        save: training goes on. The copy that an asynchronous save is written from stays for the next.
    """

    load: float
    train: float
    save: float
    export: float


@dataclass(frozen=True)
class Host:
    """Bytes.

    Args:
        load, train, save, export: of the node of rank 0, which has the most. Files that are mapped or just written
            lie in the page cache beside it, which the kernel gives back.
        checkpoint, exported: on disk, one of each.
        disk: of all checkpoints that lie there together, and of the export.
    """

    load: float
    train: float
    save: float
    export: float
    checkpoint: float
    exported: float
    disk: float

    @property
    def peak(self) -> float:
        return max(self.load, self.train, self.save, self.export)


def estimate(
    setup: Setup, *, checkpoints: int, export_bytes: int, async_save: bool = True, on_cpu: bool = False
) -> Host:
    """Host memory and disk.

    Args:
        checkpoints: that lie on disk together; 0: none is saved.
        export_bytes: of an exported weight; 0: nothing is exported.
        on_cpu: the ranks are CPU ranks.
    """
    trained = setup.trained
    first, other = (
        rank(
            setup,
            first=first,
            saves=checkpoints > 0,
            export_bytes=export_bytes,
            async_save=async_save,
            on_cpu=on_cpu,
        )
        for first in (True, False)
    )
    phases = (phase.name for phase in fields(Rank))
    of_node = {name: getattr(first, name) + (setup.gpus_per_node - 1) * getattr(other, name) for name in phases}
    checkpoint = trained * saved_bytes(setup.trained_bytes, setup.optimizer)
    exported = float(trained * export_bytes)
    return Host(**of_node, checkpoint=checkpoint, exported=exported, disk=checkpoints * checkpoint + exported)


def rank(
    setup: Setup,
    *,
    first: bool = True,
    saves: bool = True,
    export_bytes: int = 0,
    async_save: bool = True,
    on_cpu: bool = False,
    file_bytes: int | None = None,
) -> Rank:
    """Host memory of one rank.

    Args:
        first: rank 0, which reads the model's files and writes the export.
        saves, export_bytes, async_save, on_cpu: as in `estimate`.
        file_bytes: of a weight in the model's files; None: as the master weight.
    """
    stays, goes = 0.0, 0.0
    if saves:
        stays, goes = save_bytes(
            setup.trained,
            shards=setup.shards,
            world_size=setup.world_size,
            master_bytes=setup.trained_bytes,
            optimizer=setup.optimizer,
            async_save=async_save,
        )
        if setup.fsdp == 1:  # its pieces are parts of a unit's memory, which DCP copies one by one as it writes them
            unit = sharded.units(setup)
            goes += min(_tensor(setup), max(unit.layer, unit.root) / setup.shards) * setup.master_bytes
    # A tensor on its way to the disk, and the next.
    written = 2 * _tensor(setup) * export_bytes if first else 0.0
    if on_cpu:
        setup = _in_one_memory(setup)
        exporting = _exporting(setup, written) if export_bytes else 0.0
        return _cpu_rank(setup, _loading(setup, first, file_bytes or setup.master_bytes), stays, goes, exporting)
    rests = fitted.PROCESS_BYTES + resting(setup) / setup.gpus_per_node
    weights = sharded.resting(_in_one_memory(setup))["weights"] if setup.offload else 0.0
    return Rank(
        load=fitted.PROCESS_BYTES + weights, train=rests, save=rests + stays + goes, export=rests + stays + written
    )


def resting(setup: Setup) -> float:
    """Bytes of a node's host memory for what rests there, where its ranks have GPUs: all model states, if offloaded;
    paged moments, if they find no room on the cards."""
    if setup.offload:
        return setup.gpus_per_node * sum(sharded.resting(_in_one_memory(setup)).values())
    return speed.paged_out(setup) * setup.gpus_per_node if setup.optimizer.paged else 0.0


def saved_bytes(master_bytes: int, optimizer: Optimizer) -> float:
    """Bytes of a parameter in a checkpoint: the master weight and two moments, bitsandbytes' in fp32."""
    return master_bytes + 2 * (master_bytes if optimizer.moments is None else 4)


def save_bytes(
    parameters: float,
    *,
    shards: int,
    world_size: int,
    master_bytes: int,
    optimizer: Optimizer,
    async_save: bool = True,
) -> tuple[float, float]:
    """Bytes of host memory of one rank for a save, beside what it trains: what stays for the next save, and what goes
    with this one.

    What is in memory of its own is copied by the rank that writes it, of those that hold it. FSDP1's weights are not:
    a unit of them is one piece. Moments of 8 bits are made fp32 for a save, and these are copied.
    """
    is_quantised = optimizer.moments is not None and optimizer.moments < 8
    dense = 8 * parameters / shards if is_quantised else 0.0
    if not async_save:
        return 0.0, dense
    weights = parameters / shards * master_bytes
    moments = parameters / world_size * (saved_bytes(master_bytes, optimizer) - master_bytes)
    return (weights, moments + dense) if is_quantised else (weights + moments, 0.0)


def _in_one_memory(setup: Setup) -> Setup:
    return replace(setup, offload=False, optimizer=replace(setup.optimizer, paged=False))


def _tensor(setup: Setup) -> int:
    """Parameters of the largest one."""
    return max(setup.shape.embedding, setup.shape.hidden * setup.shape.intermediate)


# -- CPU ranks ---------------------------------------------------------------------------------------------------------


def _cpu_rank(setup: Setup, loading: float, stays: float, goes: float, exporting: float) -> Rank:
    """
    Args:
        loading, exporting: bytes beside what rests.
        stays, goes: see `save_bytes`.
    """
    states = sharded.resting(setup)

    def process(phase: str, held: float) -> float:
        return fitted.PROCESS_BYTES + held + min(held, fitted.HEAP_BYTES[phase][setup.fsdp])

    train = process("train", memory.estimate(setup).until_saved)
    # FSDP1 has the gradients until the next forward pass; FSDP2 has not, and the heap keeps their place.
    rests = process("export", sum(states.values()))
    return Rank(
        load=process("load", states["weights"]) + loading,
        train=train,
        save=train + stays + goes,
        export=rests + stays + exporting,
    )


def _loading(setup: Setup, first: bool, file_bytes: int) -> float:
    """Bytes beside this rank's share of the weights. Rank 0 has the files' tensors mapped, the others receive them."""
    if setup.fsdp == 2:  # a tensor at a time, of which each rank cuts its share
        tensor = _tensor(setup) * file_bytes
        return tensor / setup.shards + (0 if first else tensor)
    # A unit at a time, the root last: its parameters, and the same laid out flat, of which the share is cut, or which
    # is what stays.
    mapped = first and file_bytes == setup.master_bytes
    times = (not mapped) + (setup.shards > 1)
    unit = sharded.units(setup)
    return max(times * unit.root, times * unit.layer - unit.root / setup.shards) * setup.master_bytes


def _exporting(setup: Setup, written: float) -> float:
    """Bytes beside the shards: what is whole, and either what gathering it takes or what is being written."""
    if not setup.strategy.parameters:
        return written
    if setup.fsdp == 2:
        tensor = float(_tensor(setup) * setup.master_bytes)
        return tensor + max(tensor, written)
    unit = sharded.units(setup)
    whole = float(max(unit.layer, unit.root) * setup.master_bytes)
    return whole + max(whole / setup.shards, written)
