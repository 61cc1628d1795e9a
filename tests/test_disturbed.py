"""Two real ranks, of which one is asked to stop, dies, or hangs, in each phase of a run."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.checkpoint.find import candidates, newest_complete
from tests.conftest import Finished, Launcher

pytestmark = pytest.mark.slow
EXACT = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")
KEYS: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "eval_strategy": "steps", "eval_samples": 8}
KEYS["per_device_eval_batch_size"] = 1
COME_BACK, LEAVE = 75, 143


@pytest.fixture(scope="module")
def whole(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run that nothing disturbs."""
    return launch(tmp_path_factory.mktemp("whole") / "run", **KEYS).ok()


def losses(run: Finished) -> list[dict[str, Any]]:
    return [{key: line[key] for key in EXACT} for line in run.metrics if "loss" in line]


def same(one: Finished, other: Finished) -> bool:
    weights = [load_file(run.run_dir / "export" / "model.safetensors") for run in (one, other)]
    return losses(one) == losses(other) and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("1::SIGUSR1", None),  # before the checks
        ("1:loading:SIGUSR1", None),
        ("1:training step 3:SIGUSR1", 3),
        ("1:evaluating batch 2:SIGUSR1", 3),
        ("1:saving checkpoint 2:SIGUSR1", 2),
        ("0:exporting:SIGUSR1", 6),
    ],
)
def test_asked_on_one_rank_all_stop_at_the_same_step_and_come_back(
    where: str, step: int | None, whole: Finished, launch: Launcher, tmp_path: Path
) -> None:
    """R10: one complete checkpoint, the exit code that asks for a requeue, and then the run that never stopped."""
    stopped = launch(tmp_path / "run", disturb=where, **KEYS)
    assert stopped.code == COME_BACK, stopped.log[-3000:]
    assert stopped.log.count("stopped, as asked by SIGUSR1") == 1 and "Traceback" not in stopped.log
    checkpoint, passed_over = newest_complete(tmp_path / "run")
    assert not passed_over and not list((tmp_path / "run").glob("*.tmp/manifest.json"))
    assert (checkpoint and checkpoint.name) == (step and f"checkpoint-{step}")
    assert not (tmp_path / "run/export").exists()
    if step:
        assert [line["step"] for line in losses(stopped)] == list(range(1, step + 1))
        assert same(launch(tmp_path / "run", **KEYS).ok(), whole)


def test_sigterm_saves_and_leaves(launch: Launcher, tmp_path: Path) -> None:
    stopped = launch(tmp_path / "run", disturb="0:training step 3:SIGTERM", **KEYS)
    assert stopped.code == LEAVE and "stopped, as asked by SIGTERM: step 3 is in checkpoint-3" in stopped.log


def test_a_request_in_a_file_stops_a_start_that_has_not_begun(launch: Launcher, tmp_path: Path) -> None:
    """As the batch script writes it; the ranks were not even there."""
    file = tmp_path / "stop"
    file.write_text("SIGUSR1\n")
    stopped = launch(tmp_path / "run", disturb="", env={"STOP_FILES": str(file)}, **KEYS)
    assert stopped.code == COME_BACK and not (tmp_path / "run").exists()


def test_without_checkpoints_an_export_goes_on(launch: Launcher, tmp_path: Path) -> None:
    """Left, it would be lost: there is nothing to make it from."""
    keys = {**KEYS, "save_strategy": "no"}
    run = launch(tmp_path / "run", disturb="0:exporting:SIGUSR1", **keys).ok()
    assert (run.run_dir / "export/model.safetensors").is_file() and not candidates(run.run_dir)


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise", 1, ["failed, first of all rank 1 on", "RuntimeError: disturbed, as the test wants"]),
        ("SIGKILL", 137, ["failed, first of all rank 1 on", "killed by SIGKILL", "out of memory?"]),
    ],
)
def test_a_rank_that_dies_takes_the_others_with_it(
    what: str, code: int, said: list[str], launch: Launcher, tmp_path: Path
) -> None:
    """N7: within a minute, with the failing rank's own words last, and the checkpoint before it unharmed."""
    env = {"REPORTS": str(tmp_path / "reports")}
    began = time.monotonic()
    run = launch(tmp_path / "run", disturb=f"1:training step 4:{what}", env=env, **KEYS)
    assert time.monotonic() - began < 60
    assert run.code == code
    last = run.log[run.log.rindex("recipe: failed") :]
    assert all(text in last for text in said), last
    reports = sorted((tmp_path / "reports").iterdir())
    assert reports[0].read_text().startswith("rank 1 on ") and said[1] in reports[0].read_text()
    checkpoint, _ = newest_complete(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"


def test_a_rank_that_hangs_is_named(launch: Launcher, tmp_path: Path) -> None:
    began = time.monotonic()
    run = launch(tmp_path / "run", disturb="0:training step 4:SIGSTOP", hang_timeout=12, **KEYS)
    assert time.monotonic() - began < 120 and run.code == 1, run.log[-3000:]
    assert "recipe: failed, first of all rank 1 on " in run.log
    assert "Held up by rank 0 on" in run.log and "(silent: frozen, or its node is out of reach)" in run.log
    assert "last heard of in phase 'training step 4'" in run.log
    assert "Timeout" not in run.log, "the collective had not given up yet"


def test_a_mistake_is_said_once_and_its_code_is_kept(launch: Launcher, tmp_path: Path) -> None:
    run = launch(tmp_path / "run", disturb="", learning_rat=1)
    assert run.code == 2 and run.log.count("unknown key 'learning_rat'") == 1 and "Traceback" not in run.log
