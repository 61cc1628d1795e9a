import gc
import json
import shutil
import struct
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from recipe.errors import UserError
from recipe.loading import StreamingLoader, TensorEntry, Weights, read_header, tied_names
from recipe.model import load_config, meta_model
from tests.conftest import write_model

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj.weight"


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def spoil(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny model with other tensors in its file."""

    def spoil(change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return spoil


def on_meta(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return meta_model(load_config(folder), None, dtype)


def load(
    folder: Path, dtype: torch.dtype = torch.float32, *, read: bool = True, broadcast: bool = True
) -> tuple[PreTrainedModel, StreamingLoader]:
    """The model with every module materialized, as FSDP asks for them."""
    model = on_meta(folder, dtype)
    loader = StreamingLoader(model, Weights(folder) if read else None, dtype, broadcast)
    for module in model.modules():
        assert loader.materialize(module, CPU) is module
    return model, loader


# -- what is in the files ----------------------------------------------------------------------------------------------


def test_a_header_tells_where_each_tensor_lies(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.tensor(1.0),
        "d": torch.zeros(0),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    assert read_header(path) == {
        "a": TensorEntry(path, "F32", (2, 3)),
        "b": TensorEntry(path, "BF16", (4,)),
        "c": TensorEntry(path, "F32", ()),
        "d": TensorEntry(path, "F32", (0,)),
    }


@pytest.mark.parametrize("size", [0, 4, 8, 50, -1, 1], ids="{} bytes".format)
def test_a_file_of_another_length_than_its_header_says(size, tmp_path):
    """S11: also in its header, and with a byte too many."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, path)
    data = path.read_bytes()
    path.write_bytes(data + b"0" if size == 1 else data[:size])
    with pytest.raises(UserError) as caught:
        Weights(tmp_path)
    (problem,) = caught.value.problems
    assert str(path) in problem and problem.endswith("fetch the model again")


@pytest.mark.parametrize(
    "data",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 100\n",
        b"<html><body>Not found</body></html>",
        struct.pack("<Q", 4) + b"{{{{" + b"0" * 8,
    ],
    ids=["a pointer", "a web page", "no JSON"],
)
def test_a_file_that_is_no_safetensors(data, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="is no complete safetensors file"):
        Weights(tmp_path)


