"""A run's own forecast: from its arguments, and against what its first steps show."""

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, TrainerControl, TrainerState

from recipe.arguments import parse_arguments
from recipe.callbacks import forecast as module
from recipe.callbacks.forecast import Forecast, ForecastCheck, compare
from recipe.planning import forecast
from tests.conftest import Launcher
from tests.test_callbacks import ARGS, a_meter

GIB = 2**30


def test_apart_is_a_warning():
    foreseen = Forecast(memory=10 * GIB, step_seconds=2.0, assumed="on a card")
    assert compare(foreseen, 10.4 * GIB, 2.1) == [
        "memory predicted 10.00 GiB, measured 10.40 (+4%); a step predicted 2.00 s, measured 2.10 (+5%)"
    ]
    said = compare(foreseen, 12 * GIB, 3.0)
    assert ["memory is +20%" in line for line in said] == [False, True, False]
    assert "takes 50% longer than `recipe plan` predicts (on a card)" in said[2]
    assert len(compare(foreseen, 10 * GIB, 1.0)) == 1, "faster is no reason to warn"
    assert "a step" not in compare(Forecast(10 * GIB, None, ""), 10 * GIB, 3.0)[0]


def test_it_compares_once_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(module.tqdm, "write", lines.append)
    meter = a_meter()
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    check = ForecastCheck(Forecast(1e15, 1.0, ""), meter)
    for seconds in (100.0, 1.0, 2.0, 3.0, 50.0):
        meter.last_seconds = seconds
        check.on_step_end(ARGS, state, control)
    assert len(lines) == 3, "what was seen, and two warnings"
    assert "measured 2.00 (+100%)" in lines[0], "the first step does not count"
    ForecastCheck(None, meter).on_step_end(ARGS, state, control)
    assert len(lines) == 3


def test_a_gpus_time_is_foreseen_and_a_cpus_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    }
    monkeypatch.setattr(os, "environ", os.environ | environment)
    keys = ["--output_dir", str(tmp_path), "--model_name_or_path", "x", "--global_batch_size", "16", "--bf16", "true"]
    arguments = parse_arguments([*keys, "--max_length", "2048"])
    config = LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    config.intermediate_size = 28672
    train = arguments[2]
    monkeypatch.setattr(type(train), "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    found = forecast(arguments, config)
    assert found is not None and found.step_seconds is not None
    assert 60 < found.memory / GIB < 80
    assert 2 < found.step_seconds < 20
    assert "400 Gb/s" in found.assumed
    assert len(found.lines) == 1 and "GiB, a100-80gb (tight)" in found.lines[0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-PCIE-40GB")
    assert "does not fit" in "\n".join(forecast(arguments, config).lines)
    monkeypatch.setattr(type(train), "device", torch.device("cpu"), raising=False)
    on_cpu = forecast(arguments, config)
    assert on_cpu is not None and on_cpu.step_seconds is None
    monkeypatch.setattr(type(config), "model_type", "unheard-of")
    assert forecast(arguments, config) is None


def test_a_run_says_it(launch: Launcher, tmp_path: Path) -> None:
    run = launch(tmp_path / "run", max_steps=4, save_strategy="no", export=False).ok()
    (line,) = (line for line in run.log.splitlines() if "memory predicted" in line)
    assert "measured" in line
