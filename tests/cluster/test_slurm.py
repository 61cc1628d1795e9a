"""The scripts as users submit them, on a real Slurm: two nodes with names, addresses and disks of their own, and two
gloo ranks on each."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.checkpoint.find import newest_complete
from recipe.checkpoint.verify import verify
from tests.cluster.conftest import Cluster
from tests.conftest import Finished

pytestmark = pytest.mark.slow
KEYS: dict[str, Any] = {"max_steps": 60, "save_steps": 10, "packing": False, "export_dtype": "float32"}
EXACT = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A job that nothing disturbs."""
    return cluster.submit(tmp_path_factory.mktemp("whole") / "run", **KEYS).ended("COMPLETED")


def same(one: Finished, other: Finished) -> bool:
    kept = [[{key: line[key] for key in EXACT} for line in run.metrics] for run in (one, other)]
    weights = [load_file(run.run_dir / "export/model.safetensors") for run in (one, other)]
    return kept[0] == kept[1] and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_two_nodes_train_together_and_export(whole: Finished) -> None:
    """N1, N2: every rank once, on two hosts; and the log of a run that goes well."""
    assert "recipe: ranks 0-1 on node1, 2-3 on node2" in whole.log
    assert re.search(r"network, GB/s each way: node1-node2 \d+\.\d\d; all-reduce over 4 ranks", whole.log)
    assert "global batch 16 = 2 samples x 2 accumulated x 4 ranks; 60 steps" in whole.log
    assert "FSDP1, FULL_SHARD, 3 units (layers + 1)" in whole.log
    assert whole.column("step")[-1] == 60 and (whole.run_dir / "export/model.safetensors").is_file()
    assert whole.log.count("recipe: exported to") == 1, "rank 0 speaks for all"
    assert re.search(r"llama70b-\d+: done$", whole.log, re.MULTILINE)


def test_asked_to_stop_it_saves_is_requeued_and_ends_as_if_it_had_never_stopped(
    whole: Finished, cluster: Cluster, tmp_path: Path
) -> None:
    """R10. Slurm's `--signal=B:USR1@N` is this signal to the batch script, sent N seconds before the limit."""
    job = cluster.submit(tmp_path / "run", **KEYS)
    job.until_step(3)
    job.signal("--batch", "--signal=USR1")
    ended = job.ended("COMPLETED")
    assert job.show("Restarts") == "1"
    assert "SIGUSR1: asked the ranks to save and come back" in job.log
    assert "stopped as asked; requeued. stopped, as asked by SIGUSR1: step" in job.log
    (step,) = {int(step) for step in re.findall(r"step (\d+) is in checkpoint-\1", ended.log)}
    assert 3 <= step < 60 and f"checkpoint-{step}: step {step}, written by 4 ranks" in ended.log
    assert same(ended, whole)


