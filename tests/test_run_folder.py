import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe import run_folder
from recipe.arguments import parse_arguments
from recipe.checkpoint.manifest import Manifest, describe_files
from recipe.errors import UserError
from recipe.model import load_tokenizer

RUN = {"data": "0123", "seed": 42, "global_batch_size": 8}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a complete checkpoint of `RUN`, or of another run."""

    def save(step: int, run: dict[str, Any] = RUN, run_dir: Path = tmp_path) -> Path:
        folder = run_dir / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w" * step)
        Manifest(step, 8 * step, 2, run, files=describe_files(folder, ["weights"])).write(folder)
        return folder

    return save


# -- who holds it ------------------------------------------------------------------------------------------------------


def hold(run_dir: Path, told: Connection) -> None:
    run_folder.lock(run_dir)
    told.send("held")
    time.sleep(120)


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path, monkeypatch):
    """However it went: here by a signal that it cannot hear."""
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
    told, tell = multiprocessing.Pipe(duplex=False)
    holder = multiprocessing.get_context("fork").Process(target=hold, args=[tmp_path, tell])
    holder.start()
    try:
        assert told.recv() == "held"
        for _ in range(2):
            with pytest.raises(UserError) as caught:
                run_folder.claim(tmp_path, RUN)
            owner = f"(host {os.uname().nodename}, pid {holder.pid})"
            assert f"{tmp_path} is in use by another run {owner}; wait for it, end it" in str(caught.value)
        assert not (tmp_path / run_folder.IDENTITY).exists()
        run_folder.claim(tmp_path / "another", RUN)
    finally:
        holder.kill()
        holder.join()
    run_folder.claim(tmp_path, RUN)
    assert (tmp_path / run_folder.LOCK).read_text() == f"host {os.uname().nodename}, pid {os.getpid()}\n"


# -- whose folder it is ------------------------------------------------------------------------------------------------


def test_a_folder_is_claimed_once_and_again_by_the_same_run(save, tmp_path):
    run_dir = tmp_path / "runs/new"
    run_folder.claim(run_dir, RUN)
    save(2, run_dir=run_dir)
    run_folder.claim(run_dir, dict(RUN))


def test_the_folder_of_another_run_is_refused_with_what_differs(save, tmp_path):
    run_folder.claim(tmp_path, RUN | {"seed": 7, "optim": "sgd"})
    before = (tmp_path / run_folder.IDENTITY).read_text()
    save(2)
    with pytest.raises(UserError) as caught:
        run_folder.claim(tmp_path, RUN)
    assert "(optim: sgd then, None now; seed: 7 then, 42 now); set another output_dir" in str(caught.value)
    assert str(caught.value).endswith("accept_changes: [optim, seed]")
    with pytest.raises(UserError, match=r"different run \(seed: 7 then, 42 now\)"):
        run_folder.claim(tmp_path, RUN, accepted=["optim"])
    assert (tmp_path / run_folder.IDENTITY).read_text() == before
    run_folder.claim(tmp_path, RUN, accepted=["optim", "seed"])
    assert json.loads((tmp_path / run_folder.IDENTITY).read_text()) == RUN


def test_a_folder_without_checkpoints_goes_to_the_next_run(save, tmp_path):
    """A start that was mended before its first save loses nothing."""
    run_folder.claim(tmp_path, RUN | {"seed": 7})
    run_folder.claim(tmp_path, RUN)
    save(2)
    run_folder.claim(tmp_path, RUN)


def test_an_identity_that_a_crash_cut_off(tmp_path):
    (tmp_path / run_folder.IDENTITY).write_text('{"seed":')
    run_folder.claim(tmp_path, RUN)


# -- what makes a run --------------------------------------------------------------------------------------------------


def fingerprint(folder: Path, *argv: str, data: str = "d", more_tokens: Sequence[str] = ()) -> dict[str, Any]:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(list(more_tokens))
    return run_folder.fingerprint(parse_arguments(["--global_batch_size", "8", *argv]), data, folder, tokenizer)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("global_batch_size", "16"),
        ("seed", "1"),
        ("data_seed", "1"),
        ("max_length", "64"),
        ("packing", "true"),
        ("param_dtype", "bfloat16"),
        ("optim", "adamw_8bit"),
        ("max_steps", "9"),
        ("learning_rate", "0.1"),
        ("lr_scheduler_type", "constant"),
        ("weight_decay", "0.3"),
        ("max_grad_norm", "0.5"),
    ],
)
def test_a_run_is_another_if_its_numbers_would_be(key, value, tiny_model):
    old, new = fingerprint(tiny_model), fingerprint(tiny_model, f"--{key}", value)
    (difference,) = run_folder.differences(old, new)
    assert difference.startswith(f"{key}: ") and difference.endswith(" now")


def test_a_run_is_another_with_other_data_tokenizer_or_model(tiny_model, tied_model):
    old = fingerprint(tiny_model)
    changed = [fingerprint(tiny_model, data="e"), fingerprint(tiny_model, more_tokens=["new"]), fingerprint(tied_model)]
    differing = [[line.split(":")[0] for line in run_folder.differences(old, new)] for new in changed]
    assert differing == [["data"], ["tokenizer"], ["model"]]


def test_a_run_stays_itself_with_other_ranks_folders_and_intervals(tiny_model):
    """These may change at a resume."""
    changes = ("--output_dir", "x", "--per_device_train_batch_size", "4", "--save_steps", "7", "--logging_steps", "3")
    assert fingerprint(tiny_model) == fingerprint(tiny_model, *changes)


def test_a_run_stays_itself_when_its_data_need_no_tokenizing_any_more(tiny_model, tmp_path):
    """The first start calls the tokenizer, which resets what its file says of truncation; a resume maps the cache."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["truncation"] = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    used, unused = load_tokenizer(folder), load_tokenizer(folder)
    used("the quick brown fox")
    arguments = parse_arguments([])
    first, resumed = (run_folder.fingerprint(arguments, "d", folder, tokenizer) for tokenizer in (used, unused))
    assert run_folder.differences(first, resumed) == []


