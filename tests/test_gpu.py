"""What needs GPUs: run on a machine that has some (`pytest -m gpu`); elsewhere each test skips and says so."""

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
