"""`recipe plan`: a run's configuration as the planner takes it (`recipe.plan`), refused for what training would refuse.

The planner itself knows neither arguments nor data nor files; this is where they meet, for the command and for the
run's own forecast (`recipe.callbacks.forecast`).
"""

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

import torch
import yaml
from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig

from recipe import data as datasets
from recipe import model as models
from recipe.arguments import Arguments, DataArguments, ModelArguments, TrainArguments, parse_arguments
from recipe.callbacks.forecast import Forecast
from recipe.errors import UserError, raise_if
from recipe.launch import environment
from recipe.plan import fitted, host, memory, speed
from recipe.plan import shape as shapes
from recipe.plan.hardware import GPUS, Gpu, Network, gpu, network, of_device
from recipe.plan.report import Plan, walk_lines
from recipe.plan.search import Candidate, best_by_size
from recipe.plan.search import lines as search_lines
from recipe.plan.search import search as searched
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Setup
from recipe.plan.shape import Shape
from recipe.preflight import disk, settings
from recipe.sampling import num_steps
from recipe.sharding import plugin

ANY_GPU = GPUS["a100-80gb"]  # memory does not depend on it
NO_FILE_NEEDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_SYNC_MODULE_STATES": "true"}


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


def network_of(name: str | None, card: Gpu | None) -> Network:
    """By its name; else what most clouds give these GPUs (AWS p4d and p5)."""
    if name is not None:
        return network(name)
    return network("efa-3200" if card is not None and card.generation.startswith("hopper") else "efa-400")


def spread(asked: Asked) -> tuple[int, int]:
    """Nodes and GPUs of a node; and what the accelerate file asks for goes into the environment, where a launcher would
    put it."""
    nodes, per_node = asked.nodes or 1, asked.gpus_per_node or 8
    made: dict[str, str] = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"} | NO_FILE_NEEDED
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


def shape_of(model: ModelArguments) -> Shape:
    """The model's dimensions, without its weights and without a network: from text, a folder, the hub's cache, or the
    names that are known."""
    name = model.model_name_or_path
    if name is None:
        raise UserError("no model: give --model NAME, a folder with config.json, or dimensions")
    if "=" in name:
        return shapes.from_text(name)
    if Path(name).is_dir() or name.startswith((".", "/", "~")):
        file = Path(name).expanduser() / "config.json"
        if not file.is_file():
            raise UserError(f"{name} has no config.json; set model_name_or_path to a model's folder")
        return shapes.from_file(file)
    cached = _cached(model, "config.json")
    return shapes.by_name(name) if cached is None else shapes.from_file(cached, name)


def _cached(model: ModelArguments, file: str) -> Path | None:
    """A file of a hub model, if it is in the hub's cache; nothing is asked of the hub."""
    name = model.model_name_or_path
    if name is None or name.count("/") != 1:
        return None
    found = try_to_load_from_cache(name, file, revision=model.model_revision)
    return Path(found) if isinstance(found, str) else None


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


