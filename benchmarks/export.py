"""Export: the recipe's streamed export at the end of a run against `accelerate merge-weights` on a checkpoint of it.

    python -m benchmarks.export [--sizes 0.4 1.3] [--spread fsdp1] [--json FILE]

A random Llama, sharded over two CPU ranks (gloo) with fp32 master weights and no optimizer. Ours is what the trainer's
`save_model` does, from the live shards to a Hugging Face folder. The peer is what `accelerate merge-weights` runs, on
the sharded checkpoint that the recipe wrote of the same model, to one safetensors file of the dtype that is in the
checkpoint (fp32). Fresh processes for every measurement, files in the page cache, the clock without imports, writes
not synced by either. The two fp32 results are compared bit for bit; ours in bf16, the recipe's default, is shown too.

Memory is anonymous resident memory, sampled: "peak GiB" is the largest growth while exporting. Our ranks hold their
shards anyway; "with shard GiB" counts them in. The larger of the two ranks. "CPU seconds" are all processes'.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import merge_fsdp_weights
from safetensors import safe_open

from benchmarks import common
from recipe.checkpoint import shards
from recipe.export import describe, drain, write_export
from recipe.loading import StreamingLoader, Weights
from recipe.model import load_config, load_generation_config, load_tokenizer, meta_model, torch_dtype
from recipe.ranks import is_main
from recipe.sharding import gather, state, wrap
from recipe.sharding.plugin import build_plugin

MASTER_DTYPE = torch.float32
HEADER = ("model", "contender", "dtype", "seconds", "CPU seconds", "peak GiB", "with shard GiB")


# -- in the ranks ------------------------------------------------------------------------------------------------------


def sharded_model(folder: Path) -> tuple[Accelerator, torch.nn.Module]:
    common.start_ranks()
    accelerator = Accelerator(fsdp_plugin=build_plugin(MASTER_DTYPE, MASTER_DTYPE))
    model = meta_model(load_config(folder), None, MASTER_DTYPE)
    weights = Weights(folder) if is_main() else None
    loader = StreamingLoader(model, weights, MASTER_DTYPE, wrap.loader_broadcasts(accelerator))
    return accelerator, wrap.shard(accelerator, model, loader)


def checkpoint(folder: Path, out: Path) -> dict[str, Any]:
    _, model = sharded_model(folder)
    common.write_pieces(out / shards.MODEL, state.model_pieces(common.shard_map(folder, model)))
    return {}


def ours(folder: Path, out: Path, dtype: str) -> dict[str, Any]:
    accelerator, model = sharded_model(folder)
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    fresh, generation = meta_model(config, None, MASTER_DTYPE), load_generation_config(folder, config, tokenizer)
    shapes = {name: p.shape for name, p in fresh.named_parameters()}
    about = partial(describe, fresh=fresh, config=config, tokenizer=tokenizer, generation=generation)
    dist.barrier()
    with common.AnonymousMemory() as memory:
        began, cpu_began = time.perf_counter(), time.process_time()
        accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        tensors = gather.full_parameters(model)
        if is_main():
            write_export(out, lambda _: tensors, shapes, torch_dtype(dtype), "5GB", about)
        drain(tensors)
        dist.barrier()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "growth": memory.peak - memory.before,
        "shard": common.shard_bytes(model),
    }


def merge(checkpoint_folder: Path, out: Path) -> dict[str, Any]:
    with common.AnonymousMemory() as memory:
        began, cpu_began = time.perf_counter(), time.process_time()
        merge_fsdp_weights(str(checkpoint_folder / shards.MODEL), str(out))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "growth": memory.peak - memory.before, "shard": 0}


WORK: dict[str, Callable[..., dict[str, Any]]] = {"checkpoint": checkpoint, "ours": ours, "merge": merge}


def worker(job: dict[str, Any]) -> dict[str, Any]:
    paths = {key: Path(path) for key, path in job["paths"].items()}
    return WORK[job["do"]](**paths, **job.get("options", {}))


# -- outside -----------------------------------------------------------------------------------------------------------


def measure(do: str, spread: str, source: Path, out: Path, **options: str) -> dict[str, Any]:
    common.read_all(source)
    first = "checkpoint_folder" if do == "merge" else "folder"
    job = {"do": do, "paths": {first: str(source), "out": str(out)}, "options": options}
    ranks = common.run_ranks("benchmarks.export", job, spread, num_ranks=1 if do == "merge" else common.NUM_RANKS)
    found = {
        "seconds": max(r["seconds"] for r in ranks),
        "cpu_seconds": sum(r["cpu_seconds"] for r in ranks),
        "peak": max(r["growth"] for r in ranks),
        "with_shard": max(r["growth"] + r["shard"] for r in ranks),
        "ranks": ranks,
    }
    print(f"{source.name} {do} {options.get('dtype', '')}: {found['seconds']:.2f} s", flush=True)
    return found


def check_equal(merged: Path, exported: Path) -> None:
    """Raise unless both folders hold the same tensors, bit for bit."""
    ours = Weights(exported)
    with safe_open(merged / "model.safetensors", framework="pt") as theirs:
        if set(theirs.keys()) != ours.entries.keys():
            raise RuntimeError("the two exports hold different tensors")
        for name in ours.entries:
            if not torch.equal(theirs.get_tensor(name), ours.read(name)):
                raise RuntimeError(f"{name} differs between the two exports")


def compare(size: float, scratch: Path, args: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """{(contender, dtype): measurements}, in turns."""
    folder, saved, merged, exported = (scratch / name for name in (f"{size} B", "checkpoint", "merged", "exported"))
    common.write_model(folder, common.llama_config(size))
    common.word_tokenizer(64).save_pretrained(folder)
    saved.mkdir()
    job = {"do": "checkpoint", "paths": {"folder": str(folder), "out": str(saved)}}
    common.run_ranks("benchmarks.export", job, args.spread)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(args.repeats):
        runs.setdefault(("merge", "float32"), []).append(measure("merge", args.spread, saved, merged))
        for dtype in ("bfloat16", "float32"):
            found = measure("ours", args.spread, folder, exported, dtype=dtype)
            runs.setdefault(("ours", dtype), []).append(found)
    check_equal(merged, exported)
    return runs


def median(measurements: list[dict[str, Any]], key: str) -> float:
    return statistics.median(m[key] for m in measurements)


def goals(size: float, runs: dict[tuple[str, str], list[dict[str, Any]]]) -> list[common.Goal]:
    ours, merge = runs["ours", "float32"], runs["merge", "float32"]
    peak, seconds = median(merge, "peak"), median(merge, "seconds")
    peer = "ours / merge-weights"
    return [
        common.Goal(f"{size} B, fp32, peak, {peer}", median(ours, "peak") / peak, 0.3),
        common.Goal(f"{size} B, fp32, peak with shard, {peer}", median(ours, "with_shard") / peak, 1.0),
        common.Goal(f"{size} B, fp32, seconds, {peer}", median(ours, "seconds") / seconds, 1.0),
    ]


def main(args: argparse.Namespace) -> None:
    rows, raw, reached = [], {}, []
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            runs = compare(size, Path(scratch), args)
        for (contender, dtype), measurements in runs.items():
            memory = [median(measurements, key) / common.GIB for key in ("peak", "with_shard")]
            times = [median(measurements, key) for key in ("seconds", "cpu_seconds")]
            rows.append((f"{size} B", contender, dtype, *times, *memory))
            raw[f"{size} B, {contender}, {dtype}"] = measurements
        reached += goals(size, runs)
    print(f"\n{args.spread}, {common.NUM_RANKS} CPU ranks, medians of {args.repeats}; the fp32 results are equal")
    common.report(HEADER, rows, reached, raw, args.json)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser)
    return parser


if __name__ == "__main__":
    common.main_or_worker(arguments(), main, worker)
