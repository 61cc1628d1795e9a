import os
import subprocess
import sys
from pathlib import Path

import pytest

import recipe.data.build
import recipe.data.stage
from recipe.data import prepare
from recipe.data.report import Report

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def count_rows(monkeypatch):
    """Numbers of rows of the chunks that were worked on."""
    calls = []
    work = recipe.data.stage.RowWork.__call__

    def counted(self, chunk):
        batch = work(self, chunk)
        calls.append(batch.rows_read)
        return batch

    monkeypatch.setattr(recipe.data.stage.RowWork, "__call__", counted)
    return calls


def test_second_call_maps_the_first_ones_files(chats, write, data_args, train_args, tokenizer, count_rows):
    args = data_args(write(chats), eval_samples=4)
    first = prepare(args, train_args(packing=True), tokenizer)
    assert sum(count_rows) == 30
    second = prepare(args, train_args(packing=True), tokenizer)
    assert sum(count_rows) == 30, "nothing was read again"
    assert first.fingerprint == second.fingerprint
    assert first.report == second.report
    assert first.train.to_dict() == second.train.to_dict()
    assert [Path(file["filename"]) for file in second.train.cache_files] == [
        Path(args.data_cache_dir) / second.fingerprint / "train" / "data-00000-of-00001.arrow"
    ]
    names = sorted(path.name for path in Path(args.data_cache_dir).iterdir())
    assert names == [second.fingerprint, f"{second.fingerprint}.lock"], "no scratch file is left"


def test_fingerprint_changes_with_what_the_data_depend_on_and_with_nothing_else(
    chats, write, data_args, train_args, tokenizer, tmp_path
):
    path, other = write(chats), write(chats[1:], "other.jsonl")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}")

    def fingerprint(name=path, data=None, tokenizer=tokenizer, **kwargs):
        return prepare(data_args(name, **data or {}), train_args(**kwargs), tokenizer).fingerprint

    first = fingerprint()
    tokenizer("the fox", truncation=True, max_length=2)
    assert first == fingerprint(), "what the last call left in the tokenizer is not what it is"
    assert first == fingerprint(seed=7), "no row was drawn"
    assert first == fingerprint(learning_rate=1.0, dataset_num_proc=2)
    assert first == fingerprint(write(chats, "copy.jsonl"))
    assert first == fingerprint(data={"max_bad_rows": 3, "max_long_rows": 1.0}), "limits change no row"
    assert first == fingerprint(data={"datasets": [path]}, name=None)
    tokenizer.add_tokens(["a dog"])
    changed = [
        first,
        fingerprint(),
        fingerprint(other),
        fingerprint(max_length=64),
        fingerprint(packing=True),
        fingerprint(data={"truncation": "split"}),
        fingerprint(data={"repeated_roles": "merge"}),
        fingerprint(assistant_only_loss=False),
        fingerprint(assistant_only_loss=False, chat_template_path=str(tmp_path / "own.jinja")),
        fingerprint(shuffle_dataset=True),
        fingerprint(data={"eval_samples": 2}),
        fingerprint(data={"eval_samples": 2}, seed=7),
    ]
    assert len(set(changed)) == len(changed)


PREPARE = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
import recipe.data.build
import recipe.data.stage
from recipe.arguments import DataArguments, TrainArguments
from recipe.data import prepare

path, cache, tokenizer, log = sys.argv[1:]
build = recipe.data.build.Builder.build
def logged(*args):
    with open(log, "a") as file:
        file.write("built\\n")
    return build(*args)
recipe.data.build.Builder.build = logged
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
train_args = TrainArguments(
    output_dir="unused", max_length=128, packing=True, assistant_only_loss=True, chat_template_path="llama2"
)
print("ready", flush=True)
input()
prepared = prepare(DataArguments(dataset_name=path, data_cache_dir=cache), train_args, tokenizer)
print(prepared.fingerprint, len(prepared.train), prepared.report.train.tokens)
"""


@pytest.mark.slow
def test_two_processes_make_one_cache(chats, write, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    log, cache = tmp_path / "log", tmp_path / "cache"
    command = [sys.executable, "-c", PREPARE, write(chats * 50), str(cache), str(tmp_path / "tokenizer"), str(log)]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=os.environ.copy()
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1]
    assert log.read_text() == "built\n", "one process read the rows, the other waited"
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_failed_build_leaves_nothing(chats, write, data_args, train_args, tokenizer, monkeypatch):
    args = data_args(write(chats))
    monkeypatch.setattr(recipe.data.build.Report, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(args, train_args(), tokenizer)
    assert [path.suffix for path in Path(args.data_cache_dir).iterdir()] == [".lock"]
    monkeypatch.undo()
    assert len(prepare(args, train_args(), tokenizer).train) == 30


def test_a_folder_that_appears_meanwhile_is_taken(chats, write, data_args, train_args, tokenizer, monkeypatch):
    """As when a file system does not lock across nodes, and the other node was first."""
    args = data_args(write(chats))
    first = prepare(args, train_args(), tokenizer)
    folder = Path(args.data_cache_dir) / first.fingerprint
    folder.rename(folder.with_suffix(".away"))
    save = Report.save

    def save_and_lose(report, path):
        save(report, path)
        folder.with_suffix(".away").rename(folder)

    monkeypatch.setattr(Report, "save", save_and_lose)
    assert prepare(args, train_args(), tokenizer).train.to_dict() == first.train.to_dict()
