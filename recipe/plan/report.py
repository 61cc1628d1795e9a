"""A plan, worked out and told: as text, and as values for JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from recipe.plan import advice, memory, sharded
from recipe.plan.host import Host
from recipe.plan.memory import Memory
from recipe.plan.setup import OPTIMIZERS, Setup
from recipe.plan.speed import Speed

GIB = 2**30
# Columns of the table of moments, and the pieces in each.
COLUMNS = {
    "weights": ("weights",),
    "moments": ("moments", "optimizer's temporaries"),
    "gradients": ("gradients", "buckets", "whole gradients", "reduced unit"),
    "whole units": ("gathered weights", "gathering", "cast weights", "whole unit", "loading"),
    "activations": ("activations", "layer at work"),
    "loss": ("loss",),
}


@dataclass(frozen=True)
class Plan:
    """All that is predicted of a setup.

    Args:
        optimizer: as the key calls it.
        tokens: that the run trains on; None where not known.
        steps: of the run; None where not known.
        source: where `tokens` comes from.
    """

    setup: Setup
    memory: Memory
    speed: Speed
    host: Host
    optimizer: str
    tokens: float | None
    steps: int | None
    source: str

    @property
    def verdict(self) -> str:
        return advice.verdict(self.setup)

    @property
    def needed(self) -> float:
        return memory.needed(self.setup)

    @property
    def hours(self) -> float | None:
        if self.tokens is None:
            return None
        return self.tokens / (self.speed.tokens_per_second_per_gpu * self.setup.world_size) / 3600

    def values(self) -> dict[str, Any]:
        setup = self.setup
        return {
            "verdict": self.verdict,
            "model": asdict(setup.shape) | {"parameters": setup.shape.parameters},
            "gpu": asdict(setup.gpu),
            "network": asdict(setup.network),
            "setup": {
                key: value
                for key, value in asdict(setup).items()
                if key not in ("shape", "gpu", "network", "strategy", "optimizer")
            }
            | {"strategy": setup.strategy.name, "optimizer": self.optimizer, "world_size": setup.world_size},
            "memory": {
                "needed_bytes": self.needed,
                "capacity_bytes": setup.gpu.memory,
                "allocated_bytes": self.memory.allocated,
                "active_bytes": self.memory.active,
                "reserved_bytes": self.memory.reserved,
                "outside_bytes": memory.outside(setup),
                "pools_bytes": self.memory.pools,
                "fragments_bytes": self.memory.fragments,
                "moments": {moment.name: moment.pieces for moment in self.memory.moments},
            },
            "host": asdict(self.host),
            "speed": asdict(self.speed) | {"hidden": self.speed.hidden, "fitted": self.fitted},
            "run": {
                "tokens": self.tokens,
                "steps": self.steps,
                "from": self.source,
                "hours": self.hours,
                "gpu_hours": None if self.hours is None else self.hours * setup.world_size,
            },
            "changes": [
                {"keys": change.keys, "verdict": change.verdict, "speed": change.speed}
                for change in advice.changes(setup)
            ],
        }

    @property
    def fitted(self) -> bool:
        """Whether the GPU's efficiencies were fitted on measurements."""
        return self.setup.gpu.measured

    def lines(self) -> Iterator[str]:
        setup = self.setup
        yield from _heading(self)
        share = self.needed / setup.gpu.memory
        yield f"\n{self.verdict}: needs {_gib(self.needed)} of {_gib(setup.gpu.memory)} GiB of a GPU ({share:.0%})"
        yield from _moments(self)
        yield from self._host()
        yield from self._time()
        found = advice.changes(setup)
        if found:
            tight = self.verdict == advice.TIGHT
            yield (
                "\nit should run; the smallest changes that leave room"
                if tight
                else "\nthe smallest changes that make it fit"
            )
            yield from (f"  {change.line()}" for change in found)
        elif self.verdict == advice.TOO_LARGE:
            yield "\nno three changes together make it fit; --search tries more, or take more nodes"

    def _host(self) -> Iterator[str]:
        host = self.host
        yield "\nhost memory of the fullest node, GB"
        names = ("load", "train", "save", "export")
        yield "  " + ", ".join(f"{name} {getattr(host, name) / 1e9:.0f}" for name in names)
        yield (
            f"disk: {host.checkpoint / 1e9:,.1f} GB a checkpoint, {host.exported / 1e9:,.1f} the export, "
            f"{host.disk / 1e9:,.1f} together"
        )
        wire = self.speed.wire
        yield (
            f"on the wire in a step: {wire['within a node'] / 1e9:,.0f} GB into each GPU, "
            f"{wire['between nodes'] / 1e9:,.0f} GB into each node from others"
        )

    def _time(self) -> Iterator[str]:
        fast, setup = self.speed, self.setup
        yield (
            f"\nstep {fast.step:.2f} s: {fast.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {fast.mfu:.1%}; "
            f"{fast.communication:.1f} s of communication, {fast.waited:.1f} s of it waited for"
            + ("; the host's launches hold it up" if fast.launch_bound else "")
        )
        if not self.fitted:
            yield f"  (no measurements of {setup.gpu.name} were at hand: its time is an estimate by its kind)"
        if self.hours is None:
            yield "hours: not known; prepare the run's data (`recipe data`), or give --tokens or max_steps"
        else:
            steps = "" if self.steps is None else f" in {self.steps:,} steps"
            yield (
                f"{self.tokens:,.0f} tokens{steps} ({self.source}): {self.hours:.1f} hours, "
                f"{self.hours * setup.world_size:,.0f} GPU-hours, without loading, saving and evaluation"
            )