def setup_of(
    model: ModelArguments, train: TrainArguments, shape: Shape, card: Gpu, wires: Network, nodes: int, per_node: int
) -> Setup:
    """The planner's input; what the accelerate file asks for is read from the environment."""
    master = models.torch_dtype(model.param_dtype).itemsize
    compute = 2 if train.bf16 or model.param_dtype == "bfloat16" else 4
    together = nodes * per_node * train.per_device_train_batch_size
    checkpointing = (
        train.activation_checkpointing if train.gradient_checkpointing is None else train.gradient_checkpointing
    )
    return Setup(
        shape=shape,
        gpu=card,
        network=wires,
        num_nodes=nodes,
        gpus_per_node=per_node,
        strategy=STRATEGIES[plugin.strategy_asked()],
        fsdp=plugin.version_asked(),
        master_bytes=master,
        compute_bytes=compute,
        reduce_bytes=models.torch_dtype(model.reduce_dtype).itemsize if compute == 2 else 4,
        optimizer=OPTIMIZERS[train.optim],
        seq_len=train.max_length or 2048,
        micro_batch=train.per_device_train_batch_size,
        accumulation=max(1, (train.global_batch_size or together) // together),
        checkpointing="full" if checkpointing or plugin.activation_checkpointing_asked() else "none",
        flash=model.attn_implementation != "eager",
        loss="fused" if train.loss_type == "nll" else "kept",
        offload=plugin.offload_asked(),
    )


def plan_of(arguments: Arguments, setup: Setup, tokens: float | None = None) -> Plan:
    """Work a setup out.

    Args:
        tokens: of the whole run; None: from max_steps, or from data that are prepared already.
    """
    data, model, train = arguments
    moments = disk.checkpoint_bytes(model, train) - models.torch_dtype(model.param_dtype).itemsize
    steps, source = None, "--tokens"
    if tokens is not None:
        steps = math.ceil(tokens / setup.tokens_per_step)
    elif train.max_steps > 0:
        steps, source = train.max_steps, "max_steps"
        tokens = float(steps * setup.tokens_per_step)
    else:
        tokens, steps, source = of_prepared_data(data, model, train)
    return Plan(
        setup=setup,
        memory=memory.estimate(setup),
        speed=speed.estimate(setup),
        host=host.estimate(
            setup,
            checkpoints=disk.checkpoints_to_come(train, there=0),
            export_bytes=models.torch_dtype(train.export_dtype).itemsize if train.export else 0,
            async_save=train.async_save,
            saved_moment_bytes=float(moments),
        ),
        optimizer=train.optim,
        tokens=tokens,
        steps=steps,
        source=source,
    )


def forecast(arguments: Arguments, config: PretrainedConfig) -> Forecast | None:
    """What is predicted of the run that this process is a rank of; None for a model that the planner does not know."""
    _, model, train = arguments
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // per_node
    on_gpu = train.device.type == "cuda"
    card = of_device(torch.cuda.get_device_name()) if on_gpu else None
    wires = network_of(None, card)
    try:
        shape = shapes.from_config(config.to_dict(), model.model_name_or_path or "")
        setup = setup_of(model, train, shape, card or ANY_GPU, wires, nodes, per_node)
    except UserError:
        return None
    seconds = speed.estimate(setup).step if card is not None else None
    between = f"with {wires.gigabits:g} Gb/s between nodes" if nodes > 1 else f"on {setup.gpu.name}"
    return Forecast(
        memory=memory.estimate(setup).allocated + (0.0 if on_gpu else fitted.PROCESS_BYTES),
        step_seconds=seconds,
        assumed=between,
    )


def of_prepared_data(
    data: DataArguments, model: ModelArguments, train: TrainArguments
) -> tuple[float | None, int | None, str]:
    """Tokens and steps of the run, if its data are prepared already, and where that is known from."""
    unknown = (None, None, "")
    name = model.model_name_or_path or ""
    here = Path(name).is_dir() or isinstance(
        try_to_load_from_cache(name, "tokenizer_config.json", revision=model.model_revision)
        if name.count("/") == 1
        else None,
        str,
    )
    if not here or train.global_batch_size is None:
        return unknown
    try:
        folder, _ = models.find_folder(model, download=False)
        tokenizer = models.load_tokenizer(folder, train.trust_remote_code, train.eos_token)
        found = datasets.prepared(data, train, tokenizer)
    except UserError:
        return unknown  # `recipe check` and `recipe data` say it
    if found is None:
        return unknown
    steps = num_steps(len(found.train), train.global_batch_size, train.num_train_epochs, train.max_steps)
    tokens = found.report.train.tokens / len(found.train) * steps * train.global_batch_size
    return tokens, steps, "its prepared data"


def show(asked: Asked, keys: list[str], *, search: bool, dry_run: bool, picture: Path | None, as_json: bool) -> None:
    """Print the plan, and what else was asked for."""
    plan, arguments = make_plan(asked, keys)
    values = plan.values()
    if not as_json:
        print("\n".join(plan.lines()))
    found: list[Candidate] = []
    if search:
        setup, batch = plan.setup, arguments[2].global_batch_size
        found = best_by_size(searched(setup, batch, most_nodes=4 * setup.num_nodes))
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
        cached = _cached(model, "config.json")
        folder = Path(name).expanduser() if Path(name).expanduser().is_dir() else cached.parent if cached else None
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
