"""`launch/`: which spread is taken on which machine, and an environment that is made once.

The real scripts run, in an environment whose `python`, `recipe` and `nvidia-smi` are stand-ins that say what they were
asked.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SPREADS = ROOT / "configs" / "accelerate"


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that counts as installed, and has no GPU."""
    folder = tmp_path / "venv"
    script(folder / "bin" / "python", 'printf "%s\\n" "OMP=${OMP_NUM_THREADS:-}" "$@"')
    script(folder / "bin" / "nvidia-smi", "exit 9")
    source = 'cat "$1/pyproject.toml" "$1/constraints.txt" | cksum'
    stamp = subprocess.run(["bash", "-c", source, "-", str(ROOT)], capture_output=True, check=True)
    (folder / ".installed").write_bytes(stamp.stdout)
    return folder


def give_gpus(venv: Path, number: int) -> None:
    lines = "".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})\\n" for i in range(number))
    script(venv / "bin" / "nvidia-smi", f"printf '{lines}'")


TAKEN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SPREAD", "RANKS_PER_NODE", "NUM_NODES", "NODE_RANK")


def train(venv: Path, *args: str, name: str = "train.sh", **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in TAKEN and not k.startswith(("SLURM_", "MASTER_"))}
    command = ["bash", str(ROOT / "launch" / name), *args]
    return subprocess.run(
        command, capture_output=True, text=True, env=inherited | {"VENV": str(venv)} | environment, timeout=60
    )


