"""Parameters against real models, which transformers builds on meta in their full size."""

import dataclasses
import json
from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from recipe.errors import UserError
from recipe.plan.models import by_name, from_config, from_file, from_text, known
from recipe.plan.shape import Shape

LLAMA2_7B = {  # of its config.json
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def sized(kind: type[PretrainedConfig], *sizes: int, **more) -> PretrainedConfig:
    hidden, layers, heads, kv_heads, intermediate, vocab = sizes
    return kind(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        **more,
    )


CONFIGS = {
    "llama-2-7b": sized(LlamaConfig, 4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": sized(LlamaConfig, 5120, 40, 40, 40, 13824, 32000),
    "llama-2-70b": sized(LlamaConfig, 8192, 80, 64, 8, 28672, 32000),
    "llama-3-8b": sized(LlamaConfig, 4096, 32, 32, 8, 14336, 128256),
    "llama-3.2-1b": sized(LlamaConfig, 2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True),
    "mistral-7b": sized(MistralConfig, 4096, 32, 32, 8, 14336, 32000),
    "qwen2.5-7b": sized(Qwen2Config, 3584, 28, 28, 4, 18944, 152064),
    "qwen3-8b": sized(Qwen3Config, 4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "gpt-2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt-2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "mpt-1b": MptConfig(d_model=2048, n_heads=16, n_layers=24, vocab_size=50368),
}


@cache
def counted(name: str) -> tuple[int, int, int]:
    """Parameters of a layer, of what is outside of layers, and of all, of the real model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    (layers,) = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    total = sum(parameter.numel() for parameter in model.parameters())
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert len(set(sizes)) == 1
    return sizes[0], total - sum(sizes), total


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_model(name):
    shape = from_config(CONFIGS[name].to_dict(), name)
    assert (shape.layer, shape.root, shape.parameters) == counted(name)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("mpt")])
def test_a_model_known_by_name_is_the_one_of_its_config(name):
    ours = dataclasses.replace(by_name(name), max_positions=None)
    theirs = from_config(CONFIGS[name].to_dict(), name)
    assert ours == dataclasses.replace(theirs, max_positions=None)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-34b", 33.7),
        ("llama-3-70b", 70.6),
        ("llama-3.2-3b", 3.21),
        ("llama-3.1-405b", 405.9),
        ("smollm2-135m", 0.1345),
        ("yi-34b", 34.4),
        ("qwen2.5-32b", 32.8),
        ("qwen2.5-72b", 72.7),
        ("qwen3-32b", 32.8),
    ],
)
def test_other_known_models_have_the_size_that_their_cards_state(name, billions):
    assert by_name(name).parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("openai-community/gpt2-xl", "gpt-2-xl"),
        ("LLAMA-2-70B", "llama-2-70b"),
    ],
)
def test_a_hub_id_is_known_by_its_last_part(name, key):
    assert by_name(name).name == key


def test_mistral_of_another_vocabulary_is_not_taken_for_the_first():
    assert known("mistralai/Mistral-7B-v0.3") is None


def test_an_unknown_name_is_told_its_nearest():
    with pytest.raises(UserError, match="'llama-2-17b' are not known here .the nearest known name is 'llama-2-7b'"):
        by_name("llama-2-17b")


def test_the_dimensions_that_the_message_suggests_can_be_given():
    with pytest.raises(UserError) as caught:
        by_name("my-model")
    text = str(caught.value).rsplit(": ", 1)[1]
    assert from_text(text).parameters == by_name("llama-3-8b").parameters


def test_dimensions_as_text_default_to_heads_of_their_own():
    shape = from_text("hidden=4096, layers=32, heads=32, intermediate=11008, vocab=32000")
    assert (shape.kv_heads, shape.head_dim) == (32, 128)
    assert shape.parameters == by_name("llama-2-7b").parameters


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden=4096,depth=3", "'depth=3' in 'hidden=4096,depth=3' is no dimension; give hidden, layers, heads"),
        ("hidden=4k", "'hidden=4k' in 'hidden=4k' is no dimension"),
        ("hidden=-8", "is no dimension"),
        ("hidden=4²", "is no dimension"),
        ("hidden", "is no dimension"),
        ("", "is no dimension"),
        ("hidden=64,heads=4", "lacks layers, intermediate, vocab"),
        (
            "hidden=100,layers=2,heads=3,intermediate=64,vocab=300",
            "hidden 100 is not a multiple of heads 3; give head_",
        ),
        ("hidden=100,layers=2,heads=0,intermediate=64,vocab=300", "hidden 100 is not a multiple of heads 0"),
        ("hidden=64,layers=2,heads=4,kv_heads=3,intermediate=64,vocab=300", "heads 4 is not a multiple of kv_heads 3"),
    ],
)
def test_dimensions_that_cannot_be(text, message):
    with pytest.raises(UserError, match=message):
        from_text(text)


def test_every_impossible_dimension_is_told_at_once():
    with pytest.raises(UserError) as caught:
        Shape("mine", hidden=64, layers=0, heads=4, kv_heads=4, head_dim=16, intermediate=0, vocab=-1)
    assert caught.value.problems == [
        "mine: layers is 0; give a whole number from 1 to a billion",
        "mine: intermediate is 0; give a whole number from 1 to a billion",
        "mine: vocab is -1; give a whole number from 1 to a billion",
    ]


def test_an_unknown_model_type():
    with pytest.raises(UserError, match="mine has model_type 'mamba', and the planner knows gpt2, llama, mistral, mpt"):
        from_config({"model_type": "mamba"}, "mine")
    with pytest.raises(UserError, match="model_type 'None'"):
        from_config({}, "mine")


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen3-8b", "gpt-2-xl", "mpt-1b"])
def test_missing_keys_are_named_as_config_json_does(name):
    config = CONFIGS[name].to_dict()
    kind = config["model_type"]
    layers = {"gpt2": "n_layer", "mpt": "n_layers"}.get(kind, "num_hidden_layers")
    del config[layers], config["vocab_size"]
    with pytest.raises(UserError, match=f"mine: config.json lacks {layers}, vocab_size$"):
        from_config(config, "mine")


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_are_not_counted_are_refused(key):
    with pytest.raises(UserError, match=f"mine has {key}, which the planner does not know"):
        from_config(LLAMA2_7B | {key: True}, "mine")


def test_what_a_config_leaves_out_is_the_familys_default():
    shape = from_config(LLAMA2_7B, "mine")
    assert (shape.kv_heads, shape.head_dim, shape.tied) == (32, 128, False)
    assert from_config({"model_type": "gpt2"} | dict(n_embd=64, n_layer=2, n_head=4, vocab_size=300), "mine").tied


def test_an_mpt_without_alibi_learns_positions():
    config = CONFIGS["mpt-1b"].to_dict()
    learns = from_config(config | {"attn_config": {"alibi": False}}, "mine")
    assert learns.parameters - from_config(config, "mine").parameters == 2048 * config["max_seq_len"]


def test_from_a_file(tmp_path):
    path = tmp_path / "mine" / "config.json"
    with pytest.raises(UserError, match="No such file"):
        from_file(path)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(UserError, match="config.json: Expecting property name"):
        from_file(path)
    path.write_text(json.dumps(LLAMA2_7B))
    assert from_file(path).name == "mine"


def test_multiplying_parameters_leave_out_what_is_looked_up():
    untied, tied, learned = by_name("llama-2-7b"), by_name("llama-3.2-1b"), by_name("gpt-2-xl")
    assert untied.multiplying == untied.parameters - 32000 * 4096
    assert tied.multiplying == tied.parameters
    assert learned.multiplying == learned.parameters - 1024 * 1600
