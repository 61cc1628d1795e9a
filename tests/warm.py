"""Ranks of the real entry, forked from a process that has imported everything: their start takes no six seconds.

They have the environment that the launcher gives its ranks; the launcher itself is not there, and neither is what it
adds (see `recipe.launch`): the first that fails ends the others.
"""

import multiprocessing as mp
import os
import sys
import time
from functools import cache
from pathlib import Path

import torch.distributed as dist

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.warm", "tests.checkpoint.light", "recipe.train"])
POLL_SECONDS = 0.05


@cache
def _environment(spread: Path) -> dict[str, str]:
    from recipe.launch import environment

    return environment(str(spread))


class Warm:
    """One start on `world_size` ranks; `command` are the entry's arguments, `log` takes what the ranks say."""

    def __init__(self, spread: Path, world_size: int, command: list[str], log: Path):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the launcher has it
        common = {
            **os.environ,
            **_environment(spread),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.ranks = [
            CONTEXT.Process(target=_rank, args=(common | {"RANK": str(r), "LOCAL_RANK": str(r)}, command, str(log)))
            for r in range(world_size)
        ]
        for rank in self.ranks:
            rank.start()

    def wait(self, timeout: float) -> int:
        """The exit code of the first rank that failed, or 0; 124 if they took longer than `timeout` seconds."""
        end, code = time.monotonic() + timeout, 0
        while any(rank.is_alive() for rank in self.ranks):
            codes = [rank.exitcode for rank in self.ranks]
            code = next((found for found in codes if found), 124 if time.monotonic() > end else 0)
            if code:
                time.sleep(0.5)  # those that fail for the same reason say so themselves
                self.kill(*range(len(self.ranks)))
            time.sleep(POLL_SECONDS)
        return code or next((rank.exitcode for rank in self.ranks if rank.exitcode), 0)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].kill()


def _rank(environment: dict[str, str], command: list[str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(handle, stream.fileno())
        stream.reconfigure(line_buffering=True)
    sys.argv = ["recipe.train", *command]
    from recipe.train import entry, leave

    leave(entry())
