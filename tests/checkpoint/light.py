"""Light ranks: they train tensors instead of a model, and claim, resume, save and retire by the recipe's own code.

A rank starts in a tenth of a second, so that a test can kill hundreds.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipe import run_folder
from recipe.checkpoint import shards
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.saver import Content, Saver
from recipe.rendezvous import Rendezvous
from tests.warm import CONTEXT

SHAPES = {"embed": (41, 8), "layer.0": (16, 8), "layer.1": (16, 8), "norm": (8,), "head": (41, 8)}
RUN = {"data": "light", "seed": 1}
PHASE_BYTES = 64


def state_at(step: int) -> dict[tuple[str, ...], torch.Tensor]:
    """Every tensor of model and optimizer after `step`, whole: what a run that nothing disturbed has."""
    state = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        start = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for path, scale in ((("model", name), 1.0), (("optimizer", "state", name, "exp_avg"), 0.5)):
            state[path] = start * scale + float(step) * (number + 1) * 0.37
    return state


def mine(state: dict[tuple[str, ...], torch.Tensor], rank: int, world_size: int) -> list[shards.Piece]:
    """This rank's part of every tensor, as FSDP1 cuts them."""
    pieces: list[shards.Piece] = []
    for path, whole in state.items():
        bounds = [whole.numel() * r // world_size for r in (rank, rank + 1)]
        part = whole.reshape(-1)[bounds[0] : bounds[1]].clone()
        pieces += shards.flat_pieces(path, whole.shape, bounds[0], part)
    return pieces


def split(pieces: list[shards.Piece]) -> dict[str, list[shards.Piece]]:
    return {
        shards.MODEL: [piece for piece in pieces if piece.path[0] == "model"],
        shards.OPTIMIZER: [piece for piece in pieces if piece.path[0] == "optimizer"],
    }


def train(
    run_dir: Path, rank: int, world_size: int, port: int, steps: int, in_background: bool, phase: Any, log: Path
) -> None:
    """A run of `steps` steps that saves every second one and keeps two. Writes what it is doing into `phase`."""

    def at(doing: str) -> None:
        phase.value = doing.encode()[: PHASE_BYTES - 1]

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    at("starting")
    dist.init_process_group("gloo")
    if rank == 0:
        run_folder.claim(run_dir, RUN)
    at("looking for checkpoints")
    folder, lines = run_folder.resume_point(run_dir, "auto", RUN, alive=at)
    first = 0
    pieces = mine(state_at(0), rank, world_size)
    if folder is not None:
        first = Manifest.read(folder).step
        at("loading")
        for name, part in split(pieces).items():
            shards.Reader(folder / name).read(part)
    saver = Saver(run_dir, Rendezvous(), torch.device("cpu"), in_background=in_background, keep=2)
    enter = saver.enter
    saver.enter = lambda doing: (enter(doing), at(doing.split(": ")[-1]))  # type: ignore[assignment, func-returns-value]
    assert_state(pieces, first, rank, world_size)
    with log.open("a") as file:
        file.write(f"{rank}/{world_size} from {first}: {' | '.join(lines)}\n")
    for step in range(first + 1, first + 1 + steps):
        conclude(saver.poll())
        saver.wait_staged()
        now = mine(state_at(step), rank, world_size)
        for piece, next_ in zip(pieces, now, strict=True):
            piece.data.copy_(next_.data)
        if step % 2 == 0:
            conclude(saver.finish())
            manifest = Manifest(step, step * 4, world_size, RUN)
            saver.save(Content(split(pieces), {"trainer_state.json": f'{{"step": {step}}}'}, describe, manifest))
    conclude(saver.finish())
    at("done")
    os._exit(0)


def conclude(outcome: Any) -> None:
    if outcome is not None:
        outcome.raise_if_failed()


def describe(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def assert_state(pieces: list[shards.Piece], step: int, rank: int, world_size: int) -> None:
    for piece, expected in zip(pieces, mine(state_at(step), rank, world_size), strict=True):
        assert torch.equal(piece.data, expected.data), f"{piece.path} after step {step} is not what it was"


class Ranks:
    """One start of `world_size` light ranks, which the caller may kill."""

    def __init__(self, run_dir: Path, world_size: int, steps: int, log: Path, in_background: bool = True):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the launcher has it
        self.phases = [CONTEXT.Array("c", PHASE_BYTES) for _ in range(world_size)]
        self.processes = [
            CONTEXT.Process(
                target=train,
                args=(run_dir, rank, world_size, self.store.port, steps, in_background, self.phases[rank], log),
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def phase(self, rank: int) -> str:
        return self.phases[rank].value.decode()

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def join(self, timeout: float) -> list[int | None]:
        """Exit codes."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]


@contextmanager
def started(*args: Any, **kwargs: Any) -> Iterator[Ranks]:
    ranks = Ranks(*args, **kwargs)
    try:
        yield ranks
    finally:
        ranks.kill(*range(len(ranks.processes)))
        ranks.join(10)


def wait_until(ranks: Ranks, rank: int, doing: str, timeout: float = 20) -> None:
    """Until `rank` is in the phase `doing`, polled without rest: some last a millisecond."""
    end = time.monotonic() + timeout
    while ranks.phase(rank) != doing and time.monotonic() < end:
        if random.random() < 0.01:
            time.sleep(0)
