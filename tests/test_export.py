import json
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from recipe.export import SafetensorsWriter, drain, export_shapes, write_export
from recipe.model import load_config, load_generation_config, load_tokenizer, meta_model

Tensors = Iterable[tuple[str, torch.Tensor]]
IDS = torch.arange(3, 60).unsqueeze(0)


# -- the writer --------------------------------------------------------------------------------------------------------


def some_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"a.weight": (3, 5), "b.weight": (7,), "c": (), "d.weight": (0, 3), "e.weight": (40, 50)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def writer(
    folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, size: str = "5GB"
) -> SafetensorsWriter:
    return SafetensorsWriter(folder, {name: tensor.to("meta") for name, tensor in tensors.items()}, dtype, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_the_file_is_the_librarys_byte_for_byte_in_any_order_of_writing(seed, dtype, tmp_path):
    tensors = some_tensors(dtype)
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    with writer(tmp_path, tensors, dtype) as out:
        for name in random.Random(seed).sample(sorted(tensors), len(tensors)):
            out.write(name, tensors[name])
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_tensors_are_cast_and_made_contiguous(tmp_path):
    tensors = {"a": torch.randn(4, 6).T, "b": torch.randn(8, 8)[::2, 1:], "c": torch.randn(3, requires_grad=True)}
    with writer(tmp_path, tensors, torch.bfloat16) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor.detach().bfloat16())


def test_the_order_in_the_model_need_not_be_the_alphabets(tmp_path):
    tensors = dict(reversed(some_tensors().items()))
    with writer(tmp_path, tensors) as out:
        for name, tensor in sorted(tensors.items()):
            out.write(name, tensor)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_is_copied_before_numpy_sees_it(tmp_path):
    """FSDP frees a gathered unit by resizing its storage, which must stay possible."""
    tensor = torch.randn(4)
    with writer(tmp_path, {"a": tensor}) as out:
        out.write("a", tensor)
    tensor.untyped_storage().resize_(0)


def test_shards_are_at_most_as_large_as_asked(tmp_path):
    tensors = {f"{i:02}": torch.randn(100) for i in range(10)}
    with writer(tmp_path, tensors, size="1KB") as out:
        for name, tensor in reversed(tensors.items()):
            out.write(name, tensor)
    names = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4000
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
            assert sum(opened.get_tensor(key).nbytes for key in opened.keys()) <= 1000


def test_a_tensor_that_was_not_announced(tmp_path):
    with pytest.raises(KeyError, match="z.weight"), writer(tmp_path, some_tensors()) as out:
        out.write("z.weight", torch.zeros(3))


def test_a_tensor_that_comes_twice(tmp_path):
    with pytest.raises(KeyError, match="a.weight"), writer(tmp_path, some_tensors()) as out:
        out.write("a.weight", torch.zeros(3, 5))
        out.write("a.weight", torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(5, 3), (15,), (3, 4), ()])
def test_a_tensor_of_another_shape(shape, tmp_path):
    """Also where the number of bytes would be the same: a flat parameter, a shard."""
    with (
        pytest.raises(ValueError, match="a.weight is .* and was announced as \\[3, 5\\]"),
        writer(tmp_path, some_tensors()) as out,
    ):
        out.write("a.weight", torch.zeros(shape))


def test_tensors_that_never_came(tmp_path):
    with (
        pytest.raises(ValueError, match="2 tensors were never written: b.weight, e.weight"),
        writer(tmp_path, some_tensors()) as out,
    ):
        for name, tensor in some_tensors().items():
            if name not in ("b.weight", "e.weight"):
                out.write(name, tensor)
    assert all(file.closed for file in out._files.values())


def test_an_error_on_the_way_is_not_hidden_by_what_is_missing(tmp_path):
    with pytest.raises(OSError, match="No space"), writer(tmp_path, some_tensors()) as out:
        raise OSError("No space left on device")
    assert all(file.closed for file in out._files.values())


# -- the folder --------------------------------------------------------------------------------------------------------


