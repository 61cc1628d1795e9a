import json
import os

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from recipe.arguments import Arguments, parse_arguments
from recipe.data import check as check_data
from recipe.model import load_config, meta_model
from recipe.preflight import disk, settings
from recipe.quickstart import small_llama
from recipe.sharding import plugin
from tests.conftest import ROOT

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def dimensions(hidden: int, layers: int, heads: int, key_value_heads: int, intermediate: int, **others: object) -> dict:
    return LLAMA | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "intermediate_size": intermediate,
        **others,
    }


# Each model's config.json as it is published, and its number of parameters.
MODELS = {
    "meta-llama/Llama-2-7b-chat-hf": (dimensions(4096, 32, 32, 32, 11008), 6_738_415_616),
    "meta-llama/Llama-2-13b-chat-hf": (dimensions(5120, 40, 40, 40, 13824), 13_015_864_320),
    "meta-llama/Llama-2-70b-chat-hf": (dimensions(8192, 80, 64, 8, 28672), 68_976_648_192),
    "runs/models/smollm2-135m": (
        dimensions(576, 30, 9, 3, 1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True),
        134_515_008,
    ),
    "runs/quickstart/model": (None, None),  # made by recipe.quickstart
}
# The numbers of ranks that each configuration is for.
WORLDS = {
    "llama2_7b": (8,),
    "llama2_13b": (8,),
    "llama2_70b": (16,),
    "llama2_70b_1node": (8,),
    "quickstart": (1, 2, 4, 8),
    "smollm2_135m": (1, 2, 4, 8),
}
RUNS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SPREADS = sorted(path.stem for path in (ROOT / "configs/accelerate").glob("*.yaml"))


def parsed(name: str) -> Arguments:
    return parse_arguments(["--config", str(ROOT / f"configs/{name}.yaml")])


def test_every_configuration_is_tested():
    assert RUNS == sorted(WORLDS)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_says_what_has_no_default(name):
    data, model, train = parsed(name)
    assert data.dataset_name and train.global_batch_size and train.max_length
    assert model.model_name_or_path in MODELS
    assert train.output_dir.startswith("runs/") and "seed" in (ROOT / f"configs/{name}.yaml").read_text()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_passes_the_checks_of_its_keys(name, monkeypatch):
    """For every world that it is for, and every spread's environment."""
    data, model, train = parsed(name)
    monkeypatch.delenv("FSDP_ACTIVATION_CHECKPOINTING", raising=False)
    assert settings.problems(data, model, train) + check_data(data, train) == []
    for world_size in WORLDS[name]:
        assert settings.batch(train, world_size) == []


@pytest.mark.parametrize("name", RUNS)
def test_a_runs_model_is_built_on_meta_and_has_room_for_its_rows(name, tmp_path):
    """The whole model in seconds and no memory: what every rank starts from, 70B too."""
    _, model, train = parsed(name)
    values, parameters = MODELS[model.model_name_or_path]
    if values is None:
        small = small_llama()
        values, parameters = small.config.to_dict(), small.num_parameters()
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_config(tmp_path)
    built = meta_model(config, "sdpa", torch.float32)
    assert built.num_parameters() == parameters
    assert all(parameter.is_meta for parameter in built.parameters())
    assert train.max_length <= config.max_position_embeddings


@pytest.mark.parametrize(
    ("name", "world_size", "gib"),
    [("llama2_7b", 8, 12.5), ("llama2_13b", 8, 24.2), ("llama2_70b", 16, 64.2), ("llama2_70b_1node", 8, 32.1 + 64.2)],
)
def test_the_memory_that_a_configuration_speaks_of(name, world_size, gib):
    """Of one GPU: master weight and gradient, and two moments."""
    _, model, train = parsed(name)
    weight = 4 if model.param_dtype == "float32" else 2
    of_a_parameter = disk.checkpoint_bytes(model, train) + weight
    needed = MODELS[model.model_name_or_path][1] * of_a_parameter / world_size / 2**30
    assert needed == pytest.approx(gib, abs=0.06)


# -- spreads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPREADS)
def test_a_spread_is_an_accelerate_file(name):
    """N2: its number of processes is that of all machines together."""
    config = load_config_from_file(str(ROOT / f"configs/accelerate/{name}.yaml"))
    assert isinstance(config, ClusterConfig) and config.distributed_type == "FSDP"
    version, place, ranks = name.removesuffix("gpu").removesuffix("rank").split("_")
    assert config.fsdp_config["fsdp_version"] == int(version.removeprefix("fsdp"))
    assert config.num_processes == int(ranks)
    assert config.use_cpu is (place == "cpu")
    assert config.num_machines == (1 if place == "cpu" else int(place.removesuffix("node")))
    assert config.num_processes % config.num_machines == 0


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a rank, without what a launcher has set before."""
    for key in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(key)
    return {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("name", SPREADS)
def test_what_the_launcher_makes_of_a_spread_has_no_problem(name, environment, monkeypatch):
    """By Accelerate's own way from the file to the environment."""
    path = str(ROOT / f"configs/accelerate/{name}.yaml")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "script.py"]))
    for key, value in {**prepare_multi_gpu_env(args), **environment}.items():
        monkeypatch.setenv(key, value)
    assert plugin.spread_problems() == []
    assert not plugin.activation_checkpointing_asked(), "the run's own configuration decides"
    assert plugin.device_problems(0 if args.use_cpu else 8) == []


@pytest.mark.parametrize("name", SPREADS)
def test_a_spread_leaves_the_precision_to_the_run(name):
    assert load_config_from_file(str(ROOT / f"configs/accelerate/{name}.yaml")).mixed_precision == "no"
