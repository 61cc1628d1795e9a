"""Saves by one rank and by two: each scenario runs on real ranks, which say what they saw."""

import errno
import io
import threading
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipe import ranks
from recipe.checkpoint import saver as savers
from recipe.checkpoint.find import candidates
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.saver import Content, Outcome, Saver
from recipe.checkpoint.shards import Piece, Reader, Written, flat_pieces
from recipe.checkpoint.verify import verify
from recipe.rendezvous import Rendezvous
from tests.distributed.ranks import run_ranks

SIZE = 1001


@dataclass
class Trouble:
    """What goes wrong in the first `times` attempts, on the last rank: while it writes; or (`describing`) on rank 0."""

    error: Exception
    times: int
    describing: bool = False

    def strike(self) -> None:
        self.times -= 1
        if self.times >= 0:
            raise self.error


class Held(Saver):
    """A saver whose thread writes only when `gate` is open, and meets `trouble`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gate, self.trouble = threading.Event(), Trouble(OSError(), 0)
        self.gate.set()

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if "writing" in phase:
            assert self.gate.wait(60)

    def _write(self, *args: Any) -> dict[str, Written]:
        written = super()._write(*args)
        if not self.trouble.describing and self.rendezvous.rank == self.rendezvous.world_size - 1:
            self.trouble.strike()
        return written


class Run:
    """A parameter spread over the ranks, and a saver of it."""

    def __init__(self, run_dir: Path, in_background: bool, **kwargs: Any):
        self.flat = torch.zeros(-(-SIZE // dist.get_world_size()))[: SIZE - dist.get_rank() * -(-SIZE // 2)]
        self.saver = Held(run_dir, Rendezvous(), torch.device("cpu"), in_background=in_background, **kwargs)

    def save(self, step: int) -> None:
        """Each element is the step's number."""
        self.flat.fill_(step)
        start = dist.get_rank() * self.flat.numel() if dist.get_rank() == 0 else SIZE - self.flat.numel()
        pieces = {
            "model": list(flat_pieces(("w",), torch.Size((SIZE,)), start, self.flat)),
            "optimizer": [Piece(("step",), torch.Size(()), (), torch.tensor(float(step)))],
        }
        texts = {"trainer_state.json": f"state of {step}"}
        manifest = Manifest(step, 8 * step, dist.get_world_size(), {"seed": 42})
        self.saver.save(Content(pieces, texts, self.describe, manifest))

    def describe(self, folder: Path) -> None:
        (folder / "config.json").write_text("described")
        if self.saver.trouble.describing:
            self.saver.trouble.strike()

    def finish(self) -> Outcome:
        outcome = self.saver.finish()
        assert outcome is not None
        return outcome.raise_if_failed()


def values(folder: Path) -> set[float]:
    """What is in a checkpoint, which is whole."""
    assert all(problem is None for _, problem in verify(folder, fast=False, processes=1))
    weight, step = torch.full((SIZE,), -7.0), torch.tensor(-7.0)
    Reader(folder / "model").read([Piece(("w",), weight.shape, (0,), weight)])
    Reader(folder / "optimizer").read([Piece(("step",), step.shape, (), step)])
    return {*weight.tolist(), step.item()}


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


# -- saves that go well ------------------------------------------------------------------------------------------------


