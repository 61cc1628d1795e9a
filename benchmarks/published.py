"""Runs that others published, read as plans: the rows of published.csv, published_more.csv and published_held_out.csv.

A row is a model, GPUs, how it was spread and trained, and one figure that was measured, which nothing here reads. What
a row leaves open is filled in by what its software did (`Software`), never by a constant of its own.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.errors import UserError
from recipe.plan.adapters import Adapter
from recipe.plan.hardware import GPUS, Gpu, Network, gpu
from recipe.plan.models import GPT2, MPT, known
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Optimizer, Setup, Strategy
from recipe.plan.shape import Shape

Row = dict[str, str]
COLUMNS = (
    "set,tier,id,source,model,params_b,hidden,layers,heads,kv_heads,vocab,intermediate,gpu,gpu_mem_gb,num_gpus,"
    "gpus_per_node,strategy,param_dtype,compute_dtype,optimizer,seq_len,micro_batch,grad_accum,"
    "activation_checkpointing,flash_attention,cpu_offload,metric,value,unit,notes"
).split(",")


class CannotPlan(Exception):
    """Why a row cannot be predicted."""


def read(path: Path) -> list[Row]:
    """The rows of a file; what a short line lacks is empty.

    Raises:
        UserError: the file lacks columns.
    """
    with path.open(newline="") as text:
        rows = csv.DictReader(text, restval="")
        missing = [column for column in COLUMNS if column not in (rows.fieldnames or ())]
        if missing:
            raise UserError(f"{path} lacks the columns {', '.join(missing)}")
        return [{column: row[column] for column in COLUMNS} for row in rows]


@dataclass(frozen=True)
class Software:
    """What a training code did that its rows do not say: facts of the code, none of them fitted.

    Args:
        loss: a key of `recipe.plan.setup.LOSSES`.
        head_apart: whether FSDP2 gathers embedding and head apart.
        temporaries: of its optimizer's step, as multiples of a weight.
        unties: it wraps embedding and head each in a unit of its own, which then are two parameters.
        one_adapter: its collectives between nodes come to the rate of one network adapter, however many a node has.
    """

    loss: str = "kept"
    expandable: bool = False
    head_apart: bool = False
    keeps_gradients: bool = False
    autocast: bool = False
    temporaries: float = 0.0
    one_adapter: bool = False
    triton: bool = False
    fused_norms: bool = False
    unties: bool = False


def software(row: Row) -> Software:
    """By the row's source, and its year and month where the code changed."""
    source, notes = row["source"].lower(), row["notes"]
    if "torchtitan" in source:
        return _torchtitan(row)
    if "pytorch-fsdp.md" in source:  # 2022: PyTorch 1.11
        half = row["compute_dtype"] == "fp16"
        return Software(keeps_gradients=True, unties="min_num_params" in notes, autocast=half)
    if "llama-recipes" in source and "anyprecision" not in row["optimizer"].lower():
        return Software(temporaries=2.0)  # PyTorch 2.0: foreach makes the roots and their sums
    if "torchtune" in source:
        return Software("chunked" if "chunked" in notes else "kept", temporaries=1.0)
    if "llm-foundry" in source:
        return Software("kernel", triton=True)
    return Software(one_adapter="deepspeed" in row["strategy"].lower())


def _torchtitan(row: Row) -> Software:
    """Until 2024-06-12 the logits stay (#391); expandable segments in its run script since 2024-10-22 (#637); the
    embedding a unit of its own since 2025-07-28; one-kernel norms in its Llama-2 7B and 13B files of 2024."""
    source = row["source"].lower()
    stamp = re.search(r"\b(20\d\d)-?(\d\d)(?:-(\d\d))?\b", source) or re.search(r"_(20\d\d)(\d\d)()_", source)
    day = int(stamp[1] + stamp[2] + (stamp[3] or "15")) if stamp else 99991231  # undated: as the code is today
    if "performance.md" in source:
        day = 20240515
    loss = "kept" if day < 20240612 else "freed"
    return Software(
        "chunked" if "with chunked" in row["notes"] else loss,
        expandable=day >= 20241022,
        head_apart=day >= 20250728,
        fused_norms=day < 20241022 and row["model"] in ("Llama-2-7B", "Llama-2-13B"),
    )


def number(row: Row, key: str, default: int | None = None) -> int:
    """A count; `default` where the row does not state it.

    Raises:
        CannotPlan: not stated, without a default; or no count.
    """
    text = row[key].strip()
    if not text:
        if default is None:
            raise CannotPlan(f"{key} is not stated")
        return default
    value = figure(row, key)
    if value < 1:
        raise CannotPlan(f"{key} is '{text}'")
    return int(value)


