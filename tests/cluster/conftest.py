"""A real Slurm of two nodes on this machine (cluster.sh), and a copy of the project to submit from."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Finished, Launcher

PACKAGES = ("slurm-wlm", "munge", "iproute2", "util-linux")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "a test cluster makes network namespaces, which needs root"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: apt-get install {' '.join(PACKAGES)})"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True)
    return f"no namespaces here: {tried.stderr.decode().strip()}" if tried.returncode else None


@dataclass
class Cluster:
    """The running cluster.

    Attributes:
        home: its files; `home`/bin has the clients.
        project: the copy of the project that jobs are submitted from.
        defaults: keys of every run.
    """

    home: Path
    project: Path
    defaults: dict[str, Any]

    def run(self, *command: str | Path, check: bool = True, cwd: Path | None = None) -> str:
        env = {**os.environ, "PATH": f"{self.home}/bin:{os.environ['PATH']}", "SLURMTEST_DIR": str(self.home)}
        done = subprocess.run(
            list(map(str, command)), cwd=cwd or self.project, env=env, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def inside(self, *command: str, check: bool = True) -> str:
        """Where the daemons and all jobs are."""
        return self.run(self.project / "tests/cluster/cluster.sh", "exec", *command, check=check)

    def submit(self, run_dir: Path, *options: str, script: str = "llama70b_2node.sh", **keys: Any) -> "Job":
        """The project's own script, with two ranks a node for eight GPUs."""
        values = {**self.defaults, "output_dir": run_dir, **keys}
        config = ["configs/quickstart.yaml", *(part for key, value in values.items() for part in (f"--{key}", value))]
        sized = ["--gpus-per-node=2", "--cpus-per-task=2", *options]
        said = self.run("sbatch", *sized, f"slurm/{script}", *config)
        return Job(self, int(re.findall(r"\d+", said)[0]), run_dir)


@dataclass
class Job:
    cluster: Cluster
    number: int
    run_dir: Path

    def show(self, key: str) -> str:
        return dict(re.findall(r"(\S+?)=(\S*)", self.cluster.run("scontrol", "show", "job", str(self.number))))[key]

    @property
    def log(self) -> str:
        path = self.cluster.project / f"llama70b-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def logs(self) -> Path:
        return self.cluster.project / "logs" / f"llama70b-{self.number}"

    @property
    def everything(self) -> str:
        return self.log + "".join(f"\n== {path}\n{path.read_text()}" for path in sorted(self.logs.glob("node*.log")))

    def until(self, what: Callable[[], Any], seconds: float = 120, every: float = 0.2) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"not within {seconds} s; {self.show('JobState')}\n{self.everything[-5000:]}"
            time.sleep(every)

    def until_step(self, step: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        self.until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), every=0.02)

    def signal(self, *how: str) -> None:
        self.cluster.run("scancel", *how, str(self.number))

    def ended(self, *states: str, seconds: float = 240) -> Finished:
        """Wait until it is in one of `states`; its log is those of the job and of the nodes."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.show("JobState") in over, seconds)
        assert self.show("JobState") in states, self.everything[-8000:]
        return Finished(self.run_dir, int(self.show("ExitCode").split(":")[0]), self.everything)

    def process_of(self, rank: int) -> str:
        """The rank's process number, as the cluster counts."""
        ranks = f"grep -lz '^RANK={rank}$' /proc/[0-9]*/environ 2>/dev/null"
        script = f"{ranks} | xargs -r grep -lz '^SLURM_JOB_ID={self.number}$'"
        found = self.cluster.inside("bash", "-c", script, check=False).split()
        (pid,) = [path.split("/")[2] for path in found]
        return pid


@pytest.fixture(scope="session")
def cluster(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    why = missing()
    if why is not None and os.environ.get("CI"):
        pytest.fail(why)
    if why is not None:
        pytest.skip(why)
    project = tmp_path_factory.mktemp("cluster") / "project"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "logs", "*.log", "site.env", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, project, ignore=ignored)
    venv = Path(sys.executable).parent.parent
    # Up to date, or the first job would install the copy of the project into it.
    subprocess.run(["bash", ROOT / "launch/env.sh"], env={**os.environ, "VENV": str(venv)}, check=True)
    (project / "slurm/site.env").write_text(f"export SPREAD=fsdp1_cpu_2rank VENV={venv} OMP_NUM_THREADS=1\n")
    home = Path(tempfile.mkdtemp(dir="/tmp", prefix="slurm-"))  # a short path: sockets lie under it
    script = project / "tests/cluster/cluster.sh"
    env = {**os.environ, "SLURMTEST_DIR": str(home), "SLURMTEST_GPUS": "2"}
    started = subprocess.run([script, "start"], env=env, capture_output=True, text=True)
    logs = "".join(f"\n{path}:\n{path.read_text()[-2000:]}" for path in home.glob("log/*"))
    assert started.returncode == 0, started.stderr + logs
    print(started.stdout)
    try:
        yield Cluster(home, project, {**launch.defaults, "global_batch_size": 16})
    finally:
        subprocess.run([script, "purge"], env=env, check=True)
