"""What every rank holds after the weights were streamed in, and what it cost."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from recipe.errors import UserError
from recipe.loading import StreamingLoader, Weights
from recipe.model import load_config, meta_model
from recipe.sharding import claims, gather, wrap
from recipe.sharding.plugin import build_plugin
from tests.conftest import write_model
from tests.distributed.ranks import run_ranks

VERSIONS = ("1", "2")


def wrapped(
    folder: Path, *, broadcast: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Accelerator, torch.nn.Module]:
    accelerator = Accelerator(fsdp_plugin=build_plugin(torch.float32, torch.float32))
    model = meta_model(load_config(folder), None, dtype)
    weights = Weights(folder) if dist.get_rank() == 0 else None
    loader = StreamingLoader(model, weights, dtype, broadcast)
    return accelerator, wrap.shard(accelerator, model, loader)


def compare_with_file(folder: Path) -> dict:
    _, model = wrapped(folder)
    expected = load_file(folder / "model.safetensors")
    seen = {name: torch.equal(tensor, expected[name]) for name, tensor in gather.full_parameters(model)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
    return {
        "equal": seen,
        "missing": sorted(expected.keys() - seen.keys()),
        "buffers": [b.dtype == torch.float32 and torch.allclose(b, frequencies) for b in buffers.values()],
        "meta": [name for name, p in model.named_parameters() if p.is_meta],
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tied", (False, True))
def test_every_rank_holds_the_file_bit_for_bit(version: str, tied: bool, tmp_path: Path) -> None:
    """L1, L2, L4: weights and RoPE frequencies on every rank, rank 0 alone having read them."""
    folder = write_model(tmp_path / "model", tie_word_embeddings=tied)
    for result in run_ranks(compare_with_file, folder, version=version):
        assert result["equal"] and all(result["equal"].values()) and not result["missing"] and not result["meta"]
        assert result["buffers"] and all(result["buffers"])


def verify_without_broadcast(folder: Path) -> str:
    _, model = wrapped(folder, broadcast=False)
    try:
        claims.verify_weights(model, Weights(folder) if dist.get_rank() == 0 else None, torch.float32)
    except RuntimeError as error:
        return str(error)
    return "not noticed"


def test_a_rank_with_other_weights_is_noticed_on_every_rank(tmp_path: Path) -> None:
    """L2: were the broadcast left out, the run would end before its first step."""
    folder = write_model(tmp_path / "model")
    for said in run_ranks(verify_without_broadcast, folder):
        assert "checking the loaded weights failed" in said and "is not what the file holds" in said


def load_broken(folder: Path) -> str:
    try:
        wrapped(folder)
    except UserError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("version", VERSIONS)
def test_files_that_differ_from_the_model_are_refused_on_every_rank(version: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :16].contiguous()
    tensors["extra.weight"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for said in run_ranks(load_broken, folder, version=version):
        assert "lacks 1 tensors of the model: model.norm.weight" in said
        assert "1 tensors that the model lacks: extra.weight" in said
        assert "lm_head.weight is [300, 16]" in said and "[300, 32] by config.json" in said


@contextmanager
def peak_anonymous_memory() -> Iterator[list[int]]:
    """Sample RssAnon of this process; the list gets [before, peak, after] in bytes."""
    marks = [anonymous_memory()] * 2
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            marks[1] = max(marks[1], anonymous_memory())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield marks
    finally:
        done.set()
        thread.join()
        marks.append(anonymous_memory())


def anonymous_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def peak_above_shard(folder: Path) -> int:
    Accelerator(fsdp_plugin=build_plugin(torch.float32, torch.float32))  # what it imports is not the load's
    with peak_anonymous_memory() as marks:
        _, model = wrapped(folder)
    shard = sum(gather.local_part(p).numel() for p in model.parameters()) * 4
    return marks[1] - marks[0] - shard


@pytest.mark.parametrize("version", VERSIONS)
def test_peak_memory_is_bounded_by_the_unit(version: str, tmp_path: Path) -> None:
    """L3: above its final shard, a rank needs at most two of the largest units and 300 MB, whatever the depth."""
    width = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
    folder = write_model(tmp_path / "deep", num_hidden_layers=32, **width)
    whole = (folder / "model.safetensors").stat().st_size
    unit = whole // 32
    assert whole // 2 > 2 * unit + 300e6, "a rank that held the whole model would break the bound"
    for peak in run_ranks(peak_above_shard, folder, version=version):
        assert peak <= 2 * unit + 300e6, f"{peak / 1e6:.0f} MB above the shard"
