"""Loading: the recipe's streamed loading against `from_pretrained` on every rank, each up to a wrapped FSDP model.

    python -m benchmarks.loading [--sizes 0.4 1.3] [--spread fsdp1] [--json FILE]

Random Llamas on disk, in safetensors; two CPU ranks (gloo), fresh processes for every measurement, fp32 master weights.
Both contenders wrap by Accelerate's own code. The peer is the stock path without a GPU: Accelerate's loading on rank 0
alone needs one. Files are in the page cache; the clock runs from a barrier to a barrier, without imports.

Memory is anonymous resident memory, sampled: "above shard" is the peak over what the process had before and the shard
that it is left with, the larger of the two ranks. "2 x layers" is the same model twice as deep: above the shard, ours
needs one FSDP unit, whatever the depth. "CPU seconds" are both ranks'; on a busy machine they say more.
"""

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks import common
from recipe.loading import StreamingLoader, Weights
from recipe.model import load_config, meta_model, torch_dtype
from recipe.ranks import is_main
from recipe.sharding import claims, wrap
from recipe.sharding.plugin import build_plugin

MASTER_DTYPE = torch.float32
HEADER = ("model", "file", "contender", "seconds", "CPU seconds", "above shard GiB", "shard GiB", "peak GiB")


# -- in the ranks ------------------------------------------------------------------------------------------------------


def load_ours(accelerator: Accelerator, folder: Path) -> nn.Module:
    model = meta_model(load_config(folder), None, MASTER_DTYPE)
    weights = Weights(folder) if is_main() else None
    loader = StreamingLoader(model, weights, MASTER_DTYPE, wrap.loader_broadcasts(accelerator))
    return wrap.shard(accelerator, model, loader)


def load_stock(accelerator: Accelerator, folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=MASTER_DTYPE, attn_implementation="sdpa")
    if not accelerator.is_fsdp2:
        return accelerator.prepare(model)
    # Accelerate prepares an FSDP2 model together with its optimizer. Plain SGD has no state.
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))[0]


LOADERS = {"ours": load_ours, "stock": load_stock}


def worker(job: dict[str, Any]) -> dict[str, Any]:
    common.start_ranks()
    accelerator = Accelerator(fsdp_plugin=build_plugin(MASTER_DTYPE, MASTER_DTYPE))
    load = LOADERS[job["contender"]]
    load(accelerator, Path(job["warm_up"]))  # what is imported, connected or allocated once
    accelerator.free_memory()
    gc.collect()
    dist.barrier()
    with common.AnonymousMemory() as memory:
        began, cpu_began = time.perf_counter(), time.process_time()
        model = load(accelerator, Path(job["folder"]))
        dist.barrier()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    weights = Weights(job["folder"]) if is_main() else None
    layers = load_config(Path(job["folder"])).num_hidden_layers
    claims.inspect_sharding(accelerator, model, layers, job["parameters"])
    claims.verify_weights(model, weights, MASTER_DTYPE)
    return {
        "before": memory.before,
        "peak": memory.peak,
        "after": memory.after,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "shard": common.shard_bytes(model),
    }


# -- outside -----------------------------------------------------------------------------------------------------------


def measure(job: dict[str, Any], spread: str) -> dict[str, Any]:
    """One load in fresh processes: the slower rank's seconds, the larger rank's memory, and each rank's numbers."""
    common.read_all(Path(job["folder"]))
    ranks = common.run_ranks("benchmarks.loading", job, spread)
    return {
        "contender": job["contender"],
        "seconds": max(r["seconds"] for r in ranks),
        "cpu_seconds": sum(r["cpu_seconds"] for r in ranks),
        "above_shard": max(r["peak"] - r["before"] - r["shard"] for r in ranks),
        "peak": max(r["peak"] - r["before"] for r in ranks),
        "shard": max(r["shard"] for r in ranks),
        "ranks": ranks,
    }


def compare(folder: Path, warm_up: Path, parameters: int, spread: str, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """{contender: measurements}, in turns; without the stock path where two whole models do not fit in memory."""
    contenders = ["ours", "stock"]
    needed = 1.2 * common.NUM_RANKS * parameters * MASTER_DTYPE.itemsize
    if needed > common.available_bytes():
        print(f"{folder.name}: the stock path needs {needed / common.GIB:.1f} GiB, more than there is; left out")
        contenders.remove("stock")
    found: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders if repeat % 2 == 0 else reversed(contenders):
            job = {
                "contender": contender,
                "folder": str(folder),
                "warm_up": str(warm_up),
                "parameters": parameters,
            }
            found[contender].append(measure(job, spread))
            print(f"{folder.name} {contender}: {found[contender][-1]['seconds']:.2f} s", flush=True)
    return found


def median(measurements: list[dict[str, Any]], key: str) -> float:
    return statistics.median(m[key] for m in measurements)


def goals(size: float, shallow: dict[str, list], deep: dict[str, list]) -> list[common.Goal]:
    def ratio(key: str, over: dict[str, list], contender: str, what: dict[str, list] = shallow) -> float:
        return median(what["ours"], key) / median(over[contender], key)

    flat = ratio("above_shard", shallow, "ours", deep)
    found = [common.Goal(f"{size} B, above shard, ours, 2 x layers / 1 x", flat, 1.1)]
    if "stock" in shallow:
        peer = "ours / from_pretrained on every rank"
        found.append(common.Goal(f"{size} B, above shard, {peer}", ratio("above_shard", shallow, "stock"), 0.25))
        found.append(common.Goal(f"{size} B, seconds, {peer}", ratio("seconds", shallow, "stock"), 1.0))
    return found


def main(args: argparse.Namespace) -> None:
    rows, raw, reached = [], {}, []
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            warm_up = Path(scratch) / "warm_up"
            tiny = common.llama_config(min(common.SIZES), vocab_size=64)
            tiny.num_hidden_layers = 2
            common.write_model(warm_up, tiny, torch_dtype(args.file_dtype))
            found = []
            for depth in (1, 2):
                folder = Path(scratch) / f"{size} B{', 2 x layers' if depth == 2 else ''}"
                parameters = common.write_model(folder, common.llama_config(size, depth), torch_dtype(args.file_dtype))
                found.append(compare(folder, warm_up, parameters, args.spread, args.repeats))
                for contender, measurements in found[-1].items():
                    memory = [median(measurements, key) / common.GIB for key in ("above_shard", "shard", "peak")]
                    times = [median(measurements, key) for key in ("seconds", "cpu_seconds")]
                    rows.append((folder.name, args.file_dtype, contender, *times, *memory))
                raw[folder.name] = found[-1]
        reached += goals(size, *found)
    print(f"\n{args.spread}, {common.NUM_RANKS} CPU ranks, medians of {args.repeats}")
    common.report(HEADER, rows, reached, raw, args.json)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    common.add_options(parser)
    return parser


if __name__ == "__main__":
    common.main_or_worker(arguments(), main, worker)
