"""Host memory of a node while a run loads, trains, saves and exports; and what it writes to disk."""

from dataclasses import dataclass

from recipe.plan import fitted, speed
from recipe.plan.setup import Setup


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
    setup: Setup,
    *,
    checkpoints: int,
    export_bytes: int,
    async_save: bool = True,
    saved_moment_bytes: float | None = None,
) -> Host:
    """Host memory and disk.

    Args:
        checkpoints: that lie on disk together.
        export_bytes: of an exported weight.
        saved_moment_bytes: of the two moments of a parameter in a checkpoint; None: as in training.
    """
    shape, parameters = setup.shape, setup.shape.parameters
    ranks = setup.gpus_per_node
    processes = ranks * fitted.PROCESS_BYTES
    tensor = max(shape.embedding, shape.hidden * shape.intermediate)
    share = parameters * min(1.0, ranks / setup.shards)
    saved = setup.moment_bytes if saved_moment_bytes is None else saved_moment_bytes
    stays = resting(setup)
    copied = share * (setup.master_bytes + saved) if async_save and not setup.offload else 0.0
    checkpoint = parameters * (setup.master_bytes + saved)
    exported = float(parameters * export_bytes)
    return Host(
        load=processes + 2 * tensor * setup.master_bytes,
        train=processes + stays,
        save=processes + stays + copied,
        export=processes + stays + tensor * (setup.master_bytes + export_bytes),
        checkpoint=checkpoint,
        exported=exported,
        disk=checkpoints * checkpoint + exported,
    )


def resting(setup: Setup) -> float:
    """Bytes of a node's host memory for what rests there: all model states, if offloaded; paged moments, if they find
    no room on the cards."""
    share = setup.shape.parameters * min(1.0, setup.gpus_per_node / setup.shards)
    if setup.offload:
        return share * (2 * setup.master_bytes + setup.moment_bytes)
    return speed.paged_out(setup) * setup.gpus_per_node if setup.optimizer.paged else 0.0
