"""A picture of a plan: memory of one GPU at every moment, stacked by piece, and throughput against GPUs."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipe.plan import memory
from recipe.plan.report import COLUMNS, GIB, Plan
from recipe.plan.search import Candidate

# Of matplotlib's tab10, in the order of COLUMNS; and what is reserved beyond what is allocated.
COLOURS = ("tab:blue", "tab:cyan", "tab:orange", "tab:green", "tab:purple", "tab:red")


def draw(file: Path, plan: Plan, found: Sequence[Candidate] = ()) -> None:
    """Write the picture as .png or .svg, by the file's name.

    Args:
        found: best plans by number of GPUs (`recipe.plan.search.best_by_size`); [] leaves the second panel out.

    """
    figure = Figure(figsize=(13 if found else 8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if found else 1, squeeze=False)[0]
    setup = plan.setup
    figure.suptitle(
        f"{setup.shape.name}, {setup.world_size} x {setup.gpu.name}, FSDP{setup.fsdp} {setup.strategy.name}, "
        f"{setup.micro_batch} x {setup.seq_len:,} tokens: {plan.verdict}"
    )
    _memory(panels[0], plan)
    if found:
        _throughput(panels[1], found)
    figure.savefig(file, dpi=120)


def _memory(axes: Axes, plan: Plan) -> None:
    moments = plan.memory.moments[::-1]  # the first on top
    names = [moment.name for moment in moments]
    left = [0.0] * len(moments)
    for (column, pieces), colour in zip(COLUMNS.items(), COLOURS, strict=True):
        sizes = [sum(moment.pieces.get(piece, 0.0) for piece in pieces) / GIB for moment in moments]
        axes.barh(names, sizes, left=left, label=column, color=colour)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    rest = (plan.memory.fragments + memory.outside(plan.setup)) / GIB
    axes.barh(names, [rest] * len(moments), left=left, label="holes, CUDA, NCCL", color="lightgrey")
    capacity = plan.setup.gpu.memory_gib
    axes.axvline(capacity, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"{plan.setup.gpu.name}: {capacity:g} GiB", (capacity, len(moments) - 0.35), ha="right", fontsize=8)
    axes.set_xlabel("GiB of one GPU")
    axes.set_ylim(-0.6, len(moments) + 0.2)
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.12))


def _throughput(axes: Axes, found: Sequence[Candidate]) -> None:
    names = {4: "fp32 weights", 2: "bf16 weights"}
    kinds = list(dict.fromkeys((one.setup.master_bytes, one.setup.seq_len) for one in found))
    several = len({length for _, length in kinds}) > 1
    for number, (master, length) in enumerate(kinds):
        line = [one for one in found if (one.setup.master_bytes, one.setup.seq_len) == (master, length)]
        label = names[master] + (f", {length:,} tokens" if several else "")
        axes.plot([one.setup.world_size for one in line], [one.tokens_per_second for one in line], "o-", label=label)
        if len(kinds) <= 2:  # more would lie on each other
            _say_mfu(axes, line, below=number == 0)
    sizes = sorted({one.setup.world_size for one in found})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(f"{found[0].setup.gpu.name} (best plan that fits{'; MFU' if len(kinds) <= 2 else ''})")
    axes.set_ylabel("tokens/s of all GPUs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _say_mfu(axes: Axes, line: Sequence[Candidate], below: bool) -> None:
    for one in line:
        place, apart = (one.setup.world_size, one.tokens_per_second), (0, -13 if below else 7)
        axes.annotate(f"{one.speed.mfu:.0%}", place, textcoords="offset points", xytext=apart, ha="center", fontsize=8)
