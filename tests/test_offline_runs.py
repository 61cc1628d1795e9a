"""`recipe export` of checkpoints of real runs, this recipe's and stock Accelerate's, on two gloo ranks."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from recipe.checkpoint.shards import MODEL
from recipe.sharding.plugin import build_plugin
from tests.checkpoints import Evil, contents
from tests.conftest import Launcher
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow
SPREADS = ("fsdp1_cpu_2rank", "fsdp2_cpu_2rank")


def export(checkpoint: Path, out: Path, **options: Any) -> Path:
    command = [sys.executable, "-m", "recipe.cli", "export", str(checkpoint), str(out)]
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"recipe: exported to {out}\n"
    return out


# -- of this recipe ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SPREADS)
def run(request: pytest.FixtureRequest, launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{dtype: export at the end}, and the checkpoint that they are of. The end is reached twice."""
    folder = tmp_path_factory.mktemp("run") / request.param
    found = {"checkpoint": folder / "checkpoint-2"}
    for dtype in ("float32", "bfloat16"):
        launch(folder, spread=request.param, max_steps=2, export_dtype=dtype, max_shard_size="20KB").ok()
        found[dtype] = (folder / "export").rename(folder / f"export-{dtype}")
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_runs_own_export_bit_for_bit(dtype: str, run: dict[str, Path], tmp_path: Path) -> None:
    """Every file of the folder."""
    out = export(run["checkpoint"], tmp_path / "out", dtype=dtype, max_shard_size="20KB")
    expected, found = contents(run[dtype]), contents(out)
    assert found.keys() == expected.keys()
    assert {"model.safetensors.index.json", "config.json", "tokenizer.json", "chat_template.jinja"} <= found.keys()
    assert sum(name.endswith(".safetensors") for name in found) > 3
    assert [name for name in found if found[name] != expected[name]] == []
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {kind: info[kind] for kind in info if info[kind]} == {}


@pytest.mark.parametrize("spread", SPREADS)
def test_a_run_with_tied_embeddings(spread: str, launch: Launcher, tied_model: Path, tmp_path: Path) -> None:
    launch(tmp_path / "run", spread=spread, model_name_or_path=tied_model, max_steps=1).ok()
    out = export(tmp_path / "run/checkpoint-1", tmp_path / "out", dtype="bfloat16")
    assert contents(out) == contents(tmp_path / "run/export")
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {kind: info[kind] for kind in info if info[kind]} == {}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_stock_tools_merge_its_weights(run: dict[str, Path], tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("accelerate")), "merge-weights"]
    subprocess.run([*command, str(run["checkpoint"] / MODEL), str(tmp_path / "merged")], check=True)
    merged = load_file(tmp_path / "merged/model.safetensors")
    ours = [load_file(path) for path in run["float32"].glob("*.safetensors")]
    assert merged.keys() == {name for file in ours for name in file}
    assert all(torch.equal(merged[name], tensor) for file in ours for name, tensor in file.items())


# -- of stock Accelerate -----------------------------------------------------------------------------------------------


def save_stock(model_folder: str, out: str, whole_state: bool) -> None:
    accelerator = Accelerator(fsdp_plugin=build_plugin(torch.float32, torch.float32))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.arange(3, 19).unsqueeze(0)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    if whole_state:
        accelerator.save_state(out)
    else:
        from accelerate.utils import save_fsdp_model

        save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, out)


def expected_of_stock(folder: Path, model: Path) -> dict[str, torch.Tensor]:
    """As stock Accelerate merges it, under the names that transformers would save."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / MODEL, folder.parent / "merged.pt")
    merged = torch.load(folder.parent / "merged.pt", weights_only=True)["model"]
    return {name: merged[name] for name in load_file(model / "model.safetensors")}


@pytest.mark.parametrize(("model_name", "whole_state"), [("tiny_model", True), ("tied_model", False)])
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_checkpoint_of_stock_accelerate(
    version: str, model_name: str, whole_state: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Its pickles are neither opened nor taken along."""
    model, checkpoint = request.getfixturevalue(model_name), tmp_path / "step_1"
    run_ranks(save_stock, str(model), str(checkpoint), whole_state, version=version)
    expected = expected_of_stock(checkpoint, model)
    (checkpoint / "random_states_0.pkl").write_bytes(pickle.dumps(Evil(tmp_path / "it ran")))
    (checkpoint / "scheduler.bin").write_bytes(pickle.dumps(Evil(tmp_path / "it ran")))
    out = export(checkpoint, tmp_path / "out", model=model, dtype="float32", max_shard_size="20KB")
    assert {path.name for path in out.iterdir() if "safetensors" not in path.name} == {
        path.name for path in model.iterdir() if "safetensors" not in path.name
    }
    assert not (tmp_path / "it ran").exists()
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {kind: info[kind] for kind in info if info[kind]} == {}
    found = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    before = load_file(model / "model.safetensors")
    assert not any(torch.equal(found[name], before[name]) for name in found), "it was trained"
    if whole_state:  # without --model, where the checkpoint has a description
        shutil.copyfile(model / "config.json", checkpoint / "config.json")
        assert (export(checkpoint, tmp_path / "other") / "config.json").exists()
