"""A run's configuration as the planner takes it, for `recipe plan` and for the run's own forecast.

The planner itself (`recipe.plan`) knows neither arguments nor data nor files.
"""

import math
import os
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig

from recipe import data as datasets
from recipe import model as models
from recipe.arguments import Arguments, DataArguments, ModelArguments, TrainArguments
from recipe.callbacks.forecast import Forecast
from recipe.errors import UserError
from recipe.plan import advice, host, memory, speed
from recipe.plan import models as shapes
from recipe.plan.hardware import GPUS, Gpu, Network, network, of_device
from recipe.plan.report import Plan
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Setup
from recipe.plan.shape import Shape
from recipe.preflight import disk
from recipe.sampling import num_steps
from recipe.sharding import plugin

ANY_GPU = GPUS["a100-80gb"]  # memory does not depend on it


def network_of(name: str | None, card: Gpu | None) -> Network:
    """By its name; else what most clouds give these GPUs (AWS p4d and p5)."""
    if name is not None:
        return network(name)
    return network("efa-3200" if card is not None and card.generation.startswith("hopper") else "efa-400")


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
    known = cached(model, "config.json")
    return shapes.by_name(name) if known is None else shapes.from_file(known, name)


def cached(model: ModelArguments, file: str) -> Path | None:
    """A file of a hub model, if it is in the hub's cache; nothing is asked of the hub."""
    name = model.model_name_or_path
    if name is None or name.count("/") != 1:
        return None
    found = try_to_load_from_cache(name, file, revision=model.model_revision)
    return Path(found) if isinstance(found, str) else None


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
        eval_batch=train.per_device_eval_batch_size if train.eval_strategy != "no" else 0,
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
    if card is None:
        # On a GPU that is not known, memory alone.
        peak = memory.estimate(setup).until_saved if on_gpu else _peak_on_cpu(setup, config)
        return Forecast(peak, None, "")
    between = f"with {wires.gigabits:g} Gb/s between nodes" if nodes > 1 else f"on {card.name}"
    fast, said = speed.estimate(setup), advice.verdict(setup)
    lines = [
        f"planned: {memory.needed(setup) / 2**30:.1f} of {card.memory_gib:.1f} GiB, {card.name} ({said}), "
        f"{fast.step:.2f} s a step {between}, {fast.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {fast.mfu:.1%}"
    ]
    if said == advice.TOO_LARGE:
        lines.append("warning: by the plan this does not fit; `recipe plan` with the same keys says what would")
    return Forecast(memory.estimate(setup).until_saved, fast.step, between, tuple(lines))


def _peak_on_cpu(setup: Setup, config: PretrainedConfig) -> float:
    """Resident bytes of rank 0, a CPU rank, before the first checkpoint; the model's files, which it has mapped while
    it loads, among them."""
    file_bytes = setup.master_bytes if config.dtype is None else config.dtype.itemsize
    rank = host.rank(setup, on_cpu=True, file_bytes=file_bytes)
    return max(rank.load + setup.shape.parameters * file_bytes, rank.train)


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
