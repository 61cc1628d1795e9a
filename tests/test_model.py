import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from recipe.arguments import ModelArguments
from recipe.errors import UserError
from recipe.export import describe
from recipe.model import (
    attention_problems,
    find_folder,
    load_config,
    load_generation_config,
    load_tokenizer,
    meta_model,
    torch_dtype,
    vocabulary_problems,
)


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be changed."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(tiny_model, monkeypatch):
    assert find_folder(ModelArguments(model_name_or_path=str(tiny_model)), download=False) == (tiny_model, [])
    monkeypatch.chdir(tiny_model.parent.parent)
    relative = f"{tiny_model.parent.name}/{tiny_model.name}"
    assert find_folder(ModelArguments(model_name_or_path=relative), download=False)[0] == Path(relative), (
        "though it looks like a hub id"
    )


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/tiny", "~/models", "models/llama/7b", "llama"])
def test_what_can_be_no_hub_id_is_not_looked_up(name):
    with pytest.raises(UserError, match="is no folder and no hub id"):
        find_folder(ModelArguments(model_name_or_path=name), download=False)


def test_a_hub_id_is_looked_up_in_the_cache(monkeypatch, tmp_path):
    """N6: offline, without a request."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="is not in the hub's cache"):
        find_folder(ModelArguments(model_name_or_path="nobody/nothing"), download=False)


def test_a_check_of_a_hub_id_gets_the_warnings(tiny_model, monkeypatch):
    monkeypatch.setattr("recipe.hub.resolve", lambda *asked: (tiny_model, [str(asked)]))
    args = ModelArguments(model_name_or_path="owner/model", model_revision="v1")
    assert find_folder(args, download=False) == (tiny_model, ["('owner/model', 'v1', False)"])


def test_no_model_is_named():
    with pytest.raises(UserError, match="set model_name_or_path"):
        find_folder(ModelArguments(), download=False)


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_the_pad_token_is_the_unknown_token(tiny_model):
    """L10, D1: an existing token, so that the embedding keeps its size, and not the end token."""
    tokenizer = load_tokenizer(tiny_model)
    assert (tokenizer.pad_token, tokenizer.pad_token_id, len(tokenizer)) == ("<unk>", 0, 300)


def special_tokens(folder: Path, **tokens: str | None) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **tokens}))


def test_a_pad_token_of_its_own_is_kept(model):
    special_tokens(model, pad_token="the")
    assert load_tokenizer(model).pad_token == "the"


def test_without_an_unknown_token_it_is_the_end_token(model):
    special_tokens(model, unk_token=None)
    assert load_tokenizer(model).pad_token == "</s>"


def test_a_tokenizer_may_not_have_more_tokens_than_the_model_rows(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    assert vocabulary_problems(LlamaConfig(vocab_size=300), tokenizer) == []
    assert vocabulary_problems(LlamaConfig(vocab_size=304), tokenizer) == [], "rows to spare are padding"
    (problem,) = vocabulary_problems(LlamaConfig(vocab_size=299), tokenizer)
    assert "300 tokens and the model 299 rows" in problem


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "sdpa", "eager", "flex_attention"])
def test_other_attention_needs_nothing(asked):
    assert attention_problems(ModelArguments(attn_implementation=asked), torch.float32, on_gpu=False) == []


@pytest.mark.parametrize(
    ("asked", "dtype", "on_gpu", "installed", "why"),
    [
        ("flash_attention_2", torch.bfloat16, False, True, "there is no GPU"),
        ("kernels-community/flash-attn2", torch.bfloat16, False, True, "there is no GPU"),
        ("flash_attention_2", torch.float32, True, True, "set bf16: true"),
        ("kernels-community/flash-attn2", torch.float32, True, True, "set bf16: true"),
        ("flash_attention_2", torch.bfloat16, True, False, "the package flash-attn is not installed"),
        ("flash_attention_2", torch.bfloat16, True, True, None),
        ("kernels-community/flash-attn2", torch.bfloat16, True, False, None),
    ],
)
def test_flash_attention_is_had_or_refused(asked, dtype, on_gpu, installed, why, monkeypatch):
    """T13: and never replaced in silence."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    found = attention_problems(ModelArguments(attn_implementation=asked), dtype, on_gpu)
    if why is None:
        assert found == []
    else:
        (problem,) = found
        assert f"attn_implementation is {asked} and " in problem and why in problem
        assert problem.count("attn_implementation: ") == 2 and "pip install flash-attn" in problem


# -- the model on meta -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_on_meta_and_frequencies_are_real_and_fp32(dtype, tiny_model):
    """L4, L6: in bf16, positions above 256 could not be told apart."""
    model = meta_model(load_config(tiny_model), None, dtype)
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", dtype)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}
    assert buffers
    for buffer in buffers.values():
        assert (buffer.device.type, buffer.dtype) == ("cpu", torch.float32)
        torch.testing.assert_close(buffer, 10000.0 ** -(torch.arange(0, 8, 2) / 8))