def source(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def export(
    out: Path,
    folder: Path,
    tensors: Tensors | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Path:
    """Export the model of `folder`, or other `tensors`, as a run does."""
    tokenizer = load_tokenizer(folder)
    config = load_config(folder)
    write_export(
        out,
        source(folder).named_parameters() if tensors is None else tensors,
        meta_model(config, None, torch.float32),
        dtype,
        max_shard_size,
        config,
        tokenizer,
        load_generation_config(folder, tokenizer),
    )
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", ["5GB", "50KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("folder", ["tiny_model", "tied_model"])
def test_an_export_loads_with_nothing_missing_or_left_over_and_computes_the_same(
    folder, dtype, size, request, tmp_path
):
    """S3, S5, S12."""
    folder = request.getfixturevalue(folder)
    out = export(tmp_path / "export", folder, dtype=dtype, max_shard_size=size)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {kind: info[kind] for kind in info if info[kind]} == {}
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        assert model.dtype == dtype
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert (len(list(out.glob("*.safetensors"))) > 1) is (size == "50KB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_config_says_the_dtype_that_every_tensor_has(dtype, tiny_model, tmp_path):
    """S12: not a bf16 run with an fp32 export of double the size."""
    out = export(tmp_path / "export", tiny_model, dtype=dtype, max_shard_size="50KB")
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert {tensor.dtype for path in out.glob("*.safetensors") for tensor in load_file(path).values()} == {dtype}


def test_the_config_is_that_of_the_unwrapped_model_with_its_cache_on(tiny_model, tmp_path):
    """S5, T8."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_cache": False, "architectures": ["FSDPLlama"]}))
    exported = json.loads((export(tmp_path / "export", folder) / "config.json").read_text())
    assert (exported["use_cache"], exported["architectures"], exported["pad_token_id"]) == (
        True,
        ["LlamaForCausalLM"],
        0,
    )
    same = ("hidden_size", "vocab_size", "num_hidden_layers", "eos_token_id", "rope_parameters", "tie_word_embeddings")
    assert {key: exported[key] for key in same} == {key: config[key] for key in same}


def test_the_runs_own_config_stays_as_it_was(tiny_model, tmp_path):
    """Checkpoints are written from it, too."""
    config, tokenizer = load_config(tiny_model), load_tokenizer(tiny_model)
    config.use_cache = False
    before = config.to_dict()
    fresh = meta_model(load_config(tiny_model), None, torch.float32)
    tensors, generation = source(tiny_model).named_parameters(), load_generation_config(tiny_model, tokenizer)
    write_export(tmp_path / "export", tensors, fresh, torch.bfloat16, "5GB", config, tokenizer, generation)
    assert config.to_dict() == before


def test_all_that_is_needed_to_use_it_is_there(tiny_model, tmp_path):
    """S4: the tokenizer with its chat template and its pad token."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    out = export(tmp_path / "export", folder)
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert contents(out).keys() == expected | {"chat_template.jinja"}
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], tokenize=False) == "fox!"
    assert tokenizer("the fox").input_ids == load_tokenizer(folder)("the fox").input_ids
    assert tokenizer.pad_token == "<unk>"


def test_a_tied_tensor_is_written_once(tied_model, tmp_path):
    """L7: under its owner's name, as transformers does."""
    out = export(tmp_path / "export", tied_model)
    names = load_file(out / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_is_announced_is_what_a_fresh_model_has(tiny_model, tied_model):
    for folder in (tiny_model, tied_model):
        shapes = export_shapes(meta_model(load_config(folder), None, torch.float32))
        saved = load_file(folder / "model.safetensors")
        assert {name: tensor.shape for name, tensor in shapes.items()} == {
            name: tensor.shape for name, tensor in saved.items()
        }


def test_llama2s_invalid_generation_config_is_no_obstacle(tiny_model, tmp_path):
    """X1: do_sample false with a temperature, as it was shipped."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    shipped = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(shipped))
    generation = GenerationConfig.from_pretrained(export(tmp_path / "export", folder))
    assert (generation.do_sample, generation.temperature, generation.top_p) == (True, 0.9, 0.6)
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 0)


# -- replacing, failing ------------------------------------------------------------------------------------------------


def test_an_export_that_is_there_is_replaced_whole(tiny_model, tied_model, tmp_path):
    """No shard of the old one, and not its index, stays beside the new one."""
    out = export(tmp_path / "export", tiny_model, max_shard_size="50KB")
    export(out, tied_model)
    fresh = export(tmp_path / "other", tied_model)
    assert contents(out) == contents(fresh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "other"]


def failing(folder: Path, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i, item in enumerate(source(folder).named_parameters()):
        if i == after:
            raise OSError("No space left on device")
        yield item


@pytest.mark.parametrize("after", [0, 5, 20])
def test_a_failure_leaves_the_old_export(after, tiny_model, tmp_path):
    out = export(tmp_path / "export", tiny_model)
    before = contents(out)
    with pytest.raises(OSError):
        export(out, tiny_model, failing(tiny_model, after))
    assert contents(out) == before


def test_a_failure_leaves_nothing_that_is_taken_for_an_export(tiny_model, tmp_path):
    out = tmp_path / "export"
    with pytest.raises(OSError):
        export(out, tiny_model, failing(tiny_model, 5))
    assert not out.exists()
    (tmp_path / "export.tmp/left over").write_text("")
    assert "left over" not in contents(export(out, tiny_model)), "a draft is begun anew"


def test_parameters_that_are_missing_or_wrong_are_never_published(tiny_model, tmp_path):
    parameters = dict(source(tiny_model).named_parameters())
    out = tmp_path / "export"
    norm = parameters.pop("model.norm.weight")
    with pytest.raises(ValueError, match="1 tensors were never written: model.norm.weight"):
        export(out, tiny_model, parameters.items())
    with pytest.raises(KeyError, match="_fsdp_wrapped_module.norm.weight"):
        export(out, tiny_model, [*parameters.items(), ("model._fsdp_wrapped_module.norm.weight", norm)])
    with pytest.raises(ValueError, match="model.norm.weight is \\[16\\]"):
        export(out, tiny_model, [*parameters.items(), ("model.norm.weight", norm[:16])])
    assert not out.exists()


def test_drain_goes_through_what_is_left():
    left = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    next(left)
    drain(left)
    assert list(left) == []
