"""The likeliest mistakes, through the real entry on two ranks: at once, on all ranks, with what to change, nothing
half-written."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import Finished, Launcher, write_chats, write_model

pytestmark = pytest.mark.slow


def refused(run: Finished, *said: str) -> None:
    assert run.code != 0
    for text in said:
        assert text in run.log, run.log[-3000:]
    assert 'Traceback (most recent call last):\n  File "<frozen runpy>"' not in run.log, "a mistake is no crash"
    assert not list(run.run_dir.glob("checkpoint-*")) and not (run.run_dir / "export").exists()


def test_several_mistakes_are_listed_at_once(launch: Launcher, tmp_path: Path) -> None:
    run = launch(
        tmp_path / "run",
        global_batch_size=7,
        optim="adafactor",
        attn_implementation="flash_attention_2",
        model_name_or_path=tmp_path / "nowhere",
    )
    refused(
        run,
        "4 problems",
        "global_batch_size 7 is not a multiple of 2 ranks x 1 samples",
        "set it to 6 or 8",
        "optim 'adafactor' is not known to resume under FSDP",
        "attn_implementation is flash_attention_2 and there is no GPU",
        "is no folder and no hub id",
    )


def test_typo(launch: Launcher, tmp_path: Path) -> None:
    refused(launch(tmp_path / "run", learning_rat=1e-3), "unknown key 'learning_rat'", "'learning_rate'")


def test_folder_without_config(launch: Launcher, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").unlink()
    refused(launch(tmp_path / "run", model_name_or_path=folder), "has no config.json")


def test_truncated_weights(launch: Launcher, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    refused(launch(tmp_path / "run", model_name_or_path=folder), "model.safetensors has", "fetch the model again")


@pytest.mark.parametrize("rows", (0, 1))
def test_empty_and_one_row_data(rows: int, launch: Launcher, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "data.jsonl", rows)
    run = launch(tmp_path / "run", dataset_name=data)
    refused(run, "data.jsonl") if rows == 0 else refused(run, "global_batch_size", "1 ")


def test_row_without_an_answer(launch: Launcher, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "data.jsonl", 10)
    with data.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    refused(launch(tmp_path / "run", dataset_name=data), "data.jsonl:11: no answer: there is no assistant's message\n")


def test_other_runs_folder(launch: Launcher, tmp_path: Path) -> None:
    launch(tmp_path / "run", stop_at_step=2).ok()
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    run = launch(tmp_path / "run", seed=7)
    assert run.code != 0 and "belongs to a different run (seed: 42 then, 7 now)" in run.log
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


def test_optimizer_state_missing_is_an_error(launch: Launcher, tmp_path: Path) -> None:
    """R1: never go on with empty moments."""
    launch(tmp_path / "run", stop_at_step=2).ok()
    folder = tmp_path / "run/checkpoint-2"
    shutil.rmtree(folder / "optimizer_0")
    run = launch(tmp_path / "run", resume_from_checkpoint=folder)
    assert run.code != 0 and "is not a whole checkpoint" in run.log and "optimizer_0" in run.log


def test_resume_passes_over_broken_checkpoints(launch: Launcher, tmp_path: Path) -> None:
    """S11: newest complete, and it says which it skipped and why."""
    launch(tmp_path / "run", stop_at_step=3, save_steps=1).ok()
    shard = tmp_path / "run/checkpoint-3/pytorch_model_fsdp_0/__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    (tmp_path / "run/checkpoint-2/manifest.json").unlink()
    (tmp_path / "run/checkpoint-9.tmp").mkdir()
    run = launch(tmp_path / "run", save_steps=1).ok()
    assert "passed over checkpoint-3" in run.log and "__1_0.distcp has" in run.log
    assert "passed over checkpoint-2: it has no manifest.json" in run.log
    assert "checkpoint-1: step 1" in run.log and "removed checkpoint-9.tmp" in run.log
    assert run.column("step") == [1, 2, 3, 4]


def test_loss_that_is_not_finite_stops_before_the_optimizer(launch: Launcher, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run = launch(tmp_path / "run", model_name_or_path=folder)
    assert run.code != 0 and "gradient norm is nan in step 1, before the optimizer stepped" in run.log
    assert not list((tmp_path / "run").glob("checkpoint-*")) and not (tmp_path / "run/export").exists()
