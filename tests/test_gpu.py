"""What needs GPUs: run on a machine that has some (`pytest -m gpu`); elsewhere each test skips and says so."""

import time
from pathlib import Path

import pytest
import torch

from tests.conftest import Launcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
SPREADS = ("fsdp1_1node_8gpu", "fsdp2_1node_8gpu")
EXACT = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")


def ranks() -> tuple[str, ...]:
    return ("--num_processes", str(torch.cuda.device_count()))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("optim", ("adamw_torch_fused", "paged_adamw_32bit", "adamw_8bit"))
def test_bf16_run_resumes_exactly(spread: str, optim: str, launch: Launcher, tmp_path: Path) -> None:
    """Also: FSDP1's own broadcast (`sync_module_states`), NCCL, and the check of the weights on every rank."""
    keys = {"spread": spread, "launch": ranks(), "optim": optim, "bf16": True, "max_steps": 8}
    whole = launch(tmp_path / "whole", **keys).ok()
    assert "compute in bfloat16" in whole.log and "equal the file on every rank" in whole.log
    launch(tmp_path / "parts", stop_at_step=4, **keys).ok()
    resumed = launch(tmp_path / "parts", **keys).ok()
    assert [[line[k] for k in EXACT] for line in resumed.metrics] == [
        [line[k] for k in EXACT] for line in whole.metrics
    ]


@pytest.mark.parametrize("spread", SPREADS)
def test_parameters_offloaded_to_host_memory(spread: str, launch: Launcher, tmp_path: Path) -> None:
    offload = (*ranks(), "--fsdp_offload_params", "true")
    kept = launch(tmp_path / "kept", spread=spread, launch=ranks(), bf16=True).ok()
    run = launch(tmp_path / "offloaded", spread=spread, launch=offload, bf16=True).ok()
    assert run.column("loss") == pytest.approx(kept.column("loss"), abs=1e-3)


def test_flash_attention_sees_packed_documents_as_sdpa_does(launch: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    keys = {"spread": SPREADS[0], "launch": ranks(), "bf16": True, "packing": True, "global_batch_size": 4}
    keys["per_device_train_batch_size"] = max(1, 4 // torch.cuda.device_count())
    sdpa = launch(tmp_path / "sdpa", **keys).ok()
    flash = launch(tmp_path / "flash", attn_implementation="flash_attention_2", **keys).ok()
    assert flash.column("loss") == pytest.approx(sdpa.column("loss"), abs=2e-2)


@pytest.mark.parametrize("spread", SPREADS)
def test_a_request_to_stop_and_a_resume(spread: str, launch: Launcher, tmp_path: Path) -> None:
    keys = {"spread": spread, "launch": ranks(), "bf16": True, "max_steps": 8}
    whole = launch(tmp_path / "whole", disturb="", **keys).ok()
    stopped = launch(tmp_path / "parts", disturb="0:training step 3:SIGUSR1", **keys)
    assert stopped.code == 75 and "step 3 is in checkpoint-3" in stopped.log
    resumed = launch(tmp_path / "parts", disturb="", **keys).ok()
    assert resumed.column("loss") == whole.column("loss")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("what", "code", "limit"), [("SIGKILL", 137, 60), ("SIGSTOP", 1, 120)])
def test_a_rank_that_dies_or_hangs_under_nccl(
    what: str, code: int, limit: float, launch: Launcher, tmp_path: Path
) -> None:
    """Its peers wait in a kernel, which no signal reaches."""
    keys = {"spread": SPREADS[0], "launch": ranks(), "bf16": True, "max_steps": 8, "hang_timeout": 10}
    began = time.monotonic()
    run = launch(tmp_path / "run", disturb=f"1:training step 3:{what}", **keys)
    assert run.code == code and time.monotonic() - began < limit
    assert "killed by SIGKILL" in run.log if what == "SIGKILL" else "Held up by rank 1 on" in run.log
