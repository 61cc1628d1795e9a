"""`recipe plan`: what a user asks, and what it refuses, which is what training refuses."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.arguments import parse_arguments
from recipe.cli import main
from recipe.data import prepare
from recipe.model import load_tokenizer
from tests.conftest import ROOT

MISSION = ["--config", str(ROOT / "configs/llama2_70b.yaml"), "--gpu", "a100-80gb"]
TWO_NODES = ["--accelerate", str(ROOT / "configs/accelerate/fsdp1_2node_16gpu.yaml")]


@pytest.fixture(autouse=True)
def environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command makes of the accelerate file what a launcher makes of it, for its own process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the planner asks nobody")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["plan", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_mission(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *MISSION, *TWO_NODES, "--tokens", "16.4e6")
    assert found["setup"]["world_size"] == 16
    moments = found["memory"]["moments"]
    assert moments["optimizer step"]["weights"] / 2**30 == pytest.approx(16.06, abs=0.01)
    assert moments["optimizer step"]["moments"] / 2**30 == pytest.approx(32.12, abs=0.01)
    assert found["host"]["checkpoint"] == 68_976_648_192 * 12
    assert found["verdict"] == "tight", "64 GiB of states, and one of two units in all forms"
    assert 0.5 < found["run"]["hours"] < 3, "the original took 13.5 h"
    assert found["run"]["gpu_hours"] == found["run"]["hours"] * 16


def test_it_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MISSION, *TWO_NODES, "--tokens", "16.4e6"]) == 0
    said = capsys.readouterr().out
    for part in (
        "FSDP1 FULL_SHARD on 16 a100-80gb (2 x 8)",
        "tight: needs",
        "backward, last layer",
        "host memory",
        "MFU",
    ):
        assert part in said
    assert "it should run; the smallest changes that leave room" in said
    assert max(map(len, said.splitlines())) < 180


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
@pytest.mark.parametrize("spread", sorted(path.name for path in (ROOT / "configs/accelerate").glob("*gpu.yaml")))
def test_every_run_on_every_spread(config: str, spread: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The batch may not divide, and a model of one's own may not be there; then it says so."""
    model = [] if "llama" in config else ["--model", "smollm2-135m"]
    args = [str(ROOT / "configs" / config), "--accelerate", str(ROOT / "configs/accelerate" / spread), "--gpu", "h200"]
    code = main(["plan", "--config", *args, *model])
    captured = capsys.readouterr()
    assert code == 0 or (code == 2 and "is not a multiple of" in captured.err and captured.err.count("\n") == 1)


def test_a_model_by_name_by_folder_and_by_dimensions(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--gpu", "rtx-4090", "--gpus_per_node", "2", "--max_length", "64", "--bf16", "true"]
    known = plan(capsys, "--model", "meta-llama/Llama-2-7b-chat-hf", *args)
    dimensions = plan(capsys, "--model", "hidden=4096,layers=32,heads=32,intermediate=11008,vocab=32000", *args)
    assert known["model"]["parameters"] == dimensions["model"]["parameters"] == 6_738_415_616
    assert known["memory"] == dimensions["memory"]
    tiny = plan(capsys, "--model", str(tiny_model), *args)
    assert tiny["model"]["name"] == tiny_model.name
    assert tiny["verdict"] == "fits"


def test_all_that_is_wrong_comes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--gpu", "a100-8gb", "--interconnect", "token-ring", "--accelerate", "none.yaml", "--model", "lama-2-70b"]
    said = refused(capsys, *args, "--optim", "sgd", "--max_length", "2048")
    for part in (
        "--gpu 'a100-8gb' is not known; the nearest is 'a100-80gb'",
        "--interconnect 'token-ring' is not known",
        "no config file at 'none.yaml'; give --accelerate an existing YAML file",
        "the dimensions of 'lama-2-70b' are not known here (the nearest known name is 'llama-2-70b')",
    ):
        assert part in said
    assert "5 problems" in said or "4 problems" in said


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["--global_batch_size", "60"], "global_batch_size 60 is not a multiple of 16 ranks x 2 samples"),
        (["--optim", "sgd"], "optim 'sgd' is not known to resume under FSDP"),
        (["--max_length", "8192"], "max_length is 8192 and the model has 4096 positions"),
        (["--learning_rat", "1"], "unknown key 'learning_rat' on the command line"),
        (["--packing_strategy", "wrapped"], "packing_strategy 'wrapped' is not supported"),
        (["--fp16", "true"], "fp16 is not supported"),
    ],
)
def test_it_refuses_what_training_refuses(keys: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, *MISSION, *TWO_NODES, *keys)


