import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe import preflight
from recipe.arguments import Arguments, ModelArguments, TrainArguments, parse_arguments
from recipe.errors import UserError, raise_if
from recipe.preflight import Found, settings
from recipe.preflight import disk as disk_space
from recipe.sharding import plugin
from tests.conftest import write_model

Check = Callable[..., Found]


@pytest.fixture
def arguments(tiny_model: Path, chats: Path, tmp_path: Path) -> Callable[..., Arguments]:
    """A sound configuration for two ranks, with changes; None unsets a key."""
    sound = {
        "model_name_or_path": tiny_model,
        "dataset_name": chats,
        "output_dir": tmp_path / "runs/new",
        "global_batch_size": 8,
        "max_length": 64,
    }

    def make(**changes: Any) -> Arguments:
        values = {**sound, **changes}
        return parse_arguments([f"--{key}={value}" for key, value in values.items() if value is not None])

    return make


@pytest.fixture
def check(arguments: Callable[..., Arguments]) -> Check:
    def check(world_size: int = 2, on_gpu: bool = False, launched: bool = False, **changes: Any) -> Found:
        report = preflight.inspect(arguments(**changes), world_size, on_gpu=on_gpu, launched=launched)
        raise_if(report.problems)
        assert report.found is not None
        return report.found

    return check


@pytest.fixture
def problems(check: Check) -> Callable[..., list[str]]:
    def problems(**changes: Any) -> list[str]:
        with pytest.raises(UserError) as caught:
            check(**changes)
        return caught.value.problems

    return problems


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoilt."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_sound_configuration_passes(check, tiny_model, tmp_path):
    found = check()
    assert found.folder == tiny_model
    assert (found.compute_dtype, found.master_dtype) == (torch.float32, torch.float32)
    assert all(parameter.is_meta for parameter in found.fresh.parameters()), "nothing of the weights is read"
    assert list(tmp_path.iterdir()) == [], "a check makes nothing"


