"""The command line: quick to answer, and a user's mistake is a line and not a traceback."""

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
