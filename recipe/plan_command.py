"""`recipe plan`: a run's plan, refused for what training would refuse; a search, a dry run and a picture."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from recipe import data as datasets
from recipe import model as models
from recipe.arguments import Arguments, parse_arguments
from recipe.errors import UserError, raise_if
from recipe.launch import environment
from recipe.plan import shape as shapes
from recipe.plan.hardware import gpu
from recipe.plan.report import Plan, walk_lines
from recipe.plan.search import Candidate, best_by_size
from recipe.plan.search import lines as search_lines
from recipe.plan.search import search as searched
from recipe.plan.setup import Setup
from recipe.plan.shape import Shape
from recipe.planning import cached, network_of, plan_of, setup_of, shape_of
from recipe.preflight import settings
from recipe.sharding import plugin

# What a launcher makes of configs/accelerate/fsdp1_*.yaml, where no file is given.
USUAL = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
}


@dataclass(frozen=True)
class Asked:
    """What `recipe plan` was asked for, besides the run's keys."""

    gpu: str
    interconnect: str | None = None
    accelerate: Path | None = None
    model: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    tokens: float | None = None
    lengths: tuple[int, ...] = ()


def make_plan(asked: Asked, keys: list[str]) -> tuple[Plan, Arguments]:
    """The plan of a run.

    Raises:
        UserError: all that is wrong, as training would say it.
    """
    problems: list[str] = []
    card = _tried(problems, lambda: gpu(asked.gpu))
    wires = _tried(problems, lambda: network_of(asked.interconnect, card))
    sizes = _tried(problems, lambda: spread(asked))
    arguments = _tried(problems, lambda: parse_arguments(keys))
    if arguments is None:
        raise UserError(*problems)
    _, model, train = arguments
    if asked.model is not None:
        model.model_name_or_path = asked.model
    shape = _tried(problems, lambda: shape_of(model))
    if sizes is not None:
        problems += refused(arguments, shape, math.prod(sizes), whole=any(key.startswith("--config") for key in keys))
    raise_if(dict.fromkeys(problems))
    assert shape is not None and card is not None and wires is not None and sizes is not None
    setup = setup_of(model, train, shape, card, wires, *sizes)
    return plan_of(arguments, setup, asked.tokens), arguments


_T = TypeVar("_T")


def _tried(problems: list[str], call: Callable[[], _T]) -> _T | None:
    """What `call` returns, or None and its problems added to `problems`."""
    try:
        return call()
    except UserError as error:
        problems += error.problems
        return None


def spread(asked: Asked) -> tuple[int, int]:
    """Nodes and GPUs of a node; and what the accelerate file asks for goes into the environment, where a launcher would
    put it."""
    nodes, per_node = asked.nodes or 1, asked.gpus_per_node or 8
    made = USUAL
    if asked.accelerate is not None:
        if not asked.accelerate.is_file():
            raise UserError(f"{asked.accelerate} does not exist; give an accelerate file")
        file = yaml.safe_load(asked.accelerate.read_text())
        ranks, machines = int(file["num_processes"]), int(file["num_machines"])
        if ranks % machines:
            raise UserError(
                f"num_processes {ranks} in {asked.accelerate} is not a multiple of num_machines {machines}; it counts "
                "the processes of all machines together"
            )
        nodes, per_node = asked.nodes or machines, asked.gpus_per_node or ranks // machines
        made = environment(str(asked.accelerate))
    if nodes < 1 or per_node < 1:
        raise UserError(f"--nodes {nodes} x --gpus_per_node {per_node}; give 1 or more of each")
    os.environ |= made | {"WORLD_SIZE": str(nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    return nodes, per_node


def refused(arguments: Arguments, shape: Shape | None, world_size: int, whole: bool) -> list[str]:
    """What training would refuse.

    Args:
        whole: the keys are a whole run's, so that what is missing counts too.
    """
    data, model, train = arguments
    problems = plugin.spread_problems()
    if whole:
        problems += settings.problems(data, model, train) + datasets.check(data, train)
    else:
        problems += settings.unsupported(model, train)
    problems += settings.batch(train, world_size)
    if shape is not None:
        problems += models.positions_problems(shape.max_positions, train.max_length)
    return problems


def show(asked: Asked, keys: list[str], *, search: bool, dry_run: bool, picture: Path | None, as_json: bool) -> None:
    """Print the plan, and what else was asked for."""
    plan, arguments = make_plan(asked, keys)
    values = plan.values()
    if not as_json:
        print("\n".join(plan.lines()))
    found: list[Candidate] = []
    if search:
        setup, batch = plan.setup, arguments[2].global_batch_size
        found = best_by_size(searched(setup, batch, 4 * setup.num_nodes, asked.lengths))
        values["search"] = [one.values() for one in found]
        if not as_json:
            print("\n".join(search_lines(found, plan.tokens)))
    if dry_run:
        walked = walk(plan.setup, arguments)
        values["dry_run"] = walked
        if not as_json:
            print("\n".join(walk_lines(walked, plan.setup)))
    if as_json:
        print(json.dumps(values, indent=1))
    if picture is not None:
        from recipe.plan.picture import draw  # matplotlib, which nobody waits for who wants no picture

        try:
            draw(picture, plan, found)
        except (OSError, ValueError) as error:
            raise UserError(f"--picture {picture} cannot be written: {error}; give a .png or .svg file") from None


def walk(setup: Setup, arguments: Arguments) -> dict[str, Any]:
    """`recipe.plan.dry_run` of the setup, in a process of its own.

    Raises:
        UserError: what cannot be walked.
    """
    _, model, train = arguments
    with tempfile.TemporaryDirectory() as scratch:
        name = model.model_name_or_path or ""
        found = cached(model, "config.json")
        folder = Path(name).expanduser() if Path(name).expanduser().is_dir() else found.parent if found else None
        if folder is None:
            folder = Path(scratch)
            (folder / "config.json").write_text(json.dumps(shapes.to_config(setup.shape)))
        dtypes = {4: "float32", 2: "bfloat16"}
        request = {
            "model": str(folder),
            "spread": {key: value for key, value in os.environ.items() if key.startswith(("ACCELERATE_", "FSDP_"))},
            "world_size": setup.world_size,
            "ranks_per_node": setup.gpus_per_node,
            "micro_batch": setup.micro_batch,
            "seq_len": setup.seq_len,
            "accumulation": setup.accumulation,
            "checkpointing": setup.checkpointing == "full",
            "param_dtype": dtypes[setup.master_bytes],
            "compute_dtype": dtypes[setup.compute_bytes],
            "reduce_dtype": dtypes[setup.reduce_bytes],
            "attention": model.attn_implementation or "sdpa",
            "trust_remote_code": train.trust_remote_code,
        }
        done = subprocess.run(
            [sys.executable, "-m", "recipe.plan.dry_run"], input=json.dumps(request), capture_output=True, text=True
        )
    if done.returncode == UserError.exit_code:
        raise UserError(done.stderr.strip())
    if done.returncode:
        raise RuntimeError(f"the dry run failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout)
