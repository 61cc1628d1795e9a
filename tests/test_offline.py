"""`recipe export` of a checkpoint that the recipe's code wrote: the model's weights, or a refusal that names the file.

Of real runs: tests/test_offline_runs.py; its memory, and its end in the middle: tests/test_offline_process.py.
"""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint.manifest import FILE
from recipe.checkpoint.shards import METADATA, MODEL
from recipe.cli import main
from recipe.errors import UserError
from recipe.offline import export_checkpoint
from tests import checkpoints
from tests.checkpoints import SPOIL, Evil, contents, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")
SHARD = f"{MODEL}/__0_0.distcp"


@pytest.fixture(scope="module")
def original(one_rank: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny model, in parts that begin and end within rows."""
    tensors = load_file(tiny_model / "model.safetensors")
    return write_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3", tensors, tiny_model)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "checkpoint-3"))


def export(checkpoint: Path, out: Path, model: Path | None = None, dtype: str = "float32", size: str = "5GB") -> Path:
    export_checkpoint(checkpoint, out, model, dtype, size)
    return out


def refused(checkpoint: Path, out: Path, model: Path | None = None) -> str:
    with pytest.raises(UserError) as raised:
        export(checkpoint, out, model)
    assert not out.exists()
    return str(raised.value)


# -- what it writes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_is_the_model_in_the_dtype_asked_for(
    dtype: str, size: str, original: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = export(original, tmp_path / "out", dtype=dtype, size=size)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {kind: info[kind] for kind in info if info[kind]} == {}
    assert str(model.dtype) == f"torch.{dtype}"
    for name, expected in load_file(tiny_model / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), expected.to(model.dtype)), name
    assert AutoTokenizer.from_pretrained(out)("the fox").input_ids
    assert (len(list(out.glob("*.safetensors"))) > 1) is (size == "20KB")
    assert (out / "model.safetensors.index.json").exists() is (size == "20KB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_tied_embeddings_are_written_once(tied_model: Path, tmp_path: Path) -> None:
    """Also where the checkpoint holds the head, as other tools' may."""
    tensors = load_file(tied_model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    out = export(write_checkpoint(tmp_path / "checkpoint-3", tensors, tied_model), tmp_path / "out")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_folder_of_the_weights_in_its_place(original: Path, tmp_path: Path) -> None:
    """The folder around it describes the model, and has the checksums."""
    expected = contents(export(original, tmp_path / "expected"))
    assert contents(export(original / MODEL, tmp_path / "out")) == expected
    spoilt = Path(shutil.copytree(original, tmp_path / "checkpoint-3"))
    SPOIL["flipped"](spoilt / SHARD)
    assert "other content" in refused(spoilt / MODEL, tmp_path / "other")


def test_the_checkpoints_description_goes_before_the_models(checkpoint: Path, tied_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tied_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("of the model")
    (model / "pytorch_model.bin").write_text("weights")
    out = export(checkpoint, tmp_path / "out", model)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert (out / "chat_template.jinja").read_text() == "of the model"
    assert not (out / "pytorch_model.bin").exists()


def test_an_export_that_is_there_is_replaced(original: Path, tmp_path: Path) -> None:
    out = export(original, tmp_path / "out", size="20KB")
    assert export(original, out) == out
    assert contents(out) == contents(export(original, tmp_path / "other"))


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SPOIL)
@pytest.mark.parametrize("name", [SHARD, f"{MODEL}/{METADATA}", "config.json", "tokenizer.json"])
def test_a_spoilt_file_is_named(name: str, how: str, checkpoint: Path, tmp_path: Path) -> None:
    SPOIL[how](checkpoint / name)
    assert Path(name).name in refused(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("how", ["truncated", "empty", "missing"])
@pytest.mark.parametrize("name", [SHARD, f"{MODEL}/{METADATA}"])
def test_a_spoilt_file_is_named_without_checksums(name: str, how: str, checkpoint: Path, tmp_path: Path) -> None:
    """Those of other tools have none."""
    (checkpoint / FILE).unlink()
    SPOIL[how](checkpoint / name)
    assert Path(name).name in refused(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("how", ["truncated", "empty"])
def test_a_spoilt_manifest(how: str, checkpoint: Path, tmp_path: Path) -> None:
    SPOIL[how](checkpoint / FILE)
    assert "manifest.json cannot be read" in refused(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("signed", ["no manifest", "stale manifest", "checksums redone"])
@pytest.mark.parametrize("plant", [checkpoints.plant_metadata, checkpoints.plant_item])
def test_code_in_a_checkpoint_is_refused_and_not_run(
    plant: Callable, signed: str, checkpoint: Path, tmp_path: Path
) -> None:
    plant(checkpoint / MODEL, Evil(tmp_path / "it ran"))
    if signed == "no manifest":
        (checkpoint / FILE).unlink()
    elif signed == "checksums redone":
        checkpoints.redo_checksums(checkpoint)
    said = refused(checkpoint, tmp_path / "out")
    assert (METADATA if plant is checkpoints.plant_metadata else ".distcp") in said
    assert not (tmp_path / "it ran").exists()


def test_no_checkpoint(original: Path, tmp_path: Path) -> None:
    """A run's folder brings a hint."""
    assert "is no sharded checkpoint" in refused(tmp_path, tmp_path / "out")
    assert "is no sharded checkpoint" in refused(tmp_path / "nothing", tmp_path / "out")
    (original.parent / "checkpoint-1").mkdir(exist_ok=True)
    assert f"did you mean {original}?" in refused(original.parent, tmp_path / "out")


def test_a_checkpoint_that_says_nothing_of_its_model(checkpoint: Path, tiny_model: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").unlink()
    (checkpoint / FILE).unlink()
    assert "give --model" in refused(checkpoint, tmp_path / "out")
    assert "is no folder" in refused(checkpoint, tmp_path / "out", tmp_path / "nothing")
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    values = {**json.loads((model / "config.json").read_text()), "torch_dtype": "float16"}
    (model / "config.json").write_text(json.dumps(values))
    exported = json.loads((export(checkpoint, tmp_path / "out", model) / "config.json").read_text())
    assert exported["dtype"] == "float32" and "torch_dtype" not in exported, "transformers 4's name"


def test_the_optimizer_in_the_models_place(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / MODEL / METADATA
    path.write_bytes(path.read_bytes().replace(b"model.model.", b"state.model.").replace(b"model.lm_h", b"state.lm_h"))
    (checkpoint / FILE).unlink()
    assert "holds no model's weights" in refused(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("inside", ["notes.txt", "checkpoint", "other/config.json"])
def test_what_is_no_export_is_not_deleted(inside: str, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    if inside == "checkpoint":
        shutil.copytree(original, out)
    else:
        (out / inside).parent.mkdir(parents=True)
        (out / inside).write_text("{}")
    before = contents(out)
    with pytest.raises(UserError, match="holds something else than an export"):
        export(original, out)
    assert contents(out) == before


def test_an_empty_folder_may_be_written(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    assert export(original, Path("out/")).is_dir()
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize("size", ["5", "many GB", "", "0GB", "-1GB"])
def test_a_size_that_is_none(size: str, original: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_shard_size"):
        export(original, tmp_path / "out", size=size)


def test_a_disk_that_does_not_take_it(original: Path, tmp_path: Path) -> None:
    """Here by the largest file that this process may write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        said = refused(original, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "out could not be written" in said and "File too large" in said and "run it again to go on" in said
    assert contents(export(original, tmp_path / "out")) == contents(export(original, tmp_path / "other"))


def test_the_command_line(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(original), str(out), "--dtype", "float32", "--max_shard_size", "20KB"]) == 0
    said = capsys.readouterr()
    assert said.out == f"recipe: exported to {out}\n"
    assert "Checking checkpoint-3" in said.err and "Exporting checkpoint-3" in said.err
    assert contents(out) == contents(export(original, tmp_path / "other", size="20KB"))
    capsys.readouterr()
    assert main(["export", str(original.parent), str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"recipe: {original.parent} is no sharded checkpoint")
    assert main(["export", str(original), str(tmp_path / "default")]) == 0
    assert json.loads((tmp_path / "default/config.json").read_text())["dtype"] == "bfloat16"