def test_a_spread_that_training_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "configs/accelerate/fsdp1_2node_16gpu.yaml").read_text()
    file = tmp_path / "spread.yaml"
    file.write_text(text.replace("SHARDED_STATE_DICT", "FULL_STATE_DICT"))
    assert "fsdp_state_dict_type is FULL_STATE_DICT; set SHARDED_STATE_DICT" in refused(
        capsys, *MISSION, "--accelerate", str(file)
    )
    file.write_text(text.replace("num_processes: 16", "num_processes: 15"))
    assert "num_processes 15" in refused(capsys, *MISSION, "--accelerate", str(file))


def test_impossible_dimensions(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a multiple of heads" in refused(
        capsys, "--gpu", "h200", "--model", "hidden=100,layers=2,heads=3,intermediate=10,vocab=10"
    )
    assert "layers is 0" in refused(
        capsys, "--gpu", "h200", "--model", "hidden=128,layers=0,heads=4,intermediate=10,vocab=10"
    )


def test_hours_of_prepared_data(
    tiny_model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["--model_name_or_path", str(tiny_model), "--dataset_name", str(chats), "--max_length", "64"]
    keys += [
        "--chat_template_path",
        "llama2",
        "--data_cache_dir",
        str(tmp_path),
        "--global_batch_size",
        "8",
        "--num_train_epochs",
        "3",
    ]
    args = ["--gpu", "a10g", "--gpus_per_node", "1"]
    assert plan(capsys, *args, *keys)["run"]["hours"] is None, "nothing is prepared, and planning prepares nothing"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "digests of files may be remembered"
    data, _, train = parse_arguments(keys)
    prepared = prepare(data, train, load_tokenizer(tiny_model))
    run = plan(capsys, *args, *keys)["run"]
    assert run["from"] == "its prepared data"
    steps = -(-3 * len(prepared.train) // 8)
    assert run["steps"] == steps
    assert run["tokens"] == pytest.approx(prepared.report.train.tokens / len(prepared.train) * steps * 8)


def test_a_search_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    found = plan(capsys, *MISSION, *TWO_NODES, "--search", "--picture", str(picture))
    gpus = {one["num_processes"] for one in found["search"]}
    assert {8, 16, 32} <= gpus
    assert all(one["verdict"] != "does not fit" for one in found["search"])
    assert picture.stat().st_size > 10_000
    assert "neither .png nor .svg" in refused_after(capsys, *MISSION, "--picture", str(tmp_path / "a.gif"))


def refused_after(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 2
    return capsys.readouterr().err


def test_a_dry_run_agrees_with_the_formula(tmp_path: Path) -> None:
    """As a user runs it, in a process of its own; a model by its dimensions, large enough that tables are no matter."""
    model = "hidden=2048,layers=6,heads=16,kv_heads=4,intermediate=5632,vocab=8192"
    command = [sys.executable, "-m", "recipe.cli", "plan", "--gpu", "a10g", "--gpus_per_node", "4", "--model", model]
    command += ["--max_length", "1024", "--bf16", "true", "--dry-run", "--json", *FLASH]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    walked, moments = found["dry_run"], found["memory"]["moments"]
    assert walked["units"] == 7
    assert walked["sharded"]["parameters"] == moments["optimizer step"]["weights"]
    counts = walked["sharded"]["optimizer"] - moments["optimizer step"]["moments"]
    assert 0 < counts <= 4 * (9 * 6 + 3), "beside moments, a step count for each tensor that has a share here"
    formula = max(sum(pieces.values()) for name, pieces in moments.items() if "backward" in name or "reduced" in name)
    assert formula == pytest.approx(walked["peaks"]["backward 2"], rel=0.04)


FLASH = ["--attn_implementation", "flash_attention_2"]


def test_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """QLoRA of the 70B on two cards of 24 GB, which people do; without the weights in 4 bits it does not fit."""
    args = ["--model", "llama-2-70b", "--gpu", "rtx-4090", "--gpus_per_node", "2", "--param_dtype", "bfloat16"]
    args += ["--max_length", "512", "--lora", "8"]
    assert plan(capsys, *args)["verdict"] == "does not fit"
    found = plan(capsys, *args, "--four_bit")
    assert found["memory"]["needed_bytes"] < 24.5e9
    moments = found["memory"]["moments"]["optimizer step"]
    assert moments["gradients"] < moments["weights"] / 50, "what is frozen has none"
    assert found["host"]["checkpoint"] == 12 * 103_546_880, "the adapter and its moments"
    assert "add --lora RANK" in refused(capsys, "--model", "llama-2-7b", "--gpu", "h100", "--four_bit")
