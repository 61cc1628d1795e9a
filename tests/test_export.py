"""The exported folder: it loads, and is whole or not there."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from recipe.export import describe, drain, write_export
from recipe.model import load_config, load_generation_config, load_tokenizer, meta_model

Tensors = Iterable[tuple[str, torch.Tensor]]
IDS = torch.arange(3, 60).unsqueeze(0)


def source(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def export(
    out: Path,
    folder: Path,
    tensors: Tensors | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    name: str | None = None,
) -> list[str]:
    """Export the model of `folder`, or other `tensors`, as a run does; returns what was asked for."""
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    fresh, generation = meta_model(config, None, torch.float32), load_generation_config(folder, config, tokenizer)
    asked: list[str] = []

    def wanted(names: Sequence[str]) -> Tensors:
        asked.extend(names)
        given = source(folder).named_parameters() if tensors is None else tensors
        return given if name is None else ((key, value) for key, value in given if key in names)

    shapes = {name: p.shape for name, p in fresh.named_parameters()}
    write_export(
        out, wanted, shapes, dtype, max_shard_size, lambda to: describe(to, fresh, config, tokenizer, generation), name
    )
    return asked


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
    export(out := tmp_path / "export", folder, dtype=dtype, max_shard_size=size)
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
    export(out := tmp_path / "export", tiny_model, dtype=dtype, max_shard_size="50KB")
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert {tensor.dtype for path in out.glob("*.safetensors") for tensor in load_file(path).values()} == {dtype}


def test_the_config_is_that_of_the_unwrapped_model_with_its_cache_on(tiny_model, tmp_path):
    """S5, T8."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_cache": False, "architectures": ["FSDPLlama"]}))
    export(tmp_path / "export", folder)
    exported = json.loads((tmp_path / "export/config.json").read_text())
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
    describe(tmp_path, fresh, config, tokenizer, load_generation_config(tiny_model, config, tokenizer))
    assert config.to_dict() == before


def test_all_that_is_needed_to_use_it_is_there(tiny_model, tmp_path):
    """S4: the tokenizer with its chat template and its pad token."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    export(out := tmp_path / "export", folder)
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert contents(out).keys() == expected | {"chat_template.jinja"}
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], tokenize=False) == "fox!"
    assert tokenizer("the fox").input_ids == load_tokenizer(folder)("the fox").input_ids
    assert tokenizer.pad_token == "<unk>"


def test_a_tied_tensor_is_written_once(tied_model, tmp_path):
    """L7: under its owner's name, as transformers does."""
    export(out := tmp_path / "export", tied_model)
    names = load_file(out / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_llama2s_invalid_generation_config_is_no_obstacle(tiny_model, tmp_path):
    """X1: do_sample false with a temperature, as it was shipped."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    shipped = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(shipped))
    export(tmp_path / "export", folder)
    generation = GenerationConfig.from_pretrained(tmp_path / "export")
    assert (generation.do_sample, generation.temperature, generation.top_p) == (True, 0.9, 0.6)
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 0)


# -- replacing, failing ------------------------------------------------------------------------------------------------


def test_an_export_that_is_there_is_replaced_whole(tiny_model, tied_model, tmp_path):
    """No shard of the old one, and not its index, stays beside the new one."""
    export(out := tmp_path / "export", tiny_model, max_shard_size="50KB")
    export(out, tied_model)
    export(fresh := tmp_path / "other", tied_model)
    assert contents(out) == contents(fresh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "other"]


def failing(folder: Path, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i, item in enumerate(source(folder).named_parameters()):
        if i == after:
            raise OSError("No space left on device")
        yield item


@pytest.mark.parametrize("after", [0, 5, 20])
def test_a_failure_leaves_the_old_export(after, tiny_model, tmp_path):
    export(out := tmp_path / "export", tiny_model)
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
    export(out, tiny_model)
    assert "left over" not in contents(out), "a draft is begun anew"


def test_an_interrupted_export_of_the_same_source_is_gone_on_with(tiny_model, tmp_path):
    export(expected := tmp_path / "expected", tiny_model, max_shard_size="50KB", name="a run's")
    out, draft = tmp_path / "export", tmp_path / "export.tmp"
    with pytest.raises(OSError):
        export(out, tiny_model, failing(tiny_model, 15), max_shard_size="50KB", name="a run's")
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in draft.glob("*.safetensors")}
    assert before, "some file was complete"
    asked = export(out, tiny_model, max_shard_size="50KB", name="a run's")
    assert 0 < len(asked) < len(dict(source(tiny_model).named_parameters()))
    assert contents(out) == contents(expected)
    assert {name: (s.st_ino, s.st_mtime_ns) for name in before for s in [(out / name).stat()]} == before


@pytest.mark.parametrize("name", [None, "another's"])
def test_an_interrupted_export_of_another_source_is_begun_anew(name, tiny_model, tied_model, tmp_path):
    out = tmp_path / "export"
    with pytest.raises(OSError):
        export(out, tiny_model, failing(tiny_model, 15), max_shard_size="50KB", name="a run's")
    assert list((tmp_path / "export.tmp").glob("*.safetensors"))
    asked = export(out, tied_model, max_shard_size="50KB", name=name)
    assert asked and set(asked) == dict(source(tied_model).named_parameters()).keys()
    export(expected := tmp_path / "expected", tied_model, max_shard_size="50KB")
    assert contents(out) == contents(expected)


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
