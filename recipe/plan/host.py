"""Host memory of a node while a run loads, trains, saves and exports; and what it writes to disk.

GPU ranks have weights, gradients and moments on the cards, unless they are offloaded or paged; CPU ranks have all of it
in their own memory, and what comes and goes too.
"""

from dataclasses import dataclass, fields, replace

from recipe.plan import fitted, memory, speed
from recipe.plan.setup import Optimizer, Setup


@dataclass(frozen=True)
class Rank:
    """Bytes of one process at the peak of each of its phases.

    Args:
        train: until the first checkpoint, of which an asynchronous save's copy stays.
        save: training goes on beside it.
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
        checkpoints: that lie on disk together.
        export_bytes: of an exported weight; 0: nothing is exported.
        on_cpu: the ranks are CPU ranks.
    """
    main, other = (
        rank(setup, main=main, saves=checkpoints > 0, export_bytes=export_bytes, async_save=async_save, on_cpu=on_cpu)
        for main in (True, False)
    )
    others = setup.gpus_per_node - 1
    node = {phase.name: getattr(main, phase.name) + others * getattr(other, phase.name) for phase in fields(Rank)}
    checkpoint = setup.shape.parameters * saved_bytes(setup.master_bytes, setup.optimizer)
    exported = float(setup.shape.parameters * export_bytes)
    return Host(**node, checkpoint=checkpoint, exported=exported, disk=checkpoints * checkpoint + exported)


def rank(
    setup: Setup,
    *,
    export_bytes: int,
    main: bool = True,
    saves: bool = True,
    async_save: bool = True,
    on_cpu: bool = False,
    file_bytes: int | None = None,
) -> Rank:
    """Host memory of one rank.

    Args:
        main: rank 0, which reads the model's files and writes the export.
        saves: the run writes checkpoints.
        file_bytes: of a weight in the model's files; None: as the master weight.
    """
    copied = staged(setup.shape.parameters / setup.world_size, setup) if saves and async_save else 0.0
    saved = copied + (dense(setup.shape.parameters / setup.shards, setup.optimizer) if saves else 0.0)
    writes = 2 * _tensor(setup) * export_bytes if main else 0.0  # one on its way to the disk, and the next
    if not on_cpu:
        stays = fitted.PROCESS_BYTES + resting(setup) / setup.gpus_per_node
        weights = setup.shape.parameters / setup.shards * setup.master_bytes if setup.offload else 0.0
        return Rank(fitted.PROCESS_BYTES + weights, stays, stays + saved, stays + copied + writes)
    setup = replace(setup, offload=False, optimizer=replace(setup.optimizer, paged=False))
    states = memory.resting(setup)  # with gradients: FSDP1 has them until the next step, FSDP2's heap their place
    trained = memory.estimate(setup).allocated
    kept, kept_at_work = (min(trained, most) for most in (fitted.HEAP_BYTES, fitted.HEAP_BYTES_AT_WORK[setup.fsdp]))
    train = fitted.PROCESS_BYTES + trained + kept_at_work
    return Rank(
        load=fitted.PROCESS_BYTES + states["weights"] + _loading(setup, main, file_bytes or setup.master_bytes),
        train=train,
        save=train + saved,
        export=fitted.PROCESS_BYTES + sum(states.values()) + kept + copied + _exporting(setup, writes),
    )


def resting(setup: Setup) -> float:
    """Bytes of a node's host memory for what rests there, where its ranks have GPUs: all model states, if offloaded;
    paged moments, if they find no room on the cards."""
    if setup.offload:
        on_the_card = replace(setup, offload=False, optimizer=replace(setup.optimizer, paged=False))
        return setup.gpus_per_node * sum(memory.resting(on_the_card).values())
    return speed.paged_out(setup) * setup.gpus_per_node if setup.optimizer.paged else 0.0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_bytes(master_bytes: int, optimizer: Optimizer) -> float:
    """Bytes of a parameter in a checkpoint: the master weight and two moments, bitsandbytes' in fp32."""
    return master_bytes + 2 * (master_bytes if optimizer.moments is None else 4)
