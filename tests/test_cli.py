"""The command line: quick to answer, and a user's mistake is a line and not a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.cli import main

HEAVY = ("torch", "transformers", "numpy", "datasets", "matplotlib")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["fetch", "--help"], ["quickstart", "report", "--help"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "recipe.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert imported.isdisjoint(HEAVY)
    assert "recipe" in done.stdout


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "report", str(tmp_path), "--resumed-at", "3"]) == 2
    captured = capsys.readouterr()
    path = tmp_path / "run" / "metrics.jsonl"
    assert captured.err == f"recipe: {path} does not exist; has the run been started?\n"
    assert captured.out == ""


@pytest.mark.parametrize("args", [[], ["fetch"], ["fetch", "llama", "out"], ["quickstart"], ["nothing"], ["--conf"]])
def test_usage_errors_exit_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(args)
    assert raised.value.code == 2
    assert "usage: recipe" in capsys.readouterr().err


def test_check_lists_every_problem_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--model_name_or_path", str(tmp_path / "none"), "--optim", "sgd", "--param_dtype", "bfloat16"]
    assert main(["check", "--json", "--cpu", *keys]) == 2
    said = json.loads(capsys.readouterr().out)
    assert all(part in "\n".join(said["problems"]) for part in ("optim 'sgd'", "is no folder", "output_dir is not set"))
    assert any("param_dtype is bfloat16" in text for text in said["warnings"])
    assert any("number of ranks is not known" in text for text in said["warnings"])


def test_check_of_a_sound_run(
    tiny_model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"model_name_or_path": tiny_model, "dataset_name": chats, "output_dir": tmp_path / "run", "max_length": 64}
    argv = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    assert main(["check", "--cpu", *argv, "--global_batch_size", "9"]) == 0
    assert "warning: the number of ranks is not known" in capsys.readouterr().out
    assert main(["check", "--cpu", *argv, "--global_batch_size", "9", "--world_size", "2"]) == 2
    assert "set it to 8 or 10" in capsys.readouterr().err
    assert main(["check", "--cpu", *argv, "--global_batch_size", "8", "--world_size", "2"]) == 0
    assert capsys.readouterr().out == "recipe: no problem found for 2 ranks\n"


def test_a_spread_as_shell_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spread", "configs/accelerate/fsdp2_2node_16gpu.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"export ACCELERATE_USE_FSDP=true", "export FSDP_VERSION=2", "export ACCELERATE_USE_CPU=false"} <= set(lines)
    assert main(["spread", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml does not exist" in capsys.readouterr().err