def save_while_training(run_dir: Path) -> dict[str, Any]:
    run = Run(run_dir, in_background=True, keep=2, keep_every=None)
    seen: dict[str, Any] = {"nothing in flight": (run.saver.poll(), run.saver.finish())}
    run.saver.wait_staged()
    run.saver.gate.clear()
    run.save(1)
    run.saver.wait_staged()
    run.flat.fill_(-1.0)  # the optimizer steps
    try:
        run.save(2)
    except AssertionError as error:
        seen["a second save"] = str(error)
    run.flat.fill_(-1.0)
    seen["while it writes"] = (run.saver.poll(), run.saver.finish(patience=0.1), names(run_dir))
    time.sleep(0.5)
    run.saver.gate.set()
    phases: list[str] = []
    outcome = run.saver.finish(phases.append)
    assert outcome is not None
    seen |= {"outcome": outcome, "phases": phases, "after it": run.saver.poll()}
    for step in (2, 3):  # once more, by the same plans and the same memory
        run.save(step)
        while step == 2 and run.saver.phase != "ended":
            time.sleep(0.01)
        run.saver.wait_staged()  # also of a save that has ended
        while (polled := run.saver.poll()) is None:
            time.sleep(0.01)
        seen[f"outcome {step}"] = polled
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_while_a_checkpoint_is_written(world_size: int, tmp_path: Path) -> None:
    """R6: what is saved is what was there when the save began."""
    for rank, seen in enumerate(run_ranks(save_while_training, tmp_path, world_size=world_size)):
        assert seen["nothing in flight"] == (None, None) and seen["after it"] is None
        assert seen["a second save"] == "one save at a time"
        polled, finished, (draft,) = seen["while it writes"]
        assert polled is finished is None and draft.startswith("checkpoint-1.") and draft.endswith(".tmp")
        outcome = seen["outcome"]
        assert (outcome.step, outcome.failures, outcome.retired) == (1, [], [])
        assert 0 < outcome.pause < outcome.total - 0.4, "it stood still for none of the half second"
        assert seen["phases"][0] == "checkpoint 1: writing model" and len(seen["phases"]) >= 1
        assert seen["outcome 2"].retired == [] and seen["outcome 3"].retired == ["checkpoint-1"] * (rank == 0)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    for step in (2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        assert values(folder) == {step}
        assert Manifest.read(folder).samples_seen == 8 * step and Manifest.read(folder).world_size == world_size
        assert {"trainer_state.json", "config.json", "model/.metadata"} <= Manifest.read(folder).files.keys()
        assert (folder / "trainer_state.json").read_text() == f"state of {step}"


def save_and_overwrite(run_dir: Path) -> tuple[int, float, float]:
    run = Run(run_dir, in_background=True)
    run.saver.gate.clear()
    run.save(1)
    run.saver.wait_staged()
    run.flat.fill_(-1.0)
    run.saver.gate.set()
    run.finish()
    run.saver.in_background = False
    run.save(2)
    outcome = run.finish()
    run.flat.fill_(-1.0)
    return len(candidates(run_dir)), outcome.pause, outcome.total


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_files_hold_what_was_there_when_the_save_began(world_size: int, tmp_path: Path) -> None:
    """Written beside training from a copy; or while training waits, without one."""
    for number, pause, total in run_ranks(save_and_overwrite, tmp_path, world_size=world_size):
        assert number == 2 and pause > 0.9 * total > 0
    assert [values(tmp_path / f"checkpoint-{step}") for step in (1, 2)] == [{1}, {2}]


# -- saves that do not -------------------------------------------------------------------------------------------------

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
STALE = OSError(errno.ESTALE, "Stale file handle")
BUG = KeyError("lm_head.weight")
TROUBLES = {
    "once": Trouble(STALE, 1),
    "once, describing": Trouble(NO_SPACE, 1, describing=True),
    "no space": Trouble(NO_SPACE, 2),
    "no space, describing": Trouble(NO_SPACE, 2, describing=True),
    "read-only": Trouble(READ_ONLY, 2),
    "no disk error": Trouble(STALE, 2),
    "a bug": Trouble(BUG, 2),
}


def save_in_trouble(run_dir: Path) -> list[dict[str, Any]]:
    savers.RETRY_SECONDS = 0.05
    seen, run = [], Run(run_dir, in_background=True)
    for number, trouble in enumerate(TROUBLES.values()):
        for in_background in (True, False):
            folder = run.saver.run_dir = run_dir / f"{number} {in_background}"
            run.saver.in_background = in_background
            run.save(1)
            run.finish()
            run.saver.trouble = Trouble(trouble.error, trouble.times, trouble.describing)
            said: dict[str, Any] = {}
            with redirect_stdout(io.StringIO()) as log:
                run.save(2)
                try:
                    said["failures"] = run.finish().failures
                except Exception as error:  # noqa: BLE001
                    said["raised"] = (type(error).__name__, str(error))
            ranks.gather(None)  # until the others have looked
            said |= {"log": log.getvalue(), "left": names(folder), "whole": values(folder / "checkpoint-1")}
            ranks.gather(None)
            run.save(3)
            run.finish()
            said["next"] = values(folder / "checkpoint-3")
            seen.append({"trouble": list(TROUBLES)[number], **said})
    return seen


@pytest.fixture(scope="module", params=[1, 2], ids="{} ranks".format)
def in_trouble(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run_ranks(save_in_trouble, tmp_path_factory.mktemp("runs"), world_size=request.param)


def of(in_trouble: list[list[dict[str, Any]]], trouble: str) -> list[dict[str, Any]]:
    """What every rank saw in it, in the background and not."""
    found = [said for rank in in_trouble for said in rank if said["trouble"] == trouble]
    assert len(found) == 2 * len(in_trouble)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["once", "once, describing"])
def test_a_first_attempt_that_fails_is_made_again_and_said(trouble: str, in_trouble: list) -> None:
    error = str(TROUBLES[trouble].error)
    for said in of(in_trouble, trouble):
        (failure,) = said["failures"]
        assert error in failure and said["left"] == ["checkpoint-1", "checkpoint-2"]
    for said in in_trouble[0]:
        if said["trouble"] == trouble:
            assert "recipe: warning: " in said["log"] and error in said["log"] and "trying once more" in said["log"]
    for rank in in_trouble[1:]:
        assert all(said["log"] == "" for said in rank), "once"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [
        ("no space", "UserError", "Mend output_dir's disk"),
        ("no space, describing", "UserError", "Mend output_dir's disk"),
        ("read-only", "UserError", "Read-only file system"),
        ("no disk error", "RuntimeError", "Stale file handle"),
        ("a bug", "RuntimeError", "KeyError"),
    ],
)
def test_a_save_that_fails_twice_raises_on_every_rank(trouble: str, kind: str, text: str, in_trouble: list) -> None:
    """R7: the earlier checkpoint is whole, nothing is left of the draft, and a later save may go well."""
    for said in of(in_trouble, trouble):
        raised, message = said["raised"]
        assert raised == kind and text in message and str(TROUBLES[trouble].error) in message
        assert (
            message.startswith("checkpoint-2 could not be written, twice: ") and "earlier ones are unharmed" in message
        )
        assert said["left"] == ["checkpoint-1"] and said["whole"] == {1} and said["next"] == {3}


class Broken(Rendezvous):
    """A store that answers no more once something was written."""

    def to_main(self, name: str, value: Any) -> list[Any] | None:
        raise dist.DistNetworkError("connection reset")


def save_without_a_store(run_dir: Path) -> tuple[str, str, list[str]]:
    run = Run(run_dir, in_background=True)
    run.saver.rendezvous = Broken()
    run.save(1)
    try:
        run.finish()
    except RuntimeError as error:
        return type(error).__name__, str(error), candidates(run_dir)
    raise AssertionError("it was taken for a success")


def test_a_thread_that_breaks_off_has_not_saved(tmp_path: Path) -> None:
    ((kind, text, found),) = run_ranks(save_without_a_store, tmp_path, world_size=1)
    assert kind == "RuntimeError" and "connection reset" in text and found == []
