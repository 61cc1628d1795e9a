import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import recipe.data.build
import recipe.data.stage
from recipe.data import prepare
from recipe.data.cache import build_once
from recipe.data.report import Report
from recipe.errors import UserError

REPOSITORY = Path(__file__).parents[2]
NAME, OTHER = "0123456789abcdef", "fedcba9876543210"  # fingerprints


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


KILLED = """
import os, signal, sys
from pathlib import Path
from recipe.data.cache import build_once

def build(scratch, result):
    (scratch / "0.arrow").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)

build_once(Path(sys.argv[1]), build)
"""


def write_one(scratch: Path, result: Path) -> None:
    (result / "train").mkdir()
    (result / "train" / "rows").write_text("rows")


def test_what_a_killed_builder_left_is_removed(tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / NAME)], cwd=REPOSITORY).returncode == -9
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert left.name.startswith(f".{NAME}.") and (left / "scratch" / "0.arrow").is_file()
    assert build_once(tmp_path / NAME, write_one)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, f"{NAME}.lock"]


@pytest.mark.parametrize(
    ("name", "hours", "removed"),
    [
        (f".{NAME}.node7.x1y2z3", 1, False),  # of another node, which may not see the lock
        (f".{NAME}.node7.x1y2z3", 25, True),
        (f".{NAME}.x1y2z3", 25, True),
        (f".{NAME}.{os.uname().nodename}.x1y2z3", 0, True),
        (f".{OTHER}.{os.uname().nodename}.x1y2z3", 1, False),  # of another lock
        (f".{OTHER}.{os.uname().nodename}.x1y2z3", 25, True),
        (".config", 25, False),
        (".git.x1y2z3", 25, False),
        (OTHER, 25, False),
    ],
)
@pytest.mark.parametrize("last", ["folder", "file"])
def test_what_may_still_be_built_is_not_removed(name, hours, removed, last, tmp_path):
    folder = tmp_path / name
    (folder / "scratch").mkdir(parents=True)
    (folder / "scratch" / "0.arrow").touch()
    newest = {"folder": folder, "file": folder / "scratch" / "0.arrow"}[last]
    for path in (folder / "scratch" / "0.arrow", folder / "scratch", folder):
        then = time.time() - 3600 * (hours if path == newest else 100)
        os.utime(path, (then, then))
    assert build_once(tmp_path / NAME, write_one)
    assert folder.exists() != removed and (tmp_path / NAME / "train" / "rows").read_text() == "rows"


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are in /proc")
def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        inside = Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path).parts
        synced.append(("/".join(inside[1:]), (tmp_path / NAME).exists()))

    monkeypatch.setattr(os, "fsync", watched)
    assert build_once(tmp_path / NAME, write_one)
    assert sorted(synced[:-1]) == [("result", False), ("result/train", False), ("result/train/rows", False)]
    assert synced[-1] == ("", True), "and then the name"


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="needs a folder that takes files from nobody")
def test_a_folder_that_takes_no_files():
    with pytest.raises(UserError, match="^data_cache_dir: /sys takes no files: .*; set another data_cache_dir, or"):
        build_once(Path("/sys") / NAME, write_one)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_disk_that_is_full(tmp_path):
    def build(scratch: Path, result: Path) -> None:
        (result / "rows").symlink_to("/dev/full")
        (result / "rows").write_text("rows")

    with pytest.raises(UserError, match=f"^data_cache_dir: {tmp_path} takes no files: No space left on device; set an"):
        build_once(tmp_path / NAME, build)
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.lock"]


@pytest.mark.parametrize(
    ("number", "where", "ours"),
    [
        (errno.EDQUOT, None, True),
        (errno.EROFS, "cache/x", True),
        (errno.EACCES, "rows.parquet", False),
        (errno.EIO, "cache/x", False),
    ],
)
def test_errors_that_are_not_of_the_cache_pass_on(number, where, ours, tmp_path):
    def build(scratch: Path, result: Path) -> None:
        raise OSError(number, os.strerror(number), where and str(tmp_path / where))

    (tmp_path / "cache").mkdir()
    with pytest.raises(UserError if ours else OSError, match=os.strerror(number)):
        build_once(tmp_path / "cache" / NAME, build)