def asked(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The launcher's options and the module's arguments, in pairs."""
    assert done.returncode == 0, done.stderr
    omp, module, launch, *rest = done.stdout.splitlines()
    assert (module, launch) == ("-m", "recipe.launch")
    return {"OMP": omp.removeprefix("OMP="), **dict(zip(rest[::2], rest[1::2], strict=True))}


def test_without_a_gpu_two_cpu_ranks_share_the_cores(venv: Path) -> None:
    done = train(venv, "a.yaml", "--max_steps", "3")
    options = asked(done)
    assert options["--config_file"] == str(SPREADS / "fsdp1_cpu_2rank.yaml")
    assert options["--num_processes"] == "2" and options["--num_machines"] == "1"
    assert options["OMP"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert (options["-m"], options["--config"], options["--max_steps"]) == ("recipe.train", "a.yaml", "3")
    assert options["--main_process_port"] == "0"
    assert ": 2 ranks, 0 GPUs, fsdp1_cpu_2rank.yaml" in done.stderr


def test_a_thread_count_that_is_set_stays(venv: Path) -> None:
    assert asked(train(venv, "a.yaml", OMP_NUM_THREADS="7"))["OMP"] == "7"


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_rank_for_each_gpu(venv: Path, gpus: int) -> None:
    give_gpus(venv, gpus)
    options = asked(train(venv, "a.yaml"))
    assert options["--config_file"] == str(SPREADS / "fsdp1_1node_8gpu.yaml")
    assert options["--num_processes"] == str(gpus)
    assert options["OMP"] == ""


@pytest.mark.parametrize(("visible", "ranks"), [("0,3", "2"), ("5", "1")])
def test_hidden_gpus_do_not_count(venv: Path, visible: str, ranks: str) -> None:
    give_gpus(venv, 8)
    assert asked(train(venv, "a.yaml", CUDA_VISIBLE_DEVICES=visible))["--num_processes"] == ranks


def test_with_all_gpus_hidden_the_ranks_are_on_the_cpu(venv: Path) -> None:
    give_gpus(venv, 8)
    options = asked(train(venv, "a.yaml", CUDA_VISIBLE_DEVICES=""))
    assert options["--config_file"] == str(SPREADS / "fsdp1_cpu_2rank.yaml") and options["--num_processes"] == "2"


def test_spread_by_name_and_by_path(venv: Path, tmp_path: Path) -> None:
    give_gpus(venv, 8)
    options = asked(train(venv, "a.yaml", SPREAD="fsdp2_cpu_2rank"))
    assert options["--config_file"] == str(SPREADS / "fsdp2_cpu_2rank.yaml") and options["--num_processes"] == "2"
    mine = tmp_path / "mine.yaml"
    mine.write_text("use_cpu: true\nnum_machines: 1\nnum_processes: 64\n")
    options = asked(train(venv, "a.yaml", SPREAD=str(mine)))
    assert (options["--config_file"], options["OMP"]) == (str(mine), "1")


def test_an_unknown_spread_is_named_with_those_that_exist(venv: Path) -> None:
    done = train(venv, "a.yaml", SPREAD="fsdp3")
    assert done.returncode == 2 and done.stdout == ""
    assert "SPREAD 'fsdp3'" in done.stderr and "fsdp1_cpu_2rank.yaml" in done.stderr


@pytest.mark.parametrize("args", [[], ["--config", "a.yaml"]])
def test_no_config_is_a_usage_error(venv: Path, args: list[str]) -> None:
    done = train(venv, *args)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: bash launch/train.sh CONFIG")


def test_the_launchers_exit_code_is_kept(venv: Path) -> None:
    script(venv / "bin" / "python", "exit 75")
    assert train(venv, "a.yaml").returncode == 75


TWO_NODES = {"NUM_NODES": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("rank", [{"NODE_RANK": "1"}, {"SLURM_NODEID": "1"}, {"NODE_RANK": "1", "SLURM_NODEID": "0"}])
def test_a_node_of_several(venv: Path, rank: dict[str, str]) -> None:
    """N1, N2: each node's own number, the number of all ranks, and where they meet."""
    give_gpus(venv, 8)
    options = asked(train(venv, "a.yaml", name="node.sh", **TWO_NODES, **rank))
    assert (options["--num_machines"], options["--num_processes"], options["--machine_rank"]) == ("2", "16", "1")
    assert (options["--main_process_ip"], options["--main_process_port"]) == ("node1", "29500")


def test_ranks_that_are_asked_for(venv: Path) -> None:
    """What Slurm gave goes before what the spread says."""
    options = asked(train(venv, "a.yaml", name="node.sh", **TWO_NODES, SPREAD="fsdp2_2node_16gpu", RANKS_PER_NODE="4"))
    assert (options["--num_machines"], options["--num_processes"], options["--machine_rank"]) == ("2", "8", "0")
    options = asked(train(venv, "a.yaml", name="node.sh", **TWO_NODES, SPREAD="fsdp2_2node_16gpu"))
    assert options["--num_processes"] == "16"


@pytest.mark.parametrize("unset", ["MASTER_ADDR", "MASTER_PORT"])
def test_several_nodes_need_a_place_to_meet(venv: Path, unset: str) -> None:
    done = train(venv, "a.yaml", name="node.sh", **{key: value for key, value in TWO_NODES.items() if key != unset})
    assert done.returncode == 2 and not done.stdout
    assert "NUM_NODES is 2 and MASTER_ADDR or MASTER_PORT is not set" in done.stderr


def test_no_python_that_is_new_enough_is_said(tmp_path: Path) -> None:
    script(tmp_path / "python3", "exit 1")
    done = train(tmp_path / "none", "a.yaml", PYTHON=str(tmp_path / "python3"))
    assert done.returncode == 1
    assert "no Python of version 3.11 or newer" in done.stderr and "set PYTHON" in done.stderr


def test_the_environment_is_installed_once_and_again_when_its_stamp_is_old(venv: Path) -> None:
    script(venv / "bin" / "python", f'[[ $* != *"-m pip"* ]] || echo "$*" >> {venv}/calls')
    train(venv, "a.yaml")
    assert not (venv / "calls").exists()
    (venv / ".installed").write_text("old")
    assert "installing into" in train(venv, "a.yaml").stdout
    assert "-m pip install -c" in (venv / "calls").read_text()
    (venv / "calls").unlink()
    assert "installing into" not in train(venv, "a.yaml").stdout
    assert not (venv / "calls").exists()


def test_a_failed_installation_is_shown_and_tried_again(venv: Path) -> None:
    script(venv / "bin" / "python", '[[ $* == *--version ]] || { echo "no room on the disk"; exit 1; }')
    (venv / ".installed").write_text("old")
    for _ in range(2):
        done = train(venv, "a.yaml")
        assert done.returncode == 1
        assert "no room on the disk" in done.stderr and "recipe: failed:" in done.stderr


def test_the_quickstart_stops_half_way() -> None:
    steps = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())["max_steps"]
    assert f"\nstop_at={steps // 2} " in (ROOT / "launch" / "quickstart.sh").read_text()


def test_the_quickstart_does_not_remove_a_folder_that_is_no_run(venv: Path, tmp_path: Path) -> None:
    script(venv / "bin" / "recipe", "exit 0")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    command = ["bash", str(ROOT / "launch" / "quickstart.sh"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"VENV": str(venv)}, timeout=60)
    assert done.returncode == 2 and "is not a run's folder" in done.stderr
    assert (tmp_path / "run" / "thesis.tex").exists()
