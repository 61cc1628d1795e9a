"""Nodes started by hand, as the README says, here two on one machine; and two runs at once."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Launcher

pytestmark = pytest.mark.slow
VENV = Path(sys.executable).parent.parent


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def together(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """Run them at once; what each printed."""
    base = {**os.environ, "VENV": str(VENV), "PATH": f"{VENV}/bin:{os.environ['PATH']}", "SPREAD": "fsdp1_cpu_2rank"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    running = [
        subprocess.Popen(command, env=base | environment, **pipes)
        for command, environment in zip(commands, environments, strict=True)
    ]
    said = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    return said


def keys(launch: Launcher, run_dir: Path) -> list[str]:
    values = {**launch.defaults, "output_dir": run_dir, "max_steps": 2}
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def test_two_nodes(launch: Launcher, tmp_path: Path) -> None:
    """And a token that they are given appears nowhere."""
    token = "hf_secretOfAUser"
    meet = {"NUM_NODES": "2", "RANKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = ["bash", "launch/node.sh", "configs/quickstart.yaml", *keys(launch, tmp_path / "run")]
    command += ["--hub_token", token, "--report_to", "tensorboard"]
    said = together([command] * 2, [{**meet, "NODE_RANK": rank, "HF_TOKEN": token} for rank in "01"])
    assert "recipe: ranks 0-1 on " in said[0] and "2 nodes were started and they have 1 host names" in said[0]
    assert "recipe: exported to" in said[0] and "exported" not in said[1], "rank 0 speaks"
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 10 and not any(token.encode() in content for content in [*written, "".join(said).encode()])
    assert (tmp_path / "run/export/model.safetensors").is_file()


def test_two_nodes_by_torchrun(launch: Launcher, tmp_path: Path) -> None:
    """`recipe spread` gives it what it does not read from an accelerate file."""
    rendezvous = f"--nnodes 2 --nproc_per_node 1 --master_addr 127.0.0.1 --master_port {free_port()} --node_rank"
    start = f'eval "$(recipe spread configs/accelerate/fsdp1_cpu_2rank.yaml)"; exec torchrun {rendezvous}'
    run = ["--config", "configs/quickstart.yaml", *keys(launch, tmp_path / "run")]
    commands = [["bash", "-c", f'{start} {rank} "$@"', "-", "-m", "recipe.train", *run] for rank in "01"]
    said = together(commands, [{}, {}])
    assert "FSDP1, FULL_SHARD, 3 units" in said[0] and (tmp_path / "run/export/model.safetensors").is_file()


def test_two_runs_at_once(launch: Launcher, tmp_path: Path) -> None:
    """Each takes a port that is free."""
    runs = [tmp_path / "one", tmp_path / "two"]
    together([["bash", "launch/train.sh", "configs/quickstart.yaml", *keys(launch, run)] for run in runs], [{}, {}])
    assert all((run / "export/model.safetensors").is_file() for run in runs)