def figure(row: Row, key: str) -> float:
    try:
        value = float(row[key])
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CannotPlan(f"{key} is '{row[key]}'" if row[key].strip() else f"{key} is not stated")
    return value


def shape_of(row: Row, code: Software) -> Shape:
    name = row["model"]
    if not row["hidden"]:
        shape = known(name)
        if shape is None:
            raise CannotPlan(f"{name}: no dimensions")
        return shape
    hidden, heads = number(row, "hidden"), number(row, "heads")
    head_dim = re.search(r"head_dim (\d+)", row["notes"])
    shape = Shape(
        name=name,
        hidden=hidden,
        layers=number(row, "layers"),
        heads=heads,
        kv_heads=number(row, "kv_heads", heads),
        head_dim=int(head_dim[1]) if head_dim else hidden // heads,
        intermediate=number(row, "intermediate", 4 * hidden),
        vocab=number(row, "vocab"),
        **_traits(row),
    )
    if code.unties:
        return replace(shape, tied=False)
    return replace(shape, tied=shape.tied or _said_tied(row, shape), fused_norms=code.fused_norms)


def _traits(row: Row) -> dict[str, Any]:
    """What tells a model's family from Llama's."""
    name, positions = row["model"].lower(), number(row, "seq_len", 2048)
    families: tuple[tuple[str, dict[str, Any]], ...] = (
        ("gpt-?2", GPT2 | {"positions": 1024}),
        ("mpt", MPT | {"biases": True, "positions": positions}),
        ("gpt", MPT | {"biases": True, "positions": positions, "dropout": True}),  # Megatron's
        ("qwen3", {"qk_norms": True}),
        ("qwen2", {"qkv_biases": True}),
    )
    return next((traits for pattern, traits in families if re.search(pattern, name)), {})


def _said_tied(row: Row, shape: Shape) -> bool:
    """Whether the parameters that the row states are nearer to those of one embedding than to those of two."""
    if not row["params_b"].strip():
        return False
    stated = figure(row, "params_b") * 1e9
    one, two = shape.parameters - shape.head, shape.parameters
    return stated > 0 and abs(one - stated) < abs(two - stated)


def gpu_of(row: Row) -> Gpu:
    name = row["gpu"].strip().lower().replace(" ", "-")
    if not name:
        raise CannotPlan("gpu is not stated")
    sized = f"{name}-{row['gpu_mem_gb'].strip()}gb"
    try:
        return gpu(sized if sized in GPUS else name)
    except UserError:
        raise CannotPlan(f"gpu '{row['gpu']}' is not known") from None


def network_of(row: Row, gpu: Gpu, one_adapter: bool) -> Network:
    """From the notes; else that of the most common cloud machine with these GPUs (AWS p4de, p5)."""
    text = row["notes"]
    adapters = 4 if gpu.generation == "ampere" else 8
    if match := re.search(r"([1-9]\d*) ?x ?([1-9]\d*) ?Gb", text):
        adapters, gigabits = int(match[1]), float(match[1]) * float(match[2])
    elif match := re.search(r"([1-9]\d*(?:\.\d+)?) ?Tb/s", text):
        gigabits = float(match[1]) * 1000
    elif match := re.search(r"([1-9]\d*) ?Gbps", text, re.IGNORECASE):
        gigabits = float(match[1])
    else:
        gigabits = 3200.0 if gpu.generation.startswith("hopper") else 400.0
    return Network(f"{gigabits:g}", gigabits / adapters if one_adapter else gigabits)


def strategy_of(row: Row) -> Strategy:
    text = row["strategy"].lower()
    kinds = (
        (r"single", "NO_SHARD"),
        (r"^(?!.*fsdp).*ddp", "DDP"),
        (r"hsdp|hybrid", "HYBRID_SHARD"),
        (r"zero-?1", "ZERO1"),
        (r"zero-?2|shard_grad_op|never", "SHARD_GRAD_OP"),
        (r"zero-?3|fsdp|full", "FULL_SHARD"),
        (r"baseline", "NO_SHARD"),
    )
    for pattern, name in kinds:
        if re.search(pattern, text):
            return STRATEGIES[name]
    raise CannotPlan(f"strategy '{row['strategy']}' is not known" if text.strip() else "strategy is not stated")


