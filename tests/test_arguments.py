from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate import PartialState
from trl import SFTConfig

from recipe.arguments import TrainArguments, parse_arguments
from recipe.errors import UserError

Config = Callable[[str], list[str]]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Write a run's YAML file; returns the arguments that name it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


def refused(argv: list[str]) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse_arguments(argv)
    return caught.value.problems


# -- precedence --------------------------------------------------------------------------------------------------------


def test_defaults_are_overridden_by_yaml_and_yaml_by_the_command_line(config):
    argv = config("learning_rate: 1.0e-4\nmax_steps: 7\nparam_dtype: bfloat16\neval_samples: 3\n")
    _, _, default = parse_arguments([])
    data, model, train = parse_arguments([*argv, "--max_steps", "9"])
    assert (default.max_steps, default.weight_decay) == (-1, train.weight_decay), (
        "a key that nobody sets keeps its default"
    )
    assert (train.max_steps, train.learning_rate) == (9, 1e-4)
    assert (model.param_dtype, data.eval_samples) == ("bfloat16", 3), "each key reaches the dataclass that has it"


def test_the_place_of_config_on_the_command_line_does_not_matter(config):
    argv = config("max_steps: 7\nseed: 3\n")
    for order in ([*argv, "--max_steps", "9"], ["--max_steps", "9", *argv], [f"--config={argv[1]}", "--max_steps=9"]):
        train = parse_arguments(order)[2]
        assert (train.max_steps, train.seed) == (9, 3)


def test_safe_defaults_replace_the_librarys():
    _, model, train = parse_arguments([])
    assert (train.resume_from_checkpoint, train.save_total_limit, train.export_dtype) == ("auto", 3, "bfloat16")
    assert (train.logging_nan_inf_filter, train.activation_checkpointing, train.per_device_train_batch_size) == (
        False,
        True,
        1,
    )
    assert (train.max_length, train.global_batch_size) == (None, None), "no default: a wrong guess is costly"
    assert (model.param_dtype, model.reduce_dtype) == ("float32", "float32")


# -- unknown keys ------------------------------------------------------------------------------------------------------


def test_every_unknown_key_is_named_at_once_with_the_nearest_known_one(config):
    argv = config("learning_rat: 1.0e-4\nmax_seq_length: 2048\nseed: 1\n")
    problems = refused([*argv, "--global_batch_siz", "8", "--eval-sample=3"])
    assert problems == [
        f"unknown key 'learning_rat' in {argv[1]}; the nearest known key is 'learning_rate'",
        f"unknown key 'max_seq_length' in {argv[1]}; the nearest known key is 'max_length'",
        "unknown key 'global_batch_siz' on the command line; the nearest known key is 'global_batch_size'",
        "unknown key 'eval_sample' on the command line; the nearest known key is 'eval_samples'",
    ]


@pytest.mark.parametrize("flag", ["--max_step", "--learning", "--lr"])
def test_an_abbreviated_key_is_no_key(flag):
    assert f"unknown key '{flag[2:]}'" in refused([flag, "1"])[0]


def test_a_key_that_is_no_text_is_unknown(config):
    assert "unknown key '1'" in refused(config("1: 2\n"))[0]


@pytest.mark.parametrize("stray", [["configs/quickstart.yaml"], ["--no_global_batch_size"]])
def test_what_is_no_key_is_a_users_mistake(stray):
    assert stray[0] in refused(stray)[0]


# -- types -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001", "'1e-5'"])
def test_numbers_may_be_written_as_yaml_or_python_do(text, config):
    """YAML reads 1e-5, without a point, as text."""
    assert parse_arguments(config(f"learning_rate: {text}"))[2].learning_rate == 1e-5


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("max_steps: 2.5", "2.5"),
        ("max_steps: 16.0", "16.0"),
        ("max_steps: many", "many"),
        ("max_steps: true", "True"),
        ("learning_rate: fast", "fast"),
        ("learning_rate: true", "True"),
        ("packing: maybe", "maybe"),
        ("packing: 3", "3"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_yaml(line, value, config):
    (problem,) = refused(config(line))
    assert line.split(":")[0] in problem and value in problem


@pytest.mark.parametrize(
    ("key", "value"), [("max_steps", "2.5"), ("learning_rate", "fast"), ("param_dtype", "float16")]
)
def test_a_value_of_the_wrong_type_is_refused_on_the_command_line(key, value):
    (problem,) = refused([f"--{key}", value])
    assert key in problem and value in problem


@pytest.mark.parametrize("line", ["param_dtype: float16", "reduce_dtype: half", "export_dtype: int8"])
def test_a_value_that_is_no_choice_is_refused_in_yaml(line, config):
    assert line.split()[1] in refused(config(line))[0]


@pytest.mark.parametrize("line", ["max_steps: [16]", "learning_rate: {a: 1}", "packing: {a: 1}", "max_steps: null"])
def test_a_list_a_mapping_or_nothing_is_refused_where_a_plain_value_belongs(line, config):
    assert line.split(":")[0] in refused(config(line))[0]


def test_lists_and_mappings_are_taken_where_they_belong(config):
    train = parse_arguments(config("report_to: [tensorboard, wandb]\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"))[2]
    assert train.report_to == ["tensorboard", "wandb"]
    assert train.lr_scheduler_kwargs == {"min_lr_rate": 0.1}


@pytest.mark.parametrize(
    ("argv", "export", "packing"),
    [
        ([], True, False),
        (["--export", "false", "--packing", "true"], False, True),
        (["--export=False", "--packing"], False, True),
        (["--no_export"], False, False),
        (["--no-export", "--packing", "yes"], False, True),
    ],
)
def test_booleans_on_the_command_line(argv, export, packing):
    train = parse_arguments(argv)[2]
    assert (train.export, train.packing) == (export, packing)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("yes", True), ("off", False), ("'no'", False)]
)
def test_booleans_in_yaml(text, value, config):
    assert parse_arguments(config(f"packing: {text}\n"))[2].packing is value


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path):
    assert refused(["--config", str(tmp_path / "no.yaml")]) == [
        f"no config file at '{tmp_path}/no.yaml'; give --config an existing YAML file"
    ]
    assert refused(["--config"]) == ["--config needs a path to a YAML file"]


