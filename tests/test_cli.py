"""The command line: quick to answer, and a user's mistake is a line and not a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.checkpoint.manifest import Manifest, describe_files, list_files
from recipe.cli import main
from tests.checkpoints import SPOIL

HELP = [
    ["--help"],
    ["--version"],
    ["verify", "--help"],
    ["export", "--help"],
    ["fetch", "--help"],
    ["quickstart", "report", "--help"],
]
HEAVY = ("torch", "transformers", "numpy", "datasets", "matplotlib")


@pytest.mark.parametrize("args", HELP)
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


# -- verify (export: tests/test_offline.py) ----------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """No weights: to `verify` they are files like others."""
    folder = tmp_path / "checkpoint-3"
    (folder / "weights").mkdir(parents=True)
    for name in ("a.json", "weights/.metadata", "weights/__0_0.distcp"):
        (folder / name).write_bytes(name.encode() * 1000)
    names = list_files(folder)
    Manifest(3, 24, 1, {}, files=describe_files(folder, names)).write(folder)
    return folder


def verify(*args: str | Path) -> tuple[int, list[str]]:
    """Exit code, and what the process said; it imports nothing heavy."""
    command = [sys.executable, "-X", "importtime", "-m", "recipe.cli", "verify", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert imported.isdisjoint(HEAVY)
    return done.returncode, [*done.stdout.splitlines(), *said]


@pytest.mark.parametrize("options", [[], ["--fast"], ["--processes", "1"]])
def test_verify_of_a_whole_checkpoint(options: list[str], checkpoint: Path) -> None:
    names = ["a.json", "weights/.metadata", "weights/__0_0.distcp"]
    how = "sizes" if "--fast" in options else "content"
    expected = [*(f"ok     {name}" for name in names), f"recipe: {checkpoint}: ok, by {how}"]
    assert verify(checkpoint, *options) == (0, expected)


@pytest.mark.parametrize("how", SPOIL)
@pytest.mark.parametrize("name", ["a.json", "weights/.metadata", "weights/__0_0.distcp"])
def test_verify_names_a_spoilt_file(name: str, how: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SPOIL[how](checkpoint / name)
    said = {
        "flipped": "has other content than was written",
        "truncated": f"has {1000 * len(name) - 1:,} bytes and was written with {1000 * len(name):,}",
        "empty": f"has 0 bytes and was written with {1000 * len(name):,}",
        "missing": "is missing",
    }[how]
    assert main(["verify", str(checkpoint)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"BROKEN {name} {said}" in lines
    assert sum(line.startswith("ok     ") for line in lines) == 2
    assert lines[-1] == f"recipe: {checkpoint}: 1 of 3 files is not what was written"
    fast = main(["verify", str(checkpoint), "--fast"])
    assert fast == (0 if how == "flipped" else 1), "sizes alone"


def test_verify_counts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SPOIL["missing"](checkpoint / "a.json")
    SPOIL["flipped"](checkpoint / "weights/.metadata")
    assert main(["verify", str(checkpoint)]) == 1
    assert capsys.readouterr().out.endswith("2 of 3 files are not what was written\n")


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (None, "it has no manifest.json: it was never finished"),
        ("", "its manifest.json cannot be read"),
        ('{"version": 2', "its manifest.json cannot be read"),
        ('{"version": 1}', "its manifest.json is of version 1"),
    ],
)
def test_verify_of_what_is_no_whole_checkpoint(manifest: str | None, said: str, checkpoint: Path) -> None:
    if manifest is None:
        (checkpoint / "manifest.json").unlink()
    else:
        (checkpoint / "manifest.json").write_text(manifest)
    code, lines = verify(checkpoint)
    assert code == 1 and len(lines) == 1
    assert lines[0].startswith(f"recipe: {checkpoint} is no whole checkpoint: {said}")


def test_verify_of_nothing(tmp_path: Path) -> None:
    code, lines = verify(tmp_path / "none")
    assert (code, lines) == (1, [f"recipe: {tmp_path}/none is no folder"])


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_verify_by_no_process(number: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", str(checkpoint), "--processes", number])
    assert "--processes" in capsys.readouterr().err
