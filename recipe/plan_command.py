"""`recipe plan`: a run's plan, refused for what training would refuse; a search, a dry run and a picture."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from recipe import data as datasets
from recipe import model as models
from recipe.arguments import Arguments, ModelArguments, TrainArguments, parse_arguments, read_config
from recipe.errors import UserError, raise_if
from recipe.launch import environment
from recipe.plan import models as shapes
from recipe.plan.adapters import Adapter
from recipe.plan.hardware import Gpu, gpu
from recipe.plan.report import Plan, walk_lines
from recipe.plan.search import Candidate, best_by_size
from recipe.plan.search import lines as search_lines
from recipe.plan.search import search as searched
from recipe.plan.setup import STRATEGIES, Setup
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
    search: bool = False
    dry_run: bool = False
    picture: Path | None = None
    host_memory: float | None = None
    no_sync: bool = False
    lora: int | None = None
    four_bit: bool = False


def make_plan(asked: Asked, keys: list[str]) -> tuple[Plan, Arguments]:
    """The plan of a run. Where no configuration is given, it computes in bf16, as such runs do.

    Raises:
        UserError: all that is wrong, as training would say it.
    """
    problems = numbers(asked)
    card = _tried(problems, lambda: gpu(asked.gpu))
    wires = _tried(problems, lambda: network_of(asked.interconnect, card))
    sizes = _tried(problems, lambda: spread(asked))
    arguments = _tried(problems, lambda: parse_arguments(keys))
    if arguments is None:
        raise UserError(*problems)
    _, model, train = arguments
    whole = any(key.startswith("--config") for key in keys)
    if not whole and not any(key.startswith("--bf16") for key in keys):
        train.bf16 = card is None or card.bf16
    if asked.model is not None:
        model.model_name_or_path = asked.model
    shape = _tried(problems, lambda: shape_of(model))
    if sizes is not None:
        problems += refused(arguments, math.prod(sizes), whole)
    lengths = [length for length in (train.max_length, *asked.lengths) if length is not None]
    if shape is not None and lengths:
        problems += models.positions_problems(shape.max_positions, max(lengths))
    if card is not None:
        problems += device(card, model, train)
    raise_if(dict.fromkeys(problems))
    assert shape is not None and card is not None and wires is not None and sizes is not None
    setup = setup_of(model, train, shape, card, wires, *sizes)
    adapter = None if asked.lora is None else Adapter(asked.lora, four_bit=asked.four_bit)
    setup = replace(setup, reduce_each_micro_batch=not asked.no_sync, adapter=adapter)
    return plan_of(arguments, setup, asked.tokens), arguments


def numbers(asked: Asked) -> list[str]:
    problems = []
    if asked.tokens is not None and not 1 <= asked.tokens < math.inf:
        problems.append(f"--tokens is {asked.tokens:g}; give 1 or more")
    if asked.four_bit and asked.lora is None:
        problems.append("--four_bit is of a frozen model; add --lora RANK")
    if asked.lora is not None and asked.dry_run:
        problems.append("--dry-run walks this recipe's training, which has no adapters yet; leave --lora out")
    for key in ("nodes", "gpus_per_node", "lora"):
        value = getattr(asked, key)
        if value is not None and value < 1:
            problems.append(f"--{key} is {value}; give 1 or more")
    if asked.lengths and not asked.search:
        problems.append("--lengths are what --search tries; add --search, or set max_length")
    if asked.picture is not None and asked.picture.suffix not in (".png", ".svg"):
        problems.append(f"--picture {asked.picture} is neither .png nor .svg")
    return problems


def device(card: Gpu, model: ModelArguments, train: TrainArguments) -> list[str]:
    """What this kind of GPU cannot do."""
    compute = torch.bfloat16 if train.bf16 or model.param_dtype == "bfloat16" else torch.float32
    problems = models.attention_problems(model, compute, on_gpu=True, here=False)
    if not card.bf16 and compute == torch.bfloat16:
        problems.append(
            f"{card.name} has no bf16, which the run computes in; set bf16: false, or take an Ampere or later"
        )
    if not card.bf16 and "flash" in (model.attn_implementation or ""):
        problems.append(
            f"attn_implementation is {model.attn_implementation}, which needs an Ampere GPU or later; set sdpa"
        )
    return problems


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
    nodes, per_node, made = 1, 8, USUAL
    if asked.accelerate is not None:
        nodes, per_node = _machines(asked.accelerate)
        made = environment(str(asked.accelerate))
    nodes, per_node = asked.nodes or nodes, asked.gpus_per_node or per_node
    os.environ |= made | {"WORLD_SIZE": str(nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    if plugin.strategy_asked() not in STRATEGIES:
        names = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD"
        raise UserError(f"fsdp_sharding_strategy is '{plugin.strategy_asked()}', which is not planned; set {names}")
    return nodes, per_node


def _machines(path: Path) -> tuple[int, int]:
    """Machines, and processes of each, of an accelerate file for GPUs."""
    file = read_config(path, key="--accelerate")
    ranks, machines = file.get("num_processes"), file.get("num_machines")
    if not (isinstance(ranks, int) and isinstance(machines, int) and ranks > 0 and machines > 0):
        raise UserError(
            f"num_processes in {path} is {ranks!r} and num_machines {machines!r}; give whole numbers, 1 or more"
        )
    if file.get("use_cpu"):
        raise UserError(f"{path} has use_cpu: true; take a file for GPUs")
    if ranks % machines:
        raise UserError(
            f"num_processes {ranks} in {path} is not a multiple of num_machines {machines}; it counts the processes of "
            "all machines together"
        )
    return machines, ranks // machines


def refused(arguments: Arguments, world_size: int, whole: bool) -> list[str]:
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
    return problems + settings.batch(train, world_size)


def show(asked: Asked, keys: list[str], as_json: bool) -> None:
    """Print the plan, and what else was asked for."""
    plan, arguments = make_plan(asked, keys)
    values = plan.values()
    if not as_json:
        print("\n".join(plan.lines()))
    found: list[Candidate] = []
    if asked.search:
        setup, batch = plan.setup, arguments[2].global_batch_size
        host_bytes = None if asked.host_memory is None else asked.host_memory * 1e9
        found = best_by_size(searched(setup, batch, 4 * setup.num_nodes, asked.lengths, host_bytes))
        values["search"] = [one.values() for one in found]
        if not as_json:
            print("\n".join(search_lines(found, plan.tokens)))
    if asked.dry_run:
        walked = walk(plan.setup, arguments)
        values["dry_run"] = walked
        if not as_json:
            print("\n".join(walk_lines(walked, plan.setup)))
    if as_json:
        print(json.dumps(values, indent=1))
    if asked.picture is not None:
        from recipe.plan.picture import draw  # matplotlib, which nobody waits for who wants no picture

        try:
            draw(asked.picture, plan, found)
        except OSError as error:
            raise UserError(f"--picture {asked.picture} cannot be written: {error}; give another file") from None


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