def _heading(plan: Plan) -> Iterator[str]:
    setup = plan.setup
    shape, fsdp = setup.shape, f"FSDP{setup.fsdp} {setup.strategy.name}"
    yield (
        f"{shape.name} ({shape.parameters / 1e9:,.2f} B parameters), {fsdp} on {setup.world_size} {setup.gpu.name} "
        f"({setup.num_nodes} x {setup.gpus_per_node})"
        + (f", {setup.network.name}: {setup.network.gigabits:g} Gb/s a node" if setup.num_nodes > 1 else "")
    )
    names = {4: "fp32", 2: "bf16"}
    yield (
        f"step: {setup.micro_batch * setup.accumulation * setup.world_size} samples of {setup.seq_len:,} tokens = "
        f"{setup.micro_batch} x {setup.accumulation} accumulated x {setup.world_size} ranks; weights in "
        f"{names[setup.master_bytes]}, compute in {names[setup.compute_bytes]}, {plan.optimizer}, "
        f"{'no ' if setup.checkpointing == 'none' else ''}activation checkpointing"
        + ("" if setup.adapter is None else f", LoRA of rank {setup.adapter.rank}")
        + (" on NF4" if setup.adapter and setup.adapter.four_bit else "")
        + (", offloaded to host memory" if setup.offload else "")
    )


def _moments(plan: Plan) -> Iterator[str]:
    known = {piece for pieces in COLUMNS.values() for piece in pieces}
    yield "\nGiB of one GPU          " + "".join(f"{name:>13s}" for name in (*COLUMNS, "allocated"))
    peak = plan.memory.peak.name
    for moment in plan.memory.moments:
        assert known >= moment.pieces.keys(), "a piece without a column"
        values = [sum(moment.pieces.get(piece, 0.0) for piece in pieces) for pieces in COLUMNS.values()]
        mark = "*" if moment.name == peak else " "
        cells = "".join(f"{_gib(value) if value else '-':>13s}" for value in (*values, moment.allocated))
        yield f"{mark} {moment.name:22s}{cells}"
    pools = plan.memory.pools
    kept = pools["gathering"] + pools["reducing"]
    yield (
        f"reserved {_gib(plan.memory.reserved)} = computing {_gib(pools['computing'])} + its holes "
        f"{_gib(plan.memory.fragments)} + pools of the gathering and reducing streams {_gib(kept)}; outside of PyTorch "
        f"{_gib(memory.outside(plan.setup))}"
    )
    waiting = plan.memory.reserved - plan.memory.required
    if waiting:
        yield f"of it, {_gib(waiting)} wait for the GPU and are given back where the card is full"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


# Phases of a dry run, and the moments that fall into each.
PHASES = {
    "load": ("load",),
    "forward": ("forward", "loss"),
    "backward": (
        "backward, last layer",
        "last layer's reduced",
        "backward, second layer",
        "second layer's reduced",
        "root's reduced",
    ),
    "optimizer": ("optimizer step",),
}


def walk_lines(walked: dict[str, Any], setup: Setup) -> Iterator[str]:
    """A dry run (`recipe.plan.dry_run.DryRun`) held against the formula, in GiB."""
    setup = replace(setup, optimizer=OPTIMIZERS["adamw_torch_fused"])  # which is what it walks
    resting = sharded.resting(setup)
    ours = {"parameters": resting["weights"], "gradients": resting["gradients"], "optimizer": resting["moments"]}
    yield (
        f"\ndry run of {setup.world_size} ranks with fake tensors: {walked['units']} FSDP units, "
        f"{walked['seconds']:.0f} s, {walked['host_bytes'] / 1e9:.1f} GB; GiB of one rank, adamw_torch_fused"
    )
    yield f"{'':24s}{'walked':>10s}{'formula':>10s}"
    for kind, formula in ours.items():
        yield _compared(f"sharded {kind}", walked["sharded"][kind], formula)
    for phase, size in walked["peaks"].items():
        name, _, step = phase.partition(" ")
        if name in PHASES:
            moments = memory.estimate(setup, step=int(step or 2)).moments
            # FSDP1 still has the last step's gradients where a forward pass begins, as where it saves.
            of_phase = PHASES[name] + (("save",) if phase == "forward 2" else ())
            yield _compared(f"peak in {phase}", size, max(m.allocated for m in moments if m.name in of_phase))


def _compared(what: str, walked: float, formula: float) -> str:
    return f"{what:24s}{walked / GIB:10.2f}{formula / GIB:10.2f}{formula / walked - 1:+8.1%}"
