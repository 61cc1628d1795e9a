"""What the ranks of a job must have in common: code, packages, configuration, output folder, clock."""

import hashlib
import os
import platform
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from recipe.arguments import Arguments
from recipe.errors import UserError
from recipe.preflight.disk import existing
from recipe.preflight.local import Found, Report, versions
from recipe.rendezvous import Rendezvous, merge
from recipe.run_folder import resolved

START_SECONDS = 1800.0  # until the slowest node has started: a cold file system, a container that is pulled
SHARED_SECONDS = 30.0  # until a network file system shows a new file on other nodes
CLOCK_SECONDS = 5.0  # clocks further apart make logs of nodes hard to compare, and file times misleading


def agree(rendezvous: Rendezvous, report: Report, arguments: Arguments) -> tuple[Found, list[str]]:
    """Put together what every rank's `inspect` found, and hold the nodes against each other. Every rank calls it.

    Returns:
        What this rank's checks read; and lines for the log: where the ranks are, and the warnings of all of them.

    Raises:
        UserError: the problems of all ranks, the same on every rank.
        TimeoutError: with the ranks that did not come.
    """
    output_dir = Path(arguments[2].output_dir or ".").expanduser().absolute()
    token, unwritable = _write_token(output_dir) if rendezvous.rank == 0 else (None, None)
    mine = facts(arguments) | {"problems": report.problems, "warnings": report.warnings, "token": token}
    if unwritable:
        mine["problems"] = [*report.problems, unwritable]
    try:
        everyone = rendezvous.gather("facts", mine, START_SECONDS)
        seen = _sees(everyone[0]["token"])
        answers = rendezvous.gather("token", {"seen": seen, "clock": time.time()}, START_SECONDS)
    finally:
        if token is not None:
            Path(token).unlink()
    problems = merge(everyone) + differences(everyone)
    blind = [one["node"] for one, answer in zip(everyone, answers, strict=True) if not answer["seen"]]
    if blind:
        problems.append(
            f"output_dir {output_dir} is not the same folder on all nodes: a file that rank 0 ({everyone[0]['node']}) "
            f"wrote there is not on {', '.join(dict.fromkeys(blind))}; set output_dir to a shared file system"
        )
    if problems:
        raise UserError(*problems)
    assert report.found is not None
    warnings = merge([{"node": one["node"], "problems": one["warnings"]} for one in everyone])
    warnings += oddities(everyone, [answer["clock"] for answer in answers], rendezvous)
    return report.found, [places([one["node"] for one in everyone]), *(f"warning: {text}" for text in warnings)]


def places(nodes: list[str]) -> str:
    """Which ranks are where, given each rank's node."""
    spans: list[list[int]] = []
    for rank, node in enumerate(nodes):
        if spans and nodes[spans[-1][0]] == node:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return "ranks " + ", ".join(f"{'-'.join(map(str, {s[0]: 0, s[-1]: 0}))} on {nodes[s[0]]}" for s in spans)


def same_run(rendezvous: Rendezvous, run: dict[str, Any]) -> None:
    """Whether all ranks have the same data, model and tokenizer in front of them. Every rank calls it.

    Raises:
        UserError: what differs, and where.
    """
    mine = {"node": os.uname().nodename, "run": {key: str(value) for key, value in run.items()}}
    found = differences(rendezvous.gather("run", mine))
    if found:
        raise UserError(*found)


def facts(arguments: Arguments) -> dict[str, Any]:
    """What this rank is and runs, as JSON values."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    output_dir = Path(arguments[2].output_dir or ".").expanduser().absolute()
    return {
        "node": os.uname().nodename,
        "code": code_digest(),
        "versions": {"python": platform.python_version(), **versions()},
        "config": {key: str(value) for key, value in resolved(arguments).items()} | {"output_dir": str(output_dir)},
        "gpus": {
            "number": str(len(gpus)),
            "models": ", ".join(sorted(set(gpus))),
            "ranks": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        },
    }


def code_digest() -> str:
    """Of this package's sources, whatever version control says of them."""
    root = Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.jinja")]):
        total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()[:12]


def differences(everyone: list[dict[str, Any]]) -> list[str]:
    """What is not the same on all ranks, each with the values and the nodes that have them."""
    remedies = {
        "code": "check the same commit out on all nodes, or use one shared folder",
        "versions": "install from the same constraints.txt on all nodes",
        "config": "start all nodes with the same config and the same --key value",
        "gpus": "ask for nodes of one kind, with the same number of ranks on each",
        "run": "give all nodes the same files: one shared folder, or copies that are the same",
    }
    parts = [part for part in remedies if isinstance(everyone[0].get(part), dict)]
    flat = [
        ({"code": one["code"]} if "code" in one else {})
        | {f"{part}: {key}": value for part in parts for key, value in one[part].items()}
        for one in everyone
    ]
    found = []
    for key in sorted({key for one in flat for key in one}):
        nodes: dict[str | None, dict[str, None]] = {}
        for one, values in zip(everyone, flat, strict=True):
            nodes.setdefault(values.get(key), {})[one["node"]] = None
        if len(nodes) > 1:
            listed = "; ".join(f"{value} on {', '.join(where)}" for value, where in nodes.items())
            found.append(f"{key} is not the same on all nodes: {listed}; {remedies[key.split(':')[0]]}")
    return found


def oddities(everyone: list[dict[str, Any]], clocks: list[float], rendezvous: Rendezvous) -> list[str]:
    """What is allowed and strange. `clocks` were read when all ranks had been released from one wait."""
    found = []
    apart = max(clocks) - min(clocks)
    if apart > CLOCK_SECONDS:
        early, late = (everyone[clocks.index(edge(clocks))]["node"] for edge in (min, max))
        found.append(f"the clocks of {early} and {late} are {apart:.0f} s apart; log times do not compare (use NTP)")
    names = {one["node"] for one in everyone}
    if len(names) != rendezvous.num_nodes:
        found.append(
            f"{rendezvous.num_nodes} nodes were started and they have {len(names)} host names ({', '.join(names)}); "
            "right only if they are on one machine"
        )
    return found


def _write_token(output_dir: Path) -> tuple[str | None, str | None]:
    """A new file where the output folder is or will be, or why there is none."""
    path = existing(output_dir) / f".recipe-{uuid.uuid4().hex}"
    try:
        path.touch()
    except OSError as error:
        return None, f"output_dir {output_dir}: {path.parent} cannot be written to ({error}); set another output_dir"
    return str(path), None


def _sees(token: str | None) -> bool:
    began = time.monotonic()
    while token is not None and not Path(token).exists():
        if time.monotonic() - began > SHARED_SECONDS:
            return False
        time.sleep(0.5)
        with suppress(OSError):
            os.listdir(Path(token).parent)  # an NFS client that has seen no file of that name asks again
    return True
