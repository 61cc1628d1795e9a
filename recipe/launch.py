"""`accelerate launch` for one node of a run, with what it lacks on a cluster.

    python -m recipe.launch [options of accelerate launch] -m recipe.train --config CONFIG

- It leaves with the exit code of the rank that failed first (accelerate's is always 1), so that a batch script can tell
  a request to stop, a user's mistake and a crash apart.
- SIGUSR1 and SIGTERM reach the ranks as a request to stop (`recipe.stopping`). A scheduler signals only the launcher,
  and PyTorch's answers SIGTERM by killing its ranks within 30 seconds, in the middle of a checkpoint.
- When a rank fails the others are ended at once, and what the first said is written last, and to REPORTS.

It takes from the environment:
  STOP_FILES  files that ask the ranks to stop, a line each; the launcher's own is added to them
  REPORTS     folder for one report a rank that ended otherwise than well, whose names sort by what came first and end
              in the exit code (default: none)
"""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from recipe.errors import REPORTED, UserError
from recipe.stopping import EXIT_CODES, LEAVE, STOP_FILES

# Ends a rank that others are waiting for no more. Nothing handles it, so the default (to end) holds; ranks answer
# SIGTERM, PyTorch's choice, by trying to save, which they cannot do without the rank that failed.
TEARDOWN = signal.SIGUSR2
# A rank that these killed did not die of what another rank did.
_OWN_DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
# What all ranks say alike: it matters what, and not which rank.
PLAIN = (UserError.exit_code, *EXIT_CODES.values())


@dataclass(frozen=True, order=True)
class Ending:
    """How a rank ended, if not well; the least of several is what came first."""

    rather: int  # 0 died by itself, 1 anything else, 2 left because it was told to
    seconds: float
    rank: int
    exit_code: int
    text: str

    @classmethod
    def of(cls, rank: int, failure: ProcessFailure) -> "Ending":
        path = Path(failure.error_file)
        if path.is_file():
            seconds = path.stat().st_mtime
            extra = json.loads(path.read_text())["message"]["extraInfo"]  # what recipe.errors.record wrote
            text, code = extra["py_callstack"].strip(), extra["exit_code"]
        else:
            seconds, text = float(failure.timestamp), _unrecorded(failure)
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        if code not in PLAIN:
            text = f"rank {rank} on {socket.gethostname()}: {text}"
        rather = 0 if -failure.exitcode in _OWN_DEATHS else 2 if code == EXIT_CODES[LEAVE] else 1
        return cls(rather, seconds, rank, code, text)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.rather}-{self.seconds:.6f}-rank{self.rank}-code{self.exit_code}.txt"
        (folder / name).write_text(self.text + "\n")


def _torn_down(failure: ProcessFailure, teardowns: list[float]) -> bool:
    """Whether the launcher ended the rank before it could say why it ended itself. One that TEARDOWN does not end (it
    is frozen) is killed after 30 seconds."""
    killed_later = failure.exitcode == -signal.SIGKILL and any(failure.timestamp > began for began in teardowns)
    return not Path(failure.error_file).is_file() and (failure.exitcode == -TEARDOWN or killed_later)


def _unrecorded(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        hint = " (out of memory? the kernel's log says)" if -failure.exitcode == signal.SIGKILL else ""
        return f"killed by {failure.signal_name()}{hint}"
    return f"exit code {failure.exitcode}; its log says why"


def main(argv: list[str]) -> int:
    """Launch this node's ranks and wait for them; returns the exit code of the one that failed first, or 0."""
    scratch = Path(tempfile.mkdtemp(prefix="recipe-launch-"))
    _pass_on_requests(scratch / "stop")
    # Ours: SIGTERM is answered above. (torch.distributed.run reads its options from PET_*.)
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    os.environ[REPORTED] = "1"
    teardowns: list[float] = []

    def teardown_signal() -> signal.Signals:
        teardowns.append(time.time())
        return TEARDOWN

    elastic._get_default_signal = teardown_signal
    logging.getLogger(elastic.__name__).setLevel(logging.CRITICAL)  # `report` says it
    args = launch_command_parser().parse_args(argv)
    os.environ |= _device(args.config_file)
    try:
        launch_command(args)
    except ChildFailedError as error:
        everyone = error.failures.items()
        by_themselves = [(rank, it) for rank, it in everyone if not _torn_down(it, teardowns)]
        return report(sorted(Ending.of(rank, it) for rank, it in by_themselves or everyone))
    except elastic.SignalException as error:
        return 128 + error.sigval
    except ConnectionError as error:  # the port that was asked for is in use
        print(f"recipe: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        shutil.rmtree(scratch)
    return 0


def _device(spread: str | None) -> dict[str, str]:
    """Accelerate does not tell FSDP's ranks; they would take what they find, CPUs where a driver is broken."""
    on_cpu = spread is not None and load_config_from_file(spread).use_cpu
    return {"ACCELERATE_USE_CPU": str(bool(on_cpu)).lower()}


def environment(spread: str) -> dict[str, str]:
    """What the launcher makes of an accelerate file for its ranks, for ranks that another (torchrun) starts."""
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", spread, "script"]))
    made = prepare_multi_gpu_env(args) | _device(spread)
    return {key: made[key] for key in sorted(made) if key.startswith(("ACCELERATE_", "FSDP_"))}


def _pass_on_requests(file: Path) -> None:
    os.environ[STOP_FILES] = "\n".join(filter(None, [os.environ.get(STOP_FILES), str(file)]))

    def ask(number: int, _: FrameType | None) -> None:
        with file.open("a") as lines:
            print(signal.Signals(number).name, file=lines)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGUSR1, ask)


def report(endings: list[Ending]) -> int:
    """Say what came first; returns its exit code."""
    first, folder = endings[0], os.environ.get("REPORTS")
    for ending in endings if folder else ():
        ending.write(Path(folder or ""))
    failed = "" if first.exit_code in PLAIN else "failed, first of all "
    print(f"recipe: {failed}{first.text}", file=sys.stderr, flush=True)
    return first.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Not by sys.exit: a SIGTERM ends a Python that winds up, and srun sends one when another node was first.
    os._exit(code)