def test_it_is_the_model_of_the_files(tiny_model):
    model = meta_model(load_config(tiny_model), None, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model)
    shapes, expected = ({name: p.shape for name, p in m.named_parameters()} for m in (model, loaded))
    assert type(model) is type(loaded) and shapes == expected


def test_tied_embeddings_are_one_parameter(tiny_model, tied_model):
    tied, untied = (meta_model(load_config(f), None, torch.float32) for f in (tied_model, tiny_model))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize(("asked", "got"), [(None, "sdpa"), ("eager", "eager")])
def test_attention_is_the_one_asked_for(asked, got, tiny_model):
    model = meta_model(load_config(tiny_model), asked, torch.float32)
    assert model.config._attn_implementation == got


def test_dtypes():
    assert (torch_dtype("float32"), torch_dtype("bfloat16")) == (torch.float32, torch.bfloat16)


# -- generation --------------------------------------------------------------------------------------------------------


def generation_of(folder: Path, values: dict | None) -> GenerationConfig:
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if values is not None:
        path.write_text(json.dumps(values))
    return load_generation_config(folder, load_config(folder), load_tokenizer(folder))


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.9, "top_p": 0.6}, {"do_sample": False, "temperature": 0.9}, {"do_sample": False, "top_p": 0.6}],
)
def test_llama2s_own_generation_config_can_be_saved(values, model, tmp_path):
    """X1: as shipped, saving it raises when the training has ended."""
    with pytest.raises(ValueError):
        GenerationConfig(**{"do_sample": False, **values}).save_pretrained(tmp_path)
    generation = generation_of(model, values)
    generation.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert saved.do_sample is True
    assert {key: getattr(saved, key) for key in values if key != "do_sample"} == {
        key: value for key, value in values.items() if key != "do_sample"
    }


@pytest.mark.parametrize(
    "values",
    [{}, {"do_sample": False}, {"do_sample": True, "temperature": 0.6}, {"do_sample": False, "temperature": 1.0}],
)
def test_a_valid_one_keeps_its_choice(values, model):
    generation = generation_of(model, values)
    assert bool(generation.do_sample) == values.get("do_sample", False)
    assert generation.temperature == values.get("temperature")


@pytest.mark.parametrize("values", [{"do_sample": False, "top_k": 20}, {"do_sample": False, "min_p": 0.1}])
def test_another_invalid_one_is_refused_before_training(values, model):
    with pytest.raises(UserError, match=f"{model}/generation_config.json is not valid"):
        generation_of(model, values)


def test_without_a_file_it_comes_from_the_models_config(model):
    generation = generation_of(model, None)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("known", "eos"), [(None, 2), (2, 2), (7, [7, 2]), ([7, 2], [7, 2]), ([7, 8], [7, 8, 2]), ([2], 2)]
)
def test_generation_ends_at_the_tokenizers_end_token_too(known, eos, model):
    """D2: it is what the rows were trained to end with."""
    generation = generation_of(model, {"eos_token_id": known})
    assert generation.eos_token_id == eos
    assert generation.pad_token_id == 0


@pytest.mark.parametrize("legacy", [True, False])
def test_a_saved_tokenizer_sets_spaces_where_the_loaded_one_does(legacy: bool, tmp_path: Path) -> None:
    from tests.data.conftest import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path / "first")
    path = tmp_path / "first/tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "legacy": legacy}))
    loaded = load_tokenizer(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    tokens = loaded.tokenize("<s>[INST]")
    assert tokens[1].startswith("▁") is legacy, "the two differ"
    assert load_tokenizer(tmp_path / "second").tokenize("<s>[INST]") == tokens


def test_an_end_token_that_is_asked_for_reaches_what_is_saved_with_the_model(tiny_model: Path, tmp_path: Path) -> None:
    """Case D2: the tokenizer, the configuration and the generation configuration agree on it."""
    config, tokenizer = load_config(tiny_model), load_tokenizer(tiny_model, eos_token="<unk>")
    end = tokenizer.convert_tokens_to_ids("<unk>")
    assert tokenizer.eos_token_id == end != config.eos_token_id
    generation = load_generation_config(tiny_model, config, tokenizer)
    describe(tmp_path, meta_model(config, None, torch.float32), config, tokenizer, generation)
    for saved in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / saved).read_text())["eos_token_id"] == [config.eos_token_id, end]
    assert load_tokenizer(tmp_path).eos_token_id == end
    with pytest.raises(
        UserError, match="eos_token '<end>' is not in the tokenizer's vocabulary; set it to one that is"
    ):
        load_tokenizer(tiny_model, eos_token="<end>")
