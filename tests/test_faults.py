"""What breaks under a run: killed ranks, broken files, full and read-only disks, a folder that goes, a second run, a
clock that goes back. The run goes on, or the next start goes on from a whole checkpoint, with the undisturbed curve."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipe.checkpoint.find import newest_complete, step_of
from tests.conftest import Finished, Launcher

pytestmark = pytest.mark.slow
EXACT = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "batch_fingerprints")
KEYS: dict[str, Any] = {"max_steps": 10, "save_steps": 1, "save_total_limit": 2, "export": False}
KILLS, SEED = 10, 4


def curve(run: Finished) -> list[dict[str, Any]]:
    return [{key: line[key] for key in EXACT} for line in run.metrics if "loss" in line]


@pytest.fixture(scope="module")
def whole(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve of the run that nothing disturbs."""
    return curve(launch(tmp_path_factory.mktemp("whole") / "run", **KEYS).ok())


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher's ranks, in order."""
    found = {}
    for child in psutil.Process(launcher.pid).children(recursive=True):
        try:
            environ = child.environ()
        except psutil.Error:
            continue
        if "RANK" in environ and child.ppid() == launcher.pid:
            found[int(environ["RANK"])] = child
    return [found[rank] for rank in sorted(found)]


def last_step(run_dir: Path) -> int:
    """Of the checkpoints that are published, whole or not."""
    return max((int(path.name.split("-")[1]) for path in run_dir.glob("checkpoint-*[0-9]") if path.is_dir()), default=0)


def test_killed_at_random_moments(launch: Launcher, tmp_path: Path) -> None:
    """One rank or all, while they check, load, train and save."""
    keys = {**KEYS, "max_steps": 100, "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole = curve(launch(tmp_path / "whole", **keys).ok())
    draw = random.Random(SEED)
    run_dir, log, reached, after = tmp_path / "run", tmp_path / "log", 0, []
    for number in range(1, KILLS + 1):
        run = launch.warm(run_dir, log=log, **keys)
        # A fast machine is not to finish the run before it has been killed as often as that.
        share = number * keys["max_steps"] // (KILLS + 2)
        end = time.monotonic() + draw.uniform(0.5, 4)
        while time.monotonic() < end and last_step(run_dir) < share:
            time.sleep(0.01)
        running = [rank.exitcode for rank in run.ranks] == [None, None]
        run.kill(*draw.choice([[0], [1], [0, 1]]))
        assert run.wait(60) in (-signal.SIGKILL, 1) and running, log.read_text()[-3000:]
        newest, _ = newest_complete(run_dir)
        now = 0 if newest is None else step_of(newest)
        after.append(now)
        assert now >= reached, f"checkpoint-{reached} is lost"
        reached = now
    print(f"seed {SEED}, newest checkpoint after each kill: {after}")
    assert 0 < reached < keys["max_steps"], f"no kill met a run that had saved, or the last ones met none: {after}"
    run = launch(run_dir, **keys).ok()
    assert f"resuming from {run_dir}/checkpoint-{reached}" in run.log
    assert curve(run) == whole


def test_a_flipped_bit_is_found_and_the_one_before_goes_on(
    launch: Launcher, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    launch(tmp_path / "run", stop_at_step=6, **KEYS).ok()
    shard = tmp_path / "run/checkpoint-6/optimizer_0/__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    run = launch(tmp_path / "run", **KEYS).ok()
    assert "passed over checkpoint-6: optimizer_0/__1_0.distcp has other content than was written" in run.log
    assert "checkpoint-5: step 5, written by 2 ranks" in run.log
    assert curve(run) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"only root may mount a small disk, and this needs one: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    ("breaks", "said", "mends"),
    [
        ("dd if=/dev/zero of={disk}/filler bs=64k status=none || true", "No space left on device", "rm {disk}/filler"),
        # A mount of itself over it: the run holds its lock file open, which keeps the disk's own from changing.
        ("mount --bind {disk} {disk} && mount -o remount,bind,ro {disk}", "Read-only file system", "umount {disk}"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_no_more(
    breaks: str, said: str, mends: str, launch: Launcher, whole: list[dict[str, Any]], small_disk: Path
) -> None:
    """Tried once more, said, and then the run ends as a user's mistake does; what was saved is unharmed."""
    run_dir = small_disk / "run"
    # The metrics are on that disk too; a save every fifth step, so that step 6 is not in a save.
    keys = {**KEYS, "save_steps": 5}
    run = launch(run_dir, disturb=f"0:saving checkpoint 10:sh {breaks.format(disk=small_disk)}", **keys)
    assert run.code == 2, run.log[-3000:]
    assert "trying once more" in run.log and said in run.log
    assert "checkpoint-10 could not be written, twice" in run.log and "Mend output_dir's disk" in run.log
    assert "Traceback" not in run.log
    subprocess.run(mends.format(disk=small_disk), shell=True, check=True)
    newest, _ = newest_complete(run_dir)
    assert newest == run_dir / "checkpoint-5"
    assert curve(launch(run_dir, **keys).ok()) == whole


def test_a_folder_that_is_removed_under_the_run(launch: Launcher, tmp_path: Path) -> None:
    """Training goes on, makes it again, and saves into it."""
    run_dir = tmp_path / "run"
    run = launch(run_dir, disturb=f"0:training step 4:sh until rm -rf {run_dir}; do true; done", **KEYS).ok()
    newest, passed_over = newest_complete(run_dir)
    assert newest == run_dir / "checkpoint-10" and not passed_over
    assert "was removed under the run" in run.log
    assert (run_dir / "config.yaml").is_file() and (run_dir / "run.json").is_file()


def test_two_runs_on_one_folder(launch: Launcher, tmp_path: Path) -> None:
    """The second is refused, with who is there; a killed owner holds nothing."""
    run_dir = tmp_path / "run"
    with launch.start(run_dir, disturb="0:training step 4:SIGSTOP", **KEYS) as first:
        while not (run_dir / "checkpoint-2").exists():
            assert first.poll() is None
            time.sleep(0.1)
        second = launch(run_dir, **KEYS)
        assert second.code == 2
        owner = re.search(r"is in use by another run \(host (\S+), pid (\d+)\)", second.log)
        assert owner and owner[1] == os.uname().nodename
        owners = [rank.pid for rank in ranks_of(first)]
        assert int(owner[2]) == owners[0]
        for process in psutil.Process(first.pid).children(recursive=True):
            process.kill()
        first.communicate(timeout=60)
    assert "resuming from" in launch(run_dir, **KEYS).ok().log


def test_a_clock_that_goes_back(launch: Launcher, whole: list[dict[str, Any]], tmp_path: Path) -> None:
    """A day back on one rank in the middle of a run, a week back in its next start, and newer files that look older:
    nothing here goes by the time of day."""
    run = launch(tmp_path / "run", disturb="0:training step 4:clock -86400", **{**KEYS, "stop_at_step": 6}).ok()
    os.utime(tmp_path / "run/checkpoint-6", (1, 1))
    run = launch(tmp_path / "run", disturb="0::clock -604800", **KEYS).ok()
    assert "checkpoint-6: step 6" in run.log and curve(run) == whole


def test_the_rest_of_an_earlier_save_is_removed_and_said(launch: Launcher, tmp_path: Path) -> None:
    launch(tmp_path / "run", stop_at_step=2, **KEYS).ok()
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "run/checkpoint-3.tmp")
    run = launch(tmp_path / "run", stop_at_step=3, **KEYS).ok()
    assert "removed checkpoint-3.tmp, left by an interrupted save" in run.log