def test_pre_empted_with_a_grace_time_it_saves_and_is_requeued(
    whole: Finished, cluster: Cluster, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM to the tasks alone, and the job ends before the grace time does."""
    job = cluster.submit(tmp_path / "run", **KEYS)
    job.until_step(3)
    urgent = ("--partition=urgent", "--nodes=2", "--gpus-per-node=2", "--output=urgent.log", "--wrap=hostname")
    cluster.run("sbatch", *urgent)
    ended = job.ended("COMPLETED")
    assert job.show("Restarts") == "1" and "requeued. stopped, as asked by SIGTERM: step" in job.log
    assert (cluster.project / "urgent.log").read_text().strip() == "node1"
    assert same(ended, whole)


def test_a_time_limit_too_short_to_train_in_is_not_tried_for_ever(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path / "run", **KEYS)
    for start in ("0", "1"):
        job.until(lambda start=start: f": start {start}: " in job.log)
        job.signal("--batch", "--signal=USR1")
    job.ended("FAILED")
    assert job.show("Restarts") == "1" and not (tmp_path / "run").exists()
    assert "two starts in a row were stopped before their first step" in job.log


def test_cancelled_in_a_save_it_leaves_a_checkpoint_to_go_on_from(
    whole: Finished, cluster: Cluster, tmp_path: Path
) -> None:
    job = cluster.submit(tmp_path / "run", **KEYS)
    job.until(lambda: list(job.run_dir.glob("checkpoint-*.tmp")), every=0.01)
    job.signal()
    job.ended("CANCELLED")
    assert job.show("Restarts") == "0"
    again = cluster.submit(tmp_path / "run", **KEYS).ended("COMPLETED")
    assert same(again, whole)


def test_a_rank_that_is_killed_ends_the_job_and_is_named_first(cluster: Cluster, tmp_path: Path) -> None:
    """N7: within a minute, on both nodes, not requeued, and the checkpoint before is whole."""
    job = cluster.submit(tmp_path / "run", **KEYS)
    job.until_step(11)
    job.until(lambda: (job.run_dir / "checkpoint-10").exists(), every=0.1)  # it is written beside training
    killed = time.monotonic()
    cluster.inside("kill", "-9", job.process_of(3))
    ended = job.ended("FAILED")
    assert time.monotonic() - killed < 60 and ended.code == 137 and job.show("Restarts") == "0"
    report = job.log.split("failed with exit code 137\n")[1]
    assert report.startswith("rank 3 on node2: killed by SIGKILL")
    checkpoint, _ = newest_complete(job.run_dir)
    assert checkpoint is not None and checkpoint.name == "checkpoint-10"
    assert not [problem for _, problem in verify(checkpoint, fast=False, processes=2) if problem]


def test_a_node_that_hangs_is_named(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path / "run", **KEYS, hang_timeout=12)
    job.until_step(11)  # past loading: what a rank publishes may be a second old
    frozen = time.monotonic()
    cluster.inside("kill", "-STOP", job.process_of(2), job.process_of(3))
    job.ended("FAILED")
    assert time.monotonic() - frozen < 90 and job.show("Restarts") == "0"
    report = job.log.split("failed with exit code")[1]
    held_up_by = re.search(r"Held up by (rank 2 on node2, .*); (rank 3 on node2, .*) \(silent: frozen", report)
    assert held_up_by and all(re.search(r"in phase '.*\d+", held_up_by[i]) for i in (1, 2)), report


def test_a_node_without_the_shared_folder_is_found_before_the_model_is_touched(
    cluster: Cluster, tmp_path: Path
) -> None:
    """S8."""
    pid = (cluster.home / "run/node2.nspid").read_text().strip()
    mount = ("nsenter", "-t", pid, "-m", "--", "mount", "-t", "tmpfs", "none", str(tmp_path))
    cluster.inside(*mount)
    try:
        job = cluster.submit(tmp_path / "run", **KEYS)
        ended = job.ended("FAILED")
    finally:
        cluster.inside("nsenter", "-t", pid, "-m", "--", "umount", str(tmp_path))
    assert job.show("Restarts") == "0" and ended.code == 2
    said = job.log.split("failed with exit code 2\n")[1]
    assert f"output_dir {tmp_path}/run is not the same folder on all nodes" in said
    assert "(node1) wrote there is not on node2; set output_dir to a shared file system" in said
    assert not (tmp_path / "run").exists() and "weights streamed" not in ended.log


def test_two_jobs_on_the_same_nodes_at_once(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--gpus-per-node=1", "--oversubscribe")
    keys = {**KEYS, "max_steps": 6}
    jobs = [cluster.submit(tmp_path / name, *options, **keys) for name in ("one", "two")]
    jobs[0].until(lambda: all(job.show("JobState") == "RUNNING" for job in jobs), 30)
    for job in jobs:
        ended = job.ended("COMPLETED")
        assert "ranks 0 on node1, 1 on node2" in ended.log and ended.column("step")[-1] == 6


def test_a_bad_config_is_said_at_once_and_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path / "run", **KEYS, learning_rat=1, global_batch_siz=3)
    assert job.ended("FAILED").code == 2
    said = job.log.split("failed with exit code 2\n")[1]
    assert job.show("Restarts") == "0"
    assert said.count("unknown key 'learning_rat'") == said.count("unknown key 'global_batch_siz'") == 1
    assert "Traceback" not in job.everything


@pytest.mark.parametrize("options", [("llama70b_1node.sh",), ("llama70b_2node.sh", "--nodes=1")])
def test_one_node(options: tuple[str, ...], cluster: Cluster, tmp_path: Path) -> None:
    """The number of nodes is Slurm's to say, not the script's name's."""
    ended = cluster.submit(tmp_path / "run", *options[1:], script=options[0], **{**KEYS, "max_steps": 3})
    assert "ranks 0-1 on node" in ended.ended("COMPLETED").log


def test_submitted_from_elsewhere_it_says_so(cluster: Cluster, tmp_path: Path) -> None:
    script = cluster.project / "slurm/llama70b_2node.sh"
    cluster.run("sbatch", "--wait", "--gpus-per-node=2", "--cpus-per-task=2", script, cwd=tmp_path, check=False)
    (log,) = tmp_path.glob("llama70b-*.log")
    assert log.read_text().startswith(f"recipe: submitted from {tmp_path}, which is not the project's folder")
