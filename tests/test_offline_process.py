"""`recipe export` as a process: its memory, its imports, and what is there when it is ended in the middle."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoints import contents, write_checkpoint

MB = 10**6
COMMAND = [sys.executable, "-m", "recipe.cli", "export"]
DRAFT_HAS = "*.safetensors"


def big_tensors(num_layers: int, width: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Of a Llama's kind, in fp32, random."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    for layer in range(num_layers):
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (4 * width, width)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (width, 4 * width)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (width,)
    return {name: torch.empty(shape).uniform_(-1, 1, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def checkpoint(one_rank: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 MB."""
    tensors = big_tensors(6, 1024, 5000)
    return write_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3", tensors, tiny_model, parts=2)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    subprocess.run([*COMMAND, *arguments(checkpoint, out)], check=True, capture_output=True)
    return contents(out)


def arguments(checkpoint: Path, out: Path, dtype: str = "float32", size: str = "20MB") -> list[str]:
    return [str(checkpoint), str(out), "--dtype", dtype, "--max_shard_size", size]


def end_in_the_middle(checkpoint: Path, out: Path, number: int) -> tuple[int, str]:
    """Send signal `number` once two files are complete; returns the exit code and what the process said."""
    process = subprocess.Popen([*COMMAND, *arguments(checkpoint, out)], stderr=subprocess.PIPE, text=True)
    draft = out.with_name(out.name + ".tmp")
    while len(list(draft.glob(DRAFT_HAS))) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.002)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ended_in_the_middle_and_run_again(
    number: signal.Signals, checkpoint: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The same bytes; files that were complete are not written again."""
    out, draft = tmp_path / "out", tmp_path / "out.tmp"
    code, said = end_in_the_middle(checkpoint, out, number)
    assert code == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in said
    if number == signal.SIGINT:
        assert said.endswith("recipe: export was interrupted\n")
    assert not out.exists()
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in draft.glob(DRAFT_HAS)}
    assert 2 <= len(before) < len(list(draft.glob("*.safetensors*"))), "some are complete, and some are not"
    subprocess.run([*COMMAND, *arguments(checkpoint, out)], check=True, capture_output=True)
    assert contents(out) == expected
    assert {name: (s.st_ino, s.st_mtime_ns) for name in before for s in [(out / name).stat()]} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_killed_and_run_with_another_dtype(checkpoint: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Nothing of the first is taken for the second's."""
    end_in_the_middle(checkpoint, tmp_path / "out", signal.SIGKILL)
    for out in (tmp_path / "out", tmp_path / "other"):
        command = [*COMMAND, *arguments(checkpoint, out, dtype="bfloat16")]
        subprocess.run(command, check=True, capture_output=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_it_imports_no_model_code(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], *arguments(checkpoint, tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "torch" in imported and imported.isdisjoint({"transformers", "accelerate", "datasets", "trl"})


# -- memory ------------------------------------------------------------------------------------------------------------


PEAK_OF_ITS_CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_bytes(command: list[str]) -> int:
    """The largest resident memory of a process, by the kernel's own account; which counts in what the process was
    forked from, so a small one starts it."""
    done = subprocess.run([sys.executable, "-c", PEAK_OF_ITS_CHILD, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


@pytest.fixture(scope="module")
def large_checkpoint(one_rank: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 1.2 GB, with tensors of 131 MB; the worst case: one rank wrote each of them whole."""
    tensors = big_tensors(28, 1024, 32_000)
    assert 1150 * MB < sum(tensor.nbytes for tensor in tensors.values()) < 1250 * MB
    return write_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3", tensors, tiny_model, parts=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_one_shard_and_300_mb(dtype: str, large_checkpoint: Path, tmp_path: Path) -> None:
    """Most of it are the libraries."""
    out = tmp_path / "out"
    peak = peak_bytes([*COMMAND, *arguments(large_checkpoint, out, dtype, size="200MB")])
    libraries = peak_bytes([sys.executable, "-c", "import recipe.offline"])
    shard = max(path.stat().st_size for path in out.glob(DRAFT_HAS))
    print(f"peak {peak / MB:.0f} MB, libraries {libraries / MB:.0f} MB, shard {shard / MB:.0f} MB")
    assert len(list(out.glob(DRAFT_HAS))) == {"float32": 7, "bfloat16": 4}[dtype]
    assert peak < shard + 300 * MB
    assert peak - libraries < 60 * MB, "less than a tensor"
