"""How fast the nodes talk to each other, measured in a second or two before the model is touched."""

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
REPEATS = 3
SLOW = 0.5  # of the median pair


def tournament(num_nodes: int) -> list[list[int]]:
    """Rounds in which every node meets every other once: rounds[r][node] is its partner, or the node itself where it
    rests (the circle method)."""
    seats = num_nodes + num_nodes % 2
    rounds = []
    for turn in range(seats - 1):
        order = [0, *(1 + (place + turn) % (seats - 1) for place in range(seats - 1))]
        partner = list(range(num_nodes))
        for left, right in zip(order[: seats // 2], reversed(order[seats // 2 :]), strict=True):
            if left < num_nodes and right < num_nodes:
                partner[left], partner[right] = right, left
        rounds.append(partner)
    return rounds


def measure(device: torch.device) -> list[str]:
    """Exchange data between all pairs of nodes, then among all ranks; returns lines for the log, the same on every
    rank. Collective."""
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes, node, slot = world // local, dist.get_rank() // local, dist.get_rank() % local
    if num_nodes == 1:
        return []
    size = BYTES[device.type]
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    back = torch.empty_like(out)
    seconds = torch.zeros(num_nodes, num_nodes, dtype=torch.float64, device=device)
    for partner in (turn[node] for turn in tournament(num_nodes)):
        dist.barrier()
        if partner != node:
            seconds[node, partner] = _timed(lambda: _swap(out, back, partner * local + slot), device)  # noqa: B023
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # the slowest rank of each node
    pairs = {
        (a, b): local * size / max(seconds[a, b].item(), seconds[b, a].item()) / 1e9
        for a in range(num_nodes)
        for b in range(a + 1, num_nodes)
    }
    names: list = [None] * world
    dist.all_gather_object(names, os.uname().nodename)
    took = torch.tensor(_timed(lambda: dist.all_reduce(out), device), dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    bus = 2 * (world - 1) / world * size / took.item() / 1e9
    return describe(pairs, names[::local], bus, world)


def _swap(out: torch.Tensor, back: torch.Tensor, peer: int) -> None:
    swaps = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, back, peer)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()


def _timed(exchange: Callable[[], object], device: torch.device) -> float:
    """Seconds of one `exchange`, once the connection is there."""
    exchange()
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        exchange()
    _synchronize(device)
    return (time.perf_counter() - began) / REPEATS


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(pairs: dict[tuple[int, int], float], names: list[str], bus: float, world_size: int) -> list[str]:
    """`pairs`: GB/s each way between two nodes, all their ranks together; `bus`: of an all-reduce, by NCCL's count
    (2 (n - 1) / n x bytes / seconds)."""
    listed = [f"{names[a]}-{names[b]} {speed:.2f}" for (a, b), speed in pairs.items()]
    if len(listed) > 28:  # more than 8 nodes
        listed = [f"{len(listed)} pairs, {min(pairs.values()):.2f} to {max(pairs.values()):.2f}"]
    lines = [f"network, GB/s each way: {', '.join(listed)}; all-reduce over {world_size} ranks {bus:.2f} (bus)"]
    usual = statistics.median(pairs.values())
    for node, name in enumerate(names):
        own = statistics.median(speed for pair, speed in pairs.items() if node in pair)
        if len(names) > 2 and own < SLOW * usual:
            lines.append(
                f"warning: {name} exchanges {own:.2f} GB/s with the other nodes, whose median pair does {usual:.2f}; "
                f"every step waits for it. Look at its links, or leave it out (sbatch --exclude={name})"
            )
    return lines