# -- the resolved configuration ----------------------------------------------------------------------------------------


def test_tokens_of_the_hub_are_left_out(tmp_path):
    values = run_folder.resolved(parse_arguments(["--seed", "7", "--hub_token", "hf_secret"]))
    run_folder.write_config(tmp_path, values)
    assert "hf_secret" not in (tmp_path / run_folder.CONFIG).read_text()
    assert values["seed"] == 7


@pytest.mark.parametrize(
    "argv",
    [
        ("--learning_rate", "1e-5", "--report_to", "none", "--export", "false", "--output_dir", "x"),
        ("--eos_token", "<|im_end|>"),
    ],
)
def test_the_resolved_configuration_is_a_configuration(argv, tmp_path):
    """Given as --config, it makes the same run."""
    (tmp_path / "run.yaml").write_text(
        "lr_scheduler_kwargs: {min_lr_rate: 0.1}\nreport_to: [tensorboard]\nmax_length: 64\n"
    )
    old = parse_arguments(["--config", str(tmp_path / "run.yaml"), *argv])
    run_folder.write_config(tmp_path, run_folder.resolved(old))
    assert parse_arguments(["--config", str(tmp_path / run_folder.CONFIG)]) == old


def test_the_resolved_configuration_has_every_key(tmp_path):
    run_folder.write_config(tmp_path, run_folder.resolved(parse_arguments(["--max_length", "64"])))
    values = yaml.safe_load((tmp_path / run_folder.CONFIG).read_text())
    assert {"model_name_or_path", "param_dtype", "dataset_name", "eval_samples", "learning_rate"} <= values.keys()
    assert values["max_length"] == 64 and values["export"] is True