@pytest.mark.parametrize(
    ("changes", "compute", "master"),
    [
        ({"bf16": True}, torch.bfloat16, torch.float32),
        ({"param_dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"bf16": False}, torch.float32, torch.float32),
    ],
)
def test_compute_and_master_dtype(changes, compute, master, check):
    found = check(**changes)
    assert (found.compute_dtype, found.master_dtype) == (compute, master)
    assert {parameter.dtype for parameter in found.fresh.parameters()} == {master}


# -- rule, value seen, key to change -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"global_batch_size": 9}, ["global_batch_size 9", "2 ranks x 1 samples", "set it to 8 or 10"]),
        ({"global_batch_size": None}, ["global_batch_size is not set"]),
        ({"model_name_or_path": None}, ["model_name_or_path is not set"]),
        ({"max_length": None}, ["max_length is not set"]),
        ({"max_length": 257}, ["max_length is 257", "256 positions", "set at most 256"]),
        ({"save_strategy": "epoch"}, ["save_strategy is 'epoch'", "set 'steps' (with save_steps) or 'no'"]),
        ({"eval_strategy": "epoch"}, ["eval_strategy is 'epoch'", "set 'steps' (with eval_steps) or 'no'"]),
        ({"logging_strategy": "epoch"}, ["logging_strategy is 'epoch'", "set 'steps' (with logging_steps) or 'no'"]),
        ({"optim": "sgd"}, ["optim 'sgd'", "FSDP", "adamw_torch_fused", "paged_adamw_32bit"]),
        ({"dtype": "bfloat16"}, ["dtype is 'bfloat16'", "set param_dtype"]),
        ({"save_only_model": True}, ["save_only_model is not supported", "cannot be resumed"]),
        ({"load_best_model_at_end": True}, ["load_best_model_at_end is not supported"]),
        ({"push_to_hub": True}, ["push_to_hub is not supported"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size is not supported", "per_device_train_batch_size"]),
        ({"fp16": True}, ["fp16 is not supported", "bf16"]),
        ({"ignore_data_skip": True}, ["ignore_data_skip is not supported"]),
        ({"use_peft": True}, ["use_peft is not supported", "unset it"]),
        ({"load_in_4bit": True}, ["load_in_4bit is not supported", "unset it"]),
        ({"load_in_8bit": True}, ["load_in_8bit is not supported", "unset it"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_problem_says_the_rule_the_value_and_the_key(changes, parts, problems):
    (problem,) = problems(**changes)
    for part in parts:
        assert part in problem


def test_reentrant_checkpointing_is_refused(arguments):
    data, model, train = arguments()
    train.activation_checkpointing_kwargs = {"use_reentrant": True}
    (problem,) = settings.unsupported(model, train)
    assert problem.startswith("activation_checkpointing_kwargs sets use_reentrant: true")


def test_all_problems_come_in_one_error(problems, model):
    """From every room: batch, refused keys, data, attention, the model's files."""
    (model / "config.json").unlink()
    found = problems(
        global_batch_size=9,
        optim="sgd",
        max_length=1,
        attn_implementation="flash_attention_2",
        model_name_or_path=model,
    )
    keys = ("optim", "max_length", "global_batch_size", "attn_implementation", f"{model} has no config.json")
    assert [problem[: len(key)] for problem, key in zip(found, keys, strict=True)] == list(keys)
    numbered = str(UserError(*found)).splitlines()
    assert numbered[0] == "5 problems:" and numbered[1].startswith("  1. ") and numbered[-1].startswith("  5. ")


def test_all_problems_of_the_model_come_in_one_error(problems, model, monkeypatch):
    os.truncate(model / "model.safetensors", 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 0))
    found = "\n".join(problems(model_name_or_path=model, max_length=257))
    assert "max_length is 257" in found and "model.safetensors has" in found and "GB free" in found


# -- the batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (2, 1), (2, 3), (16, 1), (16, 2), (3, 4)])
def test_the_batch_sizes_it_suggests_are_the_nearest_that_work(world_size, micro):
    def batch(asked: int) -> list[str]:
        return settings.batch(TrainArguments(global_batch_size=asked, per_device_train_batch_size=micro), world_size)

    together = world_size * micro
    for asked in range(3 * together + 2):
        works = range(together, 5 * together, together)
        if asked in works:
            assert not batch(asked)
            continue
        (problem,) = batch(asked)
        suggested = [int(number) for number in re.findall(r"\d+", problem.split("set it to ")[1])]
        assert suggested == [n for n in works if n < asked][-1:] + [n for n in works if n > asked][:1], problem


@pytest.mark.parametrize("asked", [-1, -5, -16])
def test_a_negative_batch_is_not_answered_with_one(asked):
    (problem,) = settings.batch(TrainArguments(global_batch_size=asked), 4)
    assert problem.endswith("set it to 4")


def test_a_micro_batch_of_nothing_is_refused(problems):
    (problem,) = problems(per_device_train_batch_size=0)
    assert "per_device_train_batch_size" in problem


# -- optimizers, checkpointing, attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "paged_adamw_32bit", "adamw_8bit"])
def test_optimizers_that_resume_are_taken(optim, check):
    check(optim=optim)


@pytest.mark.parametrize("optim", ["adafactor", "lion_8bit", "paged_adamw_8bit", "galore_adamw"])
def test_optimizers_that_are_not_known_to_resume_are_refused(optim, problems):
    assert f"optim '{optim}'" in problems(optim=optim)[0]


@pytest.mark.parametrize(
    ("param_dtype", "optim", "size"),
    [
        ("float32", "adamw_torch_fused", 12),
        ("bfloat16", "adamw_torch", 6),
        ("float32", "adamw_8bit", 12),
        ("bfloat16", "paged_adamw_32bit", 10),
    ],
)
def test_checkpoint_bytes_of_a_parameter(param_dtype, optim, size):
    """The master weight, and two moments: torch's in the master dtype, bitsandbytes' in fp32."""
    assert disk_space.checkpoint_bytes(ModelArguments(param_dtype=param_dtype), TrainArguments(optim=optim)) == size


@pytest.mark.parametrize(
    ("file", "new", "old", "twice"),
    [
        ("true", True, None, True),
        ("True", True, None, True),
        ("true", False, True, True),
        ("true", False, None, False),
        ("true", True, False, False),
        ("false", True, None, False),
        (None, True, None, False),
    ],
)
def test_checkpointing_may_be_on_once(file, new, old, twice, monkeypatch):
    """T9: in the accelerate file or in the run's config, under either of its names there."""
    monkeypatch.delenv("FSDP_ACTIVATION_CHECKPOINTING", raising=False)
    if file is not None:
        monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", file)
    train = TrainArguments(activation_checkpointing=new, gradient_checkpointing=old)
    found = settings.unsupported(ModelArguments(), train)
    assert [problem.split(":")[0] for problem in found] == ["activation checkpointing is on twice"] * twice


def test_checkpointing_kwargs_from_the_command_line(problems):
    (problem,) = problems(activation_checkpointing_kwargs='{"use_reentrant": true}')
    assert "use_reentrant" in problem


def test_flash_attention_without_a_gpu_names_three_ways_out(problems):
    """T13: it is never replaced in silence."""
    (problem,) = problems(attn_implementation="flash_attention_2", bf16=True)
    for way in (
        "install flash-attn",
        "attn_implementation: kernels-community/flash-attn2",
        "attn_implementation: sdpa",
    ):
        assert way in problem


def test_a_model_that_scales_its_logits_is_refused(problems, tiny_model, tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    folder = Path(shutil.copytree(tiny_model, tmp_path / "granite"))
    config = GraniteConfig(**json.loads((tiny_model / "config.json").read_text()) | {"model_type": "granite"})
    config.logits_scaling = 8.0
    GraniteForCausalLM(config).save_pretrained(folder)
    assert "logits" in "\n".join(problems(model_name_or_path=folder))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"eval_samples": 5}, "eval_strategy"),
        ({"dataset_test_split": "test"}, "eval_strategy"),
        ({"eval_strategy": "steps"}, "eval_samples"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_evaluation_needs_both_rows_and_a_time(changes, key, arguments):
    data, _, train = arguments(**changes)
    (problem,) = settings.evaluation(data, train)
    assert key in problem


def test_a_key_that_is_derived_is_not_overruled_in_silence(problems):
    (problem,) = problems(gradient_accumulation_steps=4)
    assert "gradient_accumulation_steps" in problem and "global_batch_size" in problem


# -- the model's files -------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(problems, tmp_path):
    (problem,) = problems(model_name_or_path=tmp_path / "nowhere")
    assert problem == f"model_name_or_path '{tmp_path}/nowhere' is no folder and no hub id (owner/name)"


def test_a_folder_without_config(problems, model):
    """S4: from_pretrained would build a default Llama of 7 B parameters."""
    (model / "config.json").unlink()
    (problem,) = problems(model_name_or_path=model)
    assert problem == f"{model} has no config.json; set model_name_or_path to a model's folder"


@pytest.mark.parametrize("text", ["{", '{"model_type": "nonsense"}'])
def test_a_config_that_cannot_be_read(text, problems, model):
    (model / "config.json").write_text(text)
    (problem,) = problems(model_name_or_path=model)
    assert problem.startswith(f"{model}/config.json: ")


def test_a_folder_without_tokenizer(problems, model):
    for path in model.glob("tokenizer*"):
        path.unlink()
    (problem,) = problems(model_name_or_path=model)
    assert problem.startswith(f"no tokenizer in {model}")


def test_a_truncated_file(problems, model):
    path = model / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    (problem,) = problems(model_name_or_path=model)
    assert problem == f"{path} has {size - 100:,} bytes and its header says {size:,}; fetch the model again"


def test_pickled_weights(problems, model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    (problem,) = problems(model_name_or_path=model)
    assert "pickled weights (pytorch_model.bin)" in problem and "model_name_or_path: OUT" in problem


def test_every_missing_shard_is_named(problems, model):
    """N6: all files that the index names are looked for."""
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (model / "model.safetensors").rename(model / names[0])
    index = {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    found = problems(model_name_or_path=model)
    assert [problem.split(" is named by ")[0] for problem in found] == [str(model / name) for name in names[1:]]


@pytest.mark.parametrize("text", ["{", "{}"])
def test_an_index_that_cannot_be_read(text, problems, model):
    (model / "model.safetensors.index.json").write_text(text)
    (problem,) = problems(model_name_or_path=model)
    assert "model.safetensors.index.json" in problem


def test_files_of_another_model(problems, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (problem,) = problems(model_name_or_path=model)
    assert "lacks 9 tensors of the model" in problem and "model.layers.2.self_attn.q_proj.weight" in problem


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(problems, tmp_path):
    folder = write_model(tmp_path / "small", vocab_size=280)
    (problem,) = problems(model_name_or_path=folder)
    assert "the tokenizer has 300 tokens and the model 280 rows" in problem and "model_name_or_path" in problem


def test_a_hub_id_that_is_not_there(problems, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = problems(model_name_or_path="nobody/nothing")
    assert problem.startswith("nobody/nothing is no local folder, is not in the hub's cache")
    assert problem.endswith("set model_name_or_path to a local folder")


@pytest.mark.parametrize("name", ["my models/tiny", "models/tiny.git"])
def test_a_name_that_no_hub_has(name, problems):
    assert name in problems(model_name_or_path=name)[0]


@pytest.mark.parametrize("generation", [{"num_return_sequences": 4}, {"max_new_tokens": -1}])
def test_a_generation_config_that_cannot_be_read(generation, problems, model):
    (model / "generation_config.json").write_text(json.dumps(generation))
    assert f"{model}/generation_config.json" in problems(model_name_or_path=model)[0]


# -- the disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how many bytes are free, of any folder that exists."""

    def disk(free: int) -> None:
        def usage(path: Path) -> Any:
            assert Path(path).is_dir(), "the run folder is not there yet: a folder above it has to be asked"
            return shutil._ntuple_diskusage(2 * free, free, free)

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return disk


@pytest.mark.parametrize(
    ("changes", "per_parameter"),
    [
        ({}, 4 * 12 + 2),
        ({"export": "false"}, 4 * 12),
        ({"export_dtype": "float32"}, 4 * 12 + 4),
        ({"save_strategy": "no"}, 2),
        ({"param_dtype": "bfloat16"}, 4 * 6 + 2),
        ({"save_total_limit": 1}, 2 * 12 + 2),
        ({"max_steps": 100, "save_steps": 50}, 2 * 12 + 2),
        ({"max_steps": 100, "save_steps": 30, "save_total_limit": 1}, 2 * 12 + 2),
    ],
)
def test_a_disk_without_room_for_the_checkpoints_and_the_export(
    changes, per_parameter, check, problems, disk, tmp_path
):
    """S11: those that are kept (3), and the new one beside them. The tiny model has 37,792 parameters; the margin is a
    fifth."""
    needed = int(1.2 * 37_792 * per_parameter)
    disk(needed)
    check(**changes)
    disk(needed - 1)
    (problem,) = problems(**changes)
    assert problem.startswith(f"{tmp_path} has 0.0 GB free") and "set output_dir to a larger disk" in problem


def test_checkpoints_that_are_there_need_no_room_again(check, problems, disk, tmp_path):
    needed = int(1.2 * 37_792 * (2 * 12 + 2))
    disk(needed)
    assert "4 checkpoints" in problems()[0]
    for step in (100, 200):
        (tmp_path / f"runs/new/checkpoint-{step}").mkdir(parents=True)
    check()


def test_a_folder_that_cannot_be_written_to(problems, tmp_path, monkeypatch):
    # Root may write everywhere, so the answer is given for it.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (problem,) = problems()
    assert problem.startswith(f"output_dir {tmp_path}/runs/new: {tmp_path} cannot be written to; set output_dir")


def test_no_output_dir_is_a_problem_and_no_crash(problems):
    assert problems(output_dir=None) == ["output_dir is not set; it has no default"]


@pytest.mark.parametrize("inside", ["", "/run"])
def test_an_output_dir_that_is_a_file(inside, problems, tmp_path):
    (tmp_path / "file").write_text("")
    (problem,) = problems(output_dir=f"{tmp_path}/file{inside}")
    assert "output_dir" in problem and f"{tmp_path}/file" in problem


@pytest.mark.parametrize("size", ["5GiB", "5", "lots", "0GB", "-5GB"])
def test_a_shard_size_that_the_export_cannot_read(size, problems):
    (problem,) = problems(max_shard_size=size)
    assert "max_shard_size" in problem and size in problem


# -- the launch --------------------------------------------------------------------------------------------------------

LAUNCHED = {
    "WORLD_SIZE": "2",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The environment that the launcher makes of a sound accelerate file, with changes; None takes a variable out."""
    for key in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(key)

    def launched(**changes: str | None) -> None:
        for key, value in {**LAUNCHED, **changes}.items():
            monkeypatch.delenv(key, raising=False) if value is None else monkeypatch.setenv(key, value)

    return launched


def test_a_sound_accelerate_file_passes(check, launched):
    launched()
    check(launched=True)
    launched(FSDP_VERSION="2", FSDP_SYNC_MODULE_STATES=None, FSDP_USE_ORIG_PARAMS=None)
    check(launched=True)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"WORLD_SIZE": None}, ["no launcher", "WORLD_SIZE", "launch/train.sh"]),
        ({"ACCELERATE_USE_FSDP": None}, ["does not ask for FSDP", "distributed_type: FSDP"]),
        ({"ACCELERATE_USE_FSDP": "false"}, ["does not ask for FSDP", "distributed_type: FSDP"]),
        (
            {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"},
            ["fsdp_state_dict_type is FULL_STATE_DICT", "SHARDED_STATE_DICT"],
        ),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"}, ["fsdp_cpu_ram_efficient_loading is false", "set it to true"]),
        ({"FSDP_SYNC_MODULE_STATES": "false"}, ["fsdp_sync_module_states is false", "set it to true"]),
        ({"FSDP_USE_ORIG_PARAMS": "false"}, ["fsdp_use_orig_params is false", "set it to true"]),
        (
            {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "LOCAL_WORLD_SIZE": "1"},
            ["fsdp_sharding_strategy is HYBRID_SHARD", "one rank a node", "FULL_SHARD"],
        ),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, ["fsdp_offload_params is true", "there is no GPU", "set it to false"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_accelerate_file_that_does_not_do(changes, parts, problems, launched):
    """L2, S1: among them the settings under which a run trains on garbage, or times out, without a word."""
    launched(**changes)
    (problem,) = (text for text in problems(launched=True) if "cannot accumulate" not in text)
    for part in parts:
        assert part in problem


def test_offloading_and_accumulating_under_fsdp1(launched, problems):
    """torch would train on the last micro-batch alone."""
    launched(FSDP_OFFLOAD_PARAMS="true")
    found = problems(launched=True, global_batch_size=4, world_size=1)
    assert any("cannot accumulate gradients, and global_batch_size 4 takes 4 micro-batches" in text for text in found)
    launched(FSDP_OFFLOAD_PARAMS="true", FSDP_VERSION="2")
    assert not any("accumulate" in text for text in problems(launched=True, global_batch_size=4, world_size=1))


def test_a_rank_for_each_gpu_and_the_devices_that_were_asked_for(launched):
    """N2, and law 1: never on CPUs because a driver is broken, never twice on one GPU."""
    launched(LOCAL_WORLD_SIZE="8", ACCELERATE_USE_CPU="false")
    assert plugin.device_problems(8) == []
    (problem,) = plugin.device_problems(4)
    assert problem == "8 ranks were started here and there are 4 GPUs; start a rank for each GPU"
    (problem,) = plugin.device_problems(0)
    assert problem.startswith("the accelerate file asks for GPUs and there is none")
    launched(LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    assert plugin.device_problems(0) == []
    (problem,) = plugin.device_problems(8)
    assert problem.startswith("the accelerate file has use_cpu: true and there are 8 GPUs")


@pytest.mark.parametrize(("hang", "ddp"), [(1800, 7200), (0, 1)])
def test_a_watchdog_that_speaks_first(hang, ddp):
    assert settings.timeouts(TrainArguments(hang_timeout=hang, ddp_timeout=ddp)) == []


@pytest.mark.parametrize(("hang", "ddp"), [(1800, 1800), (1800, 600), (-1, 600)])
def test_a_watchdog_that_a_collective_would_forestall(hang, ddp):
    (problem,) = settings.timeouts(TrainArguments(hang_timeout=hang, ddp_timeout=ddp))
    assert problem.startswith(f"hang_timeout {hang}") or problem.startswith(f"hang_timeout is {hang}")


def test_data_that_are_not_at_hand(problems, tmp_path):
    (problem,) = problems(dataset_name=tmp_path / "none.jsonl")
    assert problem.startswith(f"dataset_name '{tmp_path}/none.jsonl': no such file or folder")


def test_a_check_from_a_shell_looks_at_no_launcher(check, launched):
    launched(WORLD_SIZE=None, ACCELERATE_USE_FSDP=None)
    check(launched=False)
