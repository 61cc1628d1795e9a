import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe import run_folder
from recipe.arguments import parse_arguments
from recipe.checkpoint.manifest import FILE as MANIFEST
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
        Manifest(step, 2, run, files=describe_files(folder, ["weights"])).write(folder)
        return folder

    return save


def resume(run_dir: Path, asked: str | None, run: dict[str, Any] = RUN) -> tuple[Path | None, str]:
    folder, lines = run_folder.resume_point(run_dir, asked, run)
    return folder, "\n".join(lines)


# -- where a start goes on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["auto", "true", "True"])
def test_auto_goes_on_from_the_newest(asked, save, tmp_path):
    save(2), save(10), save(9)
    folder, said = resume(tmp_path, asked)
    assert folder == tmp_path / "checkpoint-10", "by number, not by name"
    assert said == f"resuming from {folder}: step 10, written by 2 ranks"


def test_auto_starts_fresh_where_there_is_nothing(tmp_path):
    assert resume(tmp_path / "new", "auto") == (None, f"fresh start: no complete checkpoint in {tmp_path}/new")


def test_auto_passes_over_newer_ones_that_are_incomplete_and_says_why(save, tmp_path):
    """S11: the newest complete one, not the one with the highest number."""
    good, truncated, unfinished = save(2), save(4), save(6)
    (truncated / "weights").write_bytes(b"www")
    (unfinished / MANIFEST).unlink()
    folder, said = resume(tmp_path, "auto")
    assert folder == good
    assert said.splitlines() == [
        "passed over checkpoint-6: it has no manifest.json: it was never finished",
        "passed over checkpoint-4: weights has 3 bytes and was written with 4",
        f"resuming from {good}: step 2, written by 2 ranks",
    ]


def test_auto_says_what_it_passed_over_before_a_fresh_start(save, tmp_path):
    (save(4) / "weights").unlink()
    folder, said = resume(tmp_path, "auto")
    assert folder is None
    assert said.splitlines()[0] == "passed over checkpoint-4: weights is missing"


def test_a_named_checkpoint_may_lie_elsewhere(save, tmp_path):
    elsewhere = save(3, run_dir=tmp_path / "elsewhere")
    assert resume(tmp_path, str(elsewhere))[0] == elsewhere


def test_an_older_checkpoint_of_the_same_folder_is_refused(save, tmp_path):
    """A later start would take the newer one again, and leave the branch that began here."""
    old = save(2)
    assert resume(tmp_path, str(old))[0] == old
    save(4)
    with pytest.raises(UserError, match=r"holds newer ones \(checkpoint-4\)"):
        resume(tmp_path, str(old))


def test_a_named_checkpoint_has_to_be_complete(save, tmp_path):
    save(2)
    (save(4) / "weights").unlink()
    with pytest.raises(UserError, match="checkpoint-4' is not a complete checkpoint: weights is missing"):
        resume(tmp_path, str(tmp_path / "checkpoint-4"))
    with pytest.raises(UserError, match="checkpoint-5' is no folder; give 'auto', 'none' or a checkpoint's folder"):
        resume(tmp_path, str(tmp_path / "checkpoint-5"))


@pytest.mark.parametrize("asked", ["auto", "checkpoint-4"])
def test_a_checkpoint_of_another_run_is_refused(asked, save, tmp_path):
    save(4, RUN | {"seed": 7, "optim": "sgd"})
    with pytest.raises(UserError) as caught:
        resume(tmp_path, asked if asked == "auto" else str(tmp_path / asked))
    assert str(caught.value).endswith(
        "is a checkpoint of a different run: optim: sgd then, None now; seed: 7 then, 42 now"
    )


@pytest.mark.parametrize("asked", [None, "none", "false", "False"])
def test_none_starts_fresh_and_never_over_existing_checkpoints(asked, save, tmp_path):
    assert resume(tmp_path, asked) == (None, "fresh start (resume_from_checkpoint: none)")
    save(2)
    with pytest.raises(
        UserError, match="resume_from_checkpoint is none and .* holds checkpoint-2; set another output_dir"
    ):
        resume(tmp_path, asked)


def test_what_an_interrupted_save_left_is_removed_and_named(save, tmp_path):
    save(2)
    leftover = tmp_path / "checkpoint-4.tmp"
    leftover.mkdir()
    (leftover / "weights").write_bytes(b"w")
    folder, said = resume(tmp_path, "auto")
    assert folder == tmp_path / "checkpoint-2" and not leftover.exists()
    assert said.splitlines()[0] == "removed checkpoint-4.tmp, left by an interrupted save"


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
    assert (tmp_path / run_folder.IDENTITY).read_text() == before


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


def test_a_run_stays_itself_with_other_ranks_folders_and_lengths(tiny_model):
    """These may change at a resume."""
    changes = ("--max_steps", "9", "--output_dir", "x", "--per_device_train_batch_size", "4", "--save_steps", "7")
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