def test_all_shards_of_the_index_are_read(tiny_model, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded, whole = Weights(tmp_path), Weights(tiny_model)
    assert sharded.entries.keys() == whole.entries.keys()
    for name in whole.entries:
        assert torch.equal(sharded.read(name), whole.read(name))
    sharded.close()
    assert torch.equal(sharded.read(Q), whole.read(Q)), "a closed file is opened again"


def test_every_missing_and_every_truncated_shard_is_named(tiny_model, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path, max_shard_size="50KB")
    paths = sorted(tmp_path.glob("*.safetensors"))
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        Weights(tmp_path)
    first, second = caught.value.problems
    assert first == f"{paths[0]} is named by model.safetensors.index.json and missing; fetch the model again"
    assert second.startswith(f"{paths[1]} has ")


def test_a_folder_without_safetensors(tmp_path):
    with pytest.raises(UserError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        Weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds pickled weights \(pytorch_model.bin\) and no safetensors"):
        Weights(tmp_path)


# -- files and model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["tiny_model", "tied_model"])
def test_files_of_the_model_have_no_problem(folder, request):
    folder = request.getfixturevalue(folder)
    assert Weights(folder).problems(on_meta(folder)) == []


def test_all_that_is_missing_unexpected_or_misshaped_is_listed_before_anything_is_loaded(spoil):
    def change(tensors):
        tensors["model.layers.1.mlp.extra.weight"] = tensors.pop("model.norm.weight")
        tensors["score.weight"] = tensors.pop("lm_head.weight")
        tensors[Q] = tensors[Q][:16].clone()
        tensors["model.embed_tokens.weight"] = torch.zeros(320, 32)

    folder = spoil(change)
    model = on_meta(folder)
    with pytest.raises(UserError) as caught:
        StreamingLoader(model, Weights(folder), torch.float32, broadcast=True)
    assert caught.value.problems == [
        f"{folder} lacks 2 tensors of the model: lm_head.weight, model.norm.weight",
        f"{folder} has 2 tensors that the model lacks: model.layers.1.mlp.extra.weight, score.weight",
        "model.embed_tokens.weight is [320, 32] in model.safetensors, and [300, 32] by config.json",
        f"{Q} is [16, 32] in model.safetensors, and [32, 32] by config.json",
    ]
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_is_no_weights_is_named(dtype, spoil):
    """A quantised model: cast to floats, its codes would be garbage."""
    folder = spoil(lambda tensors: tensors.update({Q: tensors[Q].to(dtype)}))
    (problem,) = Weights(folder).problems(on_meta(folder))
    assert problem.startswith(f"{Q} is ") and "F64, F32, F16, BF16 can be loaded" in problem


def test_the_frequencies_that_older_llamas_saved_are_ignored(spoil):
    """L4: Llama-2's files have them; the model computes them."""
    folder = spoil(
        lambda tensors: tensors.update(
            {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for i in (0, 1)}
        )
    )
    model, _ = load(folder)
    assert torch.allclose(model.model.rotary_emb.inv_freq, 10000.0 ** -(torch.arange(0, 8, 2) / 8))


def test_a_tied_model_needs_its_tensor_once(tied_model, tmp_path):
    """L7: whether or not the file repeats it under its second name."""
    model = on_meta(tied_model)
    assert tied_names(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in Weights(tied_model).entries
    tensors = load_file(tied_model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert Weights(tmp_path).problems(model) == []
    del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (problem,) = Weights(tmp_path).problems(model)
    assert "lacks 1 tensors of the model: model.embed_tokens.weight" in problem


def test_an_untied_model_has_no_tied_names(tiny_model):
    assert tied_names(on_meta(tiny_model)) == {}


# -- streaming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_the_files_values_in_the_master_dtype(dtype, broadcast, tiny_model):
    model, _ = load(tiny_model, dtype, broadcast=broadcast)
    tensors = load_file(tiny_model / "model.safetensors")
    assert {name for name, _ in model.named_parameters()} == tensors.keys()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, tensors[name].to(dtype)), name


@pytest.mark.parametrize("file_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_file_in_another_dtype_is_cast_tensor_by_tensor(file_dtype, spoil):
    folder = spoil(lambda tensors: tensors.update({Q: tensors[Q].to(file_dtype)}))
    model, _ = load(folder)
    parameter = model.get_parameter(Q)
    assert parameter.dtype == torch.float32
    assert torch.equal(parameter, load_file(folder / "model.safetensors")[Q].float())


@pytest.mark.parametrize("folder", ["tiny_model", "tied_model"])
def test_the_loaded_model_computes_what_from_pretrained_does(folder, request):
    """Frequencies and all."""
    folder = request.getfixturevalue(folder)
    model, _ = load(folder)
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, AutoModelForCausalLM.from_pretrained(folder)(ids).logits)


def test_tied_parameters_stay_tied(tied_model):
    model, _ = load(tied_model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta


def test_what_is_frozen_stays_frozen(tiny_model):
    model = on_meta(tiny_model)
    model.get_parameter(Q).requires_grad_(False)
    loader = StreamingLoader(model, Weights(tiny_model), torch.float32, True)
    attention = loader.materialize(model.model.layers[0].self_attn.q_proj, CPU)
    norm = loader.materialize(model.model.norm, CPU)
    assert (attention.weight.requires_grad, norm.weight.requires_grad) == (False, True)


def test_only_the_modules_own_meta_parameters_are_replaced(tiny_model):
    """FSDP asks for every module of a unit, and the unit itself; what has its values keeps them."""
    model = on_meta(tiny_model)
    loader = StreamingLoader(model, Weights(tiny_model), torch.float32, True)
    loader.materialize(model.model, CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    loader.materialize(model.model.norm, CPU)
    weight = model.model.norm.weight
    loader.materialize(model.model.norm, CPU)
    assert model.model.norm.weight is weight
    assert [name for name, parameter in model.named_parameters() if not parameter.is_meta] == ["model.norm.weight"]


def test_loaded_parameters_are_freed_as_soon_as_their_module_drops_them(tiny_model):
    """L3: FSDP drops a unit's whole tensors once it has its shard; the loader must not keep them alive."""
    model, loader = load(tiny_model)
    loaded = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key in list(module._parameters):
            delattr(module, key)
    gc.collect()
    assert [name for name, reference in loaded.items() if reference() is not None] == []
    assert loader.weights is not None, "the loader itself is still there"


def test_only_tied_parameters_are_kept_until_the_release(tied_model):
    """Its second place is in a unit that comes later."""
    model, loader = load(tied_model)
    loaded = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}

    def alive() -> list[str]:
        gc.collect()
        return [name for name, reference in loaded.items() if reference() is not None]

    del model
    assert alive() == ["model.embed_tokens.weight"]
    loader.release()
    assert alive() == []


def test_training_does_not_write_into_the_file(tiny_model):
    """Where no cast makes a copy, a parameter lies on the file's memory map."""
    before = (tiny_model / "model.safetensors").read_bytes()
    model, _ = load(tiny_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert (tiny_model / "model.safetensors").read_bytes() == before


def test_without_files_there_is_memory_alone(tiny_model):
    """For a checkpoint that is loaded next."""
    model, loader = load(tiny_model, torch.bfloat16, read=False)
    assert loader.file_dtypes is None
    shapes = {name: tuple(entry.shape) for name, entry in Weights(tiny_model).entries.items()}
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
    assert {(parameter.dtype, parameter.device) for parameter in model.parameters()} == {(torch.bfloat16, CPU)}


def test_a_file_that_broke_after_the_check(tmp_path):
    folder = write_model(tmp_path / "model")
    model = on_meta(folder)
    loader = StreamingLoader(model, Weights(folder), torch.float32, True)
    (folder / "model.safetensors").write_bytes(json.dumps({}).encode() * 100)
    with pytest.raises(UserError, match="model.safetensors: .*; fetch the model again"):
        loader.materialize(model.model.norm, CPU)
