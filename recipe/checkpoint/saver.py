"""Save a checkpoint while training goes on: what the ranks hold is copied to host memory, and a thread of each rank
writes the copy.

The threads talk through the launcher's store alone, so no collective of theirs can meet one of the training's. Rank 0's
begins the draft, hears of what every rank wrote, and publishes it; all ranks learn the same outcome.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from tqdm.auto import tqdm

from recipe.checkpoint import publish, retire, shards
from recipe.checkpoint.find import name_of
from recipe.checkpoint.manifest import Manifest, describe_files, list_files
from recipe.errors import UserError
from recipe.rendezvous import Rendezvous

_SAVERS = count()  # of this process, made in the same order on every rank
ATTEMPTS = 2
RETRY_SECONDS = 3.0  # a file server that has just been restarted
Data = dict[MetadataIndex, torch.Tensor]
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@dataclass
class Content:
    """What a checkpoint holds.

    Attributes:
        pieces: {folder of sharded files: what this rank holds}.
        texts: {file: content}, written by rank 0.
        describe: writes further files into a folder, on rank 0; in the saver's thread.
        manifest: without its files.
    """

    pieces: dict[str, list[shards.Piece]]
    texts: dict[str, str]
    describe: Callable[[Path], object]
    manifest: Manifest


@dataclass
class Outcome:
    """How a save ended.

    Attributes:
        pause: seconds that training stood still on this rank.
        total: seconds from its begin until it was published.
        published: whether it was, on every rank the same.
        retired: older checkpoints that were deleted, on rank 0, who deletes.
        failures: what went wrong in attempts.
        disk: whether it was the disk that would not take it.
    """

    step: int
    pause: float = 0.0
    total: float = 0.0
    published: bool = False
    retired: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    disk: bool = False

    def raise_if_failed(self) -> "Outcome":
        """Raises `UserError` where the disk will not take it, `RuntimeError` for any other failure."""
        if self.published:
            return self
        twice = ", twice" if len(self.failures) == ATTEMPTS else ""
        text = f"checkpoint-{self.step} could not be written{twice}: {self.failures[-1]}; earlier ones are unharmed"
        if self.disk:
            raise UserError(f"{text}. Mend output_dir's disk (space, quota, permissions), or set another output_dir")
        raise RuntimeError(text)


class Saver:
    """Saves checkpoints of one run, one at a time.

    Args:
        run_dir: where they go.
        rendezvous: a store of the saver's own: a client of a store answers one thread at a time.
        device: of the ranks.
        in_background: let training go on once everything is copied; else nothing is copied, and it has to wait.
        keep, keep_every: see `retire`.

    Attributes:
        progress, phase: how far the thread is, for whoever waits for it.
    """

    def __init__(
        self,
        run_dir: Path,
        rendezvous: Rendezvous,
        device: torch.device,
        *,
        in_background: bool,
        keep: int | None = None,
        keep_every: int | None = None,
    ):
        self.run_dir, self.rendezvous, self.device = run_dir, rendezvous, device
        self.in_background, self.keep, self.keep_every = in_background, keep, keep_every
        self.progress, self.phase = 0, ""
        self._layouts: dict[str, shards.Layout] = {}
        self._key = f"saver {next(_SAVERS)}, save"  # a store remembers
        self._number = 0
        self._stager: DefaultStager | None = None
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None
        self._outcome = Outcome(0)

    # -- the main thread -------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return self._thread is not None

    def save(self, content: Content, began: float | None = None) -> None:
        """Begin a save; none may be in flight. Until `wait_staged` has returned, nothing in `content` may change.
        Collective.

        Args:
            began: when training stopped for it (`time.perf_counter`); None: now.
        """
        assert self._thread is None, "one save at a time"
        began = time.perf_counter() if began is None else began
        for name, pieces in content.pieces.items():
            if name not in self._layouts:
                self._layouts[name] = shards.agree(pieces)
        mine = {item.index for name in content.pieces for item in self._layouts[name].mine.items}
        live: Data = {
            piece.index: piece.data.detach()
            for pieces in content.pieces.values()
            for piece in pieces
            if piece.index in mine  # of what several ranks hold, one writes it
        }
        self._number += 1
        self._outcome = Outcome(content.manifest.step)
        self._copied = threading.Event()
        arguments = [content, self._stage(live), began]
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="saver")
        self._thread.start()
        self._outcome.pause += time.perf_counter() - began

    def _stage(self, live: Data) -> Future[Data]:
        """What is to be written, once it is copied."""
        staged: Future[Data] = Future()
        if not self.in_background:
            staged.set_result(live)
            return staged
        on_gpu = self.device.type == "cuda"
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(on_gpu, False, True, on_gpu))
        if on_gpu:
            torch.cuda.synchronize(self.device)  # the copy goes by a stream of its own
        keys = list(live)  # the stager would copy the keys too
        copying = self._stager.stage({str(i): live[key] for i, key in enumerate(keys)})
        assert isinstance(copying, Future)

        def hand_over(done: Future) -> None:
            if done.exception() is None:
                staged.set_result(dict(zip(keys, done.result().values(), strict=True)))
            else:
                staged.set_exception(done.exception())
            self._copied.set()

        copying.add_done_callback(hand_over)
        return staged

    def wait_staged(self) -> None:
        """Until what the save in flight holds may change: it is copied, or written."""
        if self._thread is not None:
            began = time.perf_counter()
            if self.in_background:
                self._copied.wait()
            else:
                self._thread.join()
            self._outcome.pause += time.perf_counter() - began

    def poll(self) -> Outcome | None:
        """How the save in flight ended, once it has on all ranks; None where there is none or it has not. Collective if
        there is one."""
        if self._thread is None:
            return None
        ended = torch.tensor(int(not self._thread.is_alive()), device=self.device)
        dist.all_reduce(ended, dist.ReduceOp.MIN)
        return self._conclude() if ended else None

    def finish(
        self, alive: Callable[[str], object] = lambda phase: None, patience: float | None = None
    ) -> Outcome | None:
        """Wait for the save in flight; None where there is none, or where it takes longer than `patience` seconds.

        Args:
            alive: called with what the save does, whenever it gets further.
        """
        if self._thread is None:
            return None
        seen, began = -1, time.perf_counter()
        while self._thread.is_alive() and (patience is None or time.perf_counter() - began < patience):
            if self.progress != seen:
                seen = self.progress
                alive(self.phase)
            self._thread.join(0.2)
        self._outcome.pause += time.perf_counter() - began
        return None if self._thread.is_alive() else self._conclude()

    def _conclude(self) -> Outcome:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        return self._outcome

    # -- the thread ------------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """The thread got further."""
        self.phase = phase
        self.progress += 1

    def _run(self, content: Content, staged: Future[Data], began: float) -> None:
        outcome = self._outcome
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # each thread has a current device of its own
            for attempt in range(1, ATTEMPTS + 1):
                failure = self._attempt(f"{self._key} {self._number}.{attempt}", content, staged)
                if failure is None:
                    outcome.published = True
                    break
                outcome.failures.append(failure["text"])
                outcome.disk = failure["disk"]
                if attempt < ATTEMPTS:
                    if self.rendezvous.rank == 0:
                        _warn(f"{failure['text']}; trying once more")
                    time.sleep(RETRY_SECONDS)
            outcome.total = time.perf_counter() - began
            if outcome.published and self.rendezvous.rank == 0:
                self._retire(content.manifest.step)
        except Exception as error:  # noqa: BLE001 - such as a store that does not answer: the main thread raises it
            outcome.failures.append(f"{type(error).__name__}: {error}")
        self.enter("ended")

    def _attempt(self, key: str, content: Content, staged: Future[Data]) -> dict[str, Any] | None:
        """One attempt of all ranks together; returns the same failure on each, or None."""
        step, main = content.manifest.step, self.rendezvous.rank == 0
        self.enter(f"checkpoint {step}: beginning")
        begun: list[Path] = []
        failure = _failure_of(lambda: begun.append(publish.begin(self.run_dir, step))) if main else None
        told = {"failure": failure, "draft": begun[0].name if begun else None}
        told = self.rendezvous.from_main(f"{key} begun", told)
        if told["failure"] is not None:
            return told["failure"]
        draft = self.run_dir / told["draft"]
        written: dict[str, shards.Written] = {}
        failure = _failure_of(lambda: written.update(self._write(draft, content, staged.result())))
        mine = {"failure": failure, "written": {name: asdict(one) for name, one in written.items()}}
        everyone = self.rendezvous.to_main(f"{key} written", mine)
        if everyone is not None:
            self.enter(f"checkpoint {step}: publishing")
            failure = self._publish(draft, content, everyone)
        return self.rendezvous.from_main(f"{key} ended", failure)

    def _write(self, draft: Path, content: Content, staged: Data) -> dict[str, shards.Written]:
        written = {}
        for name in content.pieces:
            self.enter(f"checkpoint {content.manifest.step}: writing {name}")
            written[name] = shards.write(draft / name, self._layouts[name], staged, self._tick)
        return written

    def _tick(self) -> None:
        self.progress += 1

    def _publish(self, draft: Path, content: Content, everyone: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        failures = [one["failure"] for one in everyone if one["failure"] is not None]
        if not failures:
            failures = list(filter(None, [_failure_of(lambda: self._complete(draft, content, everyone))]))
        if not failures:
            return None
        _failure_of(lambda: publish.discard(draft))  # what it takes of a full disk
        text = "; ".join(dict.fromkeys(failure["text"] for failure in failures))
        return {"text": text, "disk": any(failure["disk"] for failure in failures)}

    def _retire(self, step: int) -> None:
        self.enter(f"checkpoint {step}: deleting old ones")
        retired = self._outcome.retired
        published = self.run_dir / name_of(step)
        failure = _failure_of(
            lambda: retired.extend(old.name for old in retire.retire(published, self.keep, self.keep_every))
        )
        if failure is not None:  # the new one is there all the same
            _warn(f"old checkpoints could not be deleted: {failure['text']}")

    def _complete(self, draft: Path, content: Content, everyone: Sequence[dict[str, Any]]) -> None:
        """Write what is rank 0's, and publish."""
        files: dict[str, dict[str, Any]] = {}
        for name in content.pieces:
            parts = [one["written"][name] for one in everyone]
            shards.finish(draft / name, self._layouts[name], [part["items"] for part in parts])
            files |= {f"{name}/{file}": entry for part in parts for file, entry in part["files"].items()}
        for name, text in content.texts.items():
            (draft / name).write_text(text)
        content.describe(draft)
        own = [name for name in list_files(draft) if name not in files]
        for name in own:
            publish.sync(draft / name)
        content.manifest.files = files | describe_files(draft, own)
        publish.publish(draft, content.manifest)


def _failure_of(work: Callable[[], object]) -> dict[str, Any] | None:
    """What went wrong in `work`, in JSON's types; None if nothing did."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - every rank hears of it, and the main threads raise it
        disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
        return {"text": f"{type(error).__name__} on {os.uname().nodename}: {error}", "disk": disk}
    return None


def _warn(text: str) -> None:
    with suppress(OSError):  # the log may lie on the disk that is full
        tqdm.write(f"recipe: warning: {text}")