def checkpointing_of(row: Row) -> str:
    text = row["activation_checkpointing"].lower()
    if text in ("none", "no", "off"):
        return "none"
    if text.startswith("full") or text in ("yes", "true"):
        return "full"
    if "layer" in text or "selective" in text and "fraction of blocks" in row["notes"]:
        return "alternate"
    if "selective" in text or "op" in text:
        return "op"
    raise CannotPlan(f"activation checkpointing is '{text}'" if text else "activation checkpointing is not stated")


def optimizer_of(row: Row, code: Software) -> Optimizer:
    text = row["optimizer"].lower()
    if "+ fp32 master" in row["param_dtype"].lower():
        return Optimizer(12.0)  # the master weight and two moments
    if "paged" in text:
        return OPTIMIZERS["paged_adamw_32bit"]
    if "8-bit" in text or "8bit" in text:
        return OPTIMIZERS["adamw_8bit"]
    return Optimizer(8.0 if "fp32 states" in text else None, code.temporaries)


def adapter_of(row: Row) -> Adapter | None:
    """LoRA on all linear layers, of rank 8 where it is not stated, in 16 bits as the codes at hand have it."""
    text = f"{row['strategy']} {row['optimizer']} {row['param_dtype']}".lower()
    if "lora" not in text:
        return None
    rank = re.search(r"\br(\d+)\b", text)
    return Adapter(int(rank[1]) if rank else 8, four_bit="nf4" in text or "qlora" in text, weight_bytes=2)


def _refuse(row: Row) -> None:
    """
    Raises:
        CannotPlan: the run did what the planner does not know.
    """
    strategy, notes = row["strategy"].lower(), row["notes"].lower()
    everything = f"{strategy} {row['model']} {row['param_dtype']}".lower()
    eager = re.search(r"\b(no|not|without) (torch\.)?compile|compile no|eager", notes)
    reasons = (
        ("compile" in everything or "compile" in notes and not eager, "torch.compile is not modelled"),
        ("nf4" in everything and "lora" not in everything, "4-bit weights without adapters are not planned"),
        ("fp8" in everything or "float8" in everything, "fp8 is not modelled"),
        (
            re.search(r"\b(tp|cp|pp|sp|mp|ep)-?\d|tensor|pipeline|context parallel", strategy),
            "tensor, context or pipeline parallelism is not modelled",
        ),
        ("activation" in row["cpu_offload"].lower(), "offloaded activations are not modelled"),
        ("optim" in row["cpu_offload"].lower(), "an optimizer that is offloaded alone is not modelled"),
    )
    for applies, reason in reasons:
        if applies:
            raise CannotPlan(reason)


def _reduce_bytes(row: Row, master_bytes: int) -> int:
    notes = row["notes"].lower()
    if re.search(r"reduce fp32|fp32 reduce", notes):
        return 4
    return 2 if re.search(r"reduce(/buffer)? (= ?)?bf16", notes) else master_bytes


def setup_of(row: Row) -> Setup:
    """The plan of a row's run.

    Raises:
        CannotPlan: the planner does not know what the run did, or the row does not say it.
        UserError: the row says what cannot be.
    """
    _refuse(row)
    strategy, card, code = strategy_of(row), gpu_of(row), software(row)
    num_gpus = number(row, "num_gpus")
    local = min(num_gpus, number(row, "gpus_per_node", 8))
    if num_gpus % local:
        raise CannotPlan(f"{num_gpus} GPUs are no multiple of {local} a node")
    params, said = row["param_dtype"].lower(), row["strategy"].lower()
    master_bytes = 4 if params.startswith("fp32") or not params else 2
    return Setup(
        shape=shape_of(row, code),
        gpu=card,
        network=network_of(row, card, code.one_adapter),
        num_nodes=num_gpus // local,
        gpus_per_node=local,
        strategy=strategy,
        fsdp=2 if "fsdp2" in said or "torchtitan" in row["source"] and "fsdp1" not in said else 1,
        master_bytes=master_bytes,
        compute_bytes=4 if "fp32" in row["compute_dtype"].lower() else 2,
        reduce_bytes=_reduce_bytes(row, master_bytes),
        optimizer=optimizer_of(row, code),
        seq_len=number(row, "seq_len"),
        micro_batch=number(row, "micro_batch"),
        accumulation=number(row, "grad_accum", 1),
        checkpointing=checkpointing_of(row),
        adapter=adapter_of(row),
        flash=row["flash_attention"].strip().lower() != "no",
        loss=code.loss,
        offload="param" in row["cpu_offload"].lower(),
        wrap_parameters=2000 if "min_num_params" in row["notes"] else 0,
        head_apart=code.head_apart,
        keeps_gradients=code.keeps_gradients,
        autocast=code.autocast,
        triton=code.triton,
        expandable=code.expandable,
    )