@pytest.mark.parametrize(("text", "what"), [("- a\n- b\n", "list"), ("word", "str"), ("", "NoneType")])
def test_a_file_that_is_no_mapping(text, what, config):
    (problem,) = refused(config(text))
    assert problem.endswith(f"must hold a YAML mapping of keys to values, not {what}")


def test_a_file_that_is_no_yaml(config):
    argv = config("seed: [1\n")
    (problem,) = refused(argv)
    assert problem.startswith(f"{argv[1]} is not valid YAML")


@pytest.mark.parametrize("kind", ["folder", "binary"])
def test_a_file_that_cannot_be_read(kind, tmp_path):
    path = tmp_path / "run.yaml"
    path.mkdir() if kind == "folder" else path.write_bytes(b"\xff\xfe\x00")
    assert str(path) in refused(["--config", str(path)])[0]


# -- activation --------------------------------------------------------------------------------------------------------


def test_parsing_joins_no_process_group(monkeypatch, config):
    """Even where a launcher has said that there are other ranks: the checks come first."""
    for key, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("parsing joined a process group"))
    before = dict(PartialState._shared_state)
    parse_arguments(config("max_steps: 7\nbf16: true\n"))
    assert PartialState._shared_state == before


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The arguments as transformers finds them when it takes the device and joins the group."""

    def activate(world_size: int = 2, on_gpu: bool = False, **keys: Any) -> dict[str, Any]:
        seen: list[dict[str, Any]] = []
        monkeypatch.setattr(SFTConfig, "__post_init__", lambda self: seen.append(dict(vars(self))))
        TrainArguments(**{"global_batch_size": 16, **keys}).activate(world_size, on_gpu)
        (values,) = seen
        return values

    return activate


@pytest.mark.parametrize(
    ("world_size", "micro", "accumulation"), [(1, 1, 16), (1, 16, 1), (2, 2, 4), (4, 4, 1), (16, 1, 1), (8, 1, 2)]
)
def test_accumulation_is_derived(world_size, micro, accumulation, activated):
    values = activated(world_size, per_device_train_batch_size=micro)
    assert values["gradient_accumulation_steps"] == accumulation


@pytest.mark.parametrize("on_gpu", [False, True])
def test_ranks_without_a_gpu_are_told_so(on_gpu, activated):
    assert activated(on_gpu=on_gpu)["use_cpu"] is not on_gpu


@pytest.mark.parametrize(
    ("old", "new", "on"), [(None, True, True), (None, False, False), (True, False, True), (False, True, False)]
)
def test_the_older_name_of_activation_checkpointing_wins_where_it_is_set(old, new, on, activated):
    values = activated(gradient_checkpointing=old, activation_checkpointing=new)
    assert values["activation_checkpointing"] is on
    assert values["gradient_checkpointing"] is None, "exactly one of the two mechanisms may be on"


def test_checkpointing_is_not_reentrant(activated):
    assert activated()["activation_checkpointing_kwargs"] == {"use_reentrant": False}
    kwargs = {"determinism_check": "none"}
    assert activated(activation_checkpointing_kwargs=kwargs)["activation_checkpointing_kwargs"] == kwargs | {
        "use_reentrant": False
    }


def test_gradients_are_reduced_at_every_micro_batch(activated):
    """Else each rank holds the gradients of the whole model until the last one."""
    assert activated()["accelerator_config"]["gradient_accumulation_kwargs"] == {"sync_each_batch": True}


def test_prepared_data_are_not_prepared_again(activated):
    values = activated(assistant_only_loss=True, chat_template_path="llama2")
    assert values["dataset_kwargs"] == {"skip_prepare_dataset": True}
    assert (values["assistant_only_loss"], values["chat_template_path"]) == (False, None)


# -- sources -----------------------------------------------------------------------------------------------------------


def test_data_may_be_given_more_than_once(config):
    argv = config("dataset_name: a.jsonl\nseed: 3\n")
    data, _, train = parse_arguments(
        [*argv, "--data", "b.jsonl", "--max_steps", "5", "--data=c*.json", "--data", "d", "e"]
    )
    assert data.data == ["b.jsonl", "c*.json", "d", "e"]
    assert (data.dataset_name, train.seed, train.max_steps) == ("a.jsonl", 3, 5)
    assert refused([*argv, "--data"]) == ["argument --data: expected at least one argument"]


def test_a_list_of_sources_in_the_yaml(config):
    argv = config(
        "datasets:\n- a.jsonl\n- {path: b.jsonl, weight: 2, split: train}\neval_datasets: [{path: c.jsonl}]\n"
    )
    data = parse_arguments(argv)[0]
    assert refused(["--datasets", "a.jsonl"]) == [
        "--datasets is for the YAML file; on the command line give --data PATH ..."
    ]
    for value in ("a.jsonl", "{path: a.jsonl}"):
        (problem,) = refused(config(f"datasets: {value}\n"))
        assert problem.endswith("; give a list")
    assert data.datasets == ["a.jsonl", {"path": "b.jsonl", "weight": 2, "split": "train"}]
    assert data.eval_datasets == [{"path": "c.jsonl"}]
