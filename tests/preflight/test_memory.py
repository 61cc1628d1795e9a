from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig

from recipe.arguments import parse_arguments
from recipe.model import meta_model
from recipe.preflight import memory


def problems(
    free: int, monkeypatch: pytest.MonkeyPatch, on_gpu: bool = True, local: int = 8, **keys: object
) -> list[str]:
    """Of Llama-2-70B on 16 ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(memory, "available", lambda: free)
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    _, model, train = parse_arguments([part for key, value in keys.items() for part in (f"--{key}", str(value))])
    return memory.copy_problems(meta_model(config, None, torch.float32), model, train, 16, on_gpu)


def test_a_node_needs_room_for_its_share_of_weights_and_moments(monkeypatch):
    """68.98e9 parameters x 12 bytes x 8 of 16 ranks = 413.9 GB."""
    (problem,) = problems(413_000_000_000, monkeypatch)
    assert (
        problem.startswith("async_save copies 413.9 GB of a node's weights and moments") and "413.0 GB are" in problem
    )
    assert "set async_save: false" in problem
    assert problems(414_000_000_000, monkeypatch) == []
    assert problems(60_000_000_000, monkeypatch, local=1) == []


def test_without_a_copy_nothing_is_needed(monkeypatch):
    assert problems(0, monkeypatch, async_save=False) == []
    assert problems(0, monkeypatch, save_strategy="no") == []


def test_bf16_weights_and_moments_take_half(monkeypatch):
    assert problems(207_000_000_000, monkeypatch, param_dtype="bfloat16") == []
    assert problems(206_000_000_000, monkeypatch, param_dtype="bfloat16")


def test_cpu_ranks_train_in_the_same_memory(monkeypatch):
    """Weights, gradients and moments (16 bytes) beside the copy (12)."""
    (problem,) = problems(900_000_000_000, monkeypatch, on_gpu=False)
    assert "beside the 551.8 GB that it trains" in problem
    assert problems(966_000_000_000, monkeypatch, on_gpu=False) == []


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_MINE", tmp_path / "mine")
    return tmp_path


def limit(folder: Path, most: str, used: int, names: tuple[str, str] = ("memory.max", "memory.current")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")


def test_the_tightest_of_the_control_groups_counts(groups):
    """Slurm limits a job, a container its host's service: a group above."""
    (groups / "mine").write_text("0::/slurm/job_7/step_0\n")
    limit(groups / "cgroup/slurm/job_7/step_0", "max", 5)
    limit(groups / "cgroup/slurm/job_7", "1000", 400)
    limit(groups / "cgroup/slurm", "900000", 10)
    assert memory.available() == 600


def test_control_groups_of_version_1(groups):
    (groups / "mine").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/a\n0::/\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit(groups / "cgroup/memory/docker/a", "2000", 500, names)
    assert memory.available() == 1500


def test_without_control_groups_it_is_the_machines(groups):
    assert memory.available() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
