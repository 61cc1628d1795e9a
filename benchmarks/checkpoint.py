"""Checkpoints: the recipe's saves, loads and offline exports against Accelerate's, of the same model and optimizer.

    python -m benchmarks.checkpoint [--sizes 0.4] [--spread fsdp1] [--json FILE]

A random Llama with fp32 weights and AdamW's moments, sharded over two CPU ranks (gloo). The peer is what transformers'
`Trainer` calls: `save_fsdp_model` and `save_fsdp_optimizer` under SHARDED_STATE_DICT, and their loading counterparts;
and `accelerate merge-weights`. Both sync their files. All contenders take turns in the same processes.

- save: ours in the background, as the trainer does it: the pause is the time until training goes on, and what the next
  optimizer step then waits for the copy; "total" ends when the checkpoint is published. "step" is how long the training
  step after it takes, on as many cores as there are ranks; "plain step" is one without a save. The first save agrees on
  who writes what and allocates the copy. "synchronous": ours with `async_save: false`. "no sums": the same
  with files that are not summed.
- load: ours reads the files back against their checksums, as a resume does, and then model and optimizer, into an
  optimizer that has not stepped. The peer loads nothing into such a one under FSDP1, so its optimizer has stepped.
  What was loaded is compared with what was saved. Files are in the page cache.
- export: `recipe export` and `accelerate merge-weights` as commands, with their imports: seconds, and the kernel's peak
  of resident memory. The two fp32 results are compared bit for bit.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.filesystem import FileSystem

from benchmarks import common
from benchmarks.export import check_equal
from recipe import ranks, run_folder
from recipe.checkpoint import shards
from recipe.checkpoint.manifest import FILE, Manifest, describe_files, list_files
from recipe.checkpoint.saver import Content, Saver
from recipe.loading import StreamingLoader, Weights
from recipe.model import load_config, meta_model
from recipe.rendezvous import Rendezvous
from recipe.sharding import gather, state, wrap
from recipe.sharding.plugin import build_plugin

DTYPE = torch.float32
TOKENS = 128  # of each rank in a step
HEADER = ("model", "what", "contender", "seconds", "total seconds", "step seconds", "peak GiB")


# -- in the ranks ------------------------------------------------------------------------------------------------------


class UnsummedFileSystem(FileSystem):
    """Torch's own, which keeps the sizes that the recipe's keeps, and no sums."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[Path, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as raw:
            yield raw
        self.sums[Path(path)] = {"size": Path(path).stat().st_size, "xxh3_64": ""}


class Training:
    """A sharded model and its optimizer; and each way to save and to load them."""

    def __init__(self, folder: Path, run_dir: Path):
        common.start_ranks()
        self.accelerator = Accelerator(fsdp_plugin=build_plugin(DTYPE, DTYPE))
        self.plugin = self.accelerator.state.fsdp_plugin
        self.plugin.set_state_dict_type("SHARDED_STATE_DICT")
        model = meta_model(load_config(folder), None, DTYPE)
        weights = Weights(folder) if ranks.is_main() else None
        loader = StreamingLoader(model, weights, DTYPE, wrap.loader_broadcasts(self.accelerator))
        self.model = wrap.shard(self.accelerator, model, loader)
        self.shard_map = common.shard_map(folder, self.model)
        self.optimizer = self.new_optimizer()
        self.saver = Saver(run_dir, Rendezvous(), torch.device("cpu"), in_background=True)
        self.saves = 0

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> dict[str, float]:
        """One training step, as the trainer does it: its seconds, and how many of them it waited for a copy."""
        began = time.perf_counter()
        ids = torch.randint(3, 60, (1, TOKENS))
        self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        waits = time.perf_counter()
        self.saver.wait_staged()
        waited = time.perf_counter() - waits
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"step": time.perf_counter() - began, "waited": waited}

    def fingerprint(self) -> list[float]:
        """Of the weights and moments that this rank holds."""
        held = [gather.local_part(p) for p in self.model.parameters()]
        moments = [gather.local_part(s[m]) for s in self.optimizer.state.values() for m in ("exp_avg", "exp_avg_sq")]
        return [float(sum(t.detach().double().abs().sum() for t in tensors)) for tensors in (held, moments)]

    def spoil(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                gather.local_part(parameter).zero_()

    def save_ours(self, in_background: bool, step: bool = True) -> dict[str, float]:
        self.saves += 1
        self.saver.in_background, began = in_background, time.perf_counter()
        pieces = {
            shards.MODEL: state.model_pieces(self.shard_map),
            shards.OPTIMIZER: state.optimizer_pieces(self.shard_map, self.optimizer),
        }
        manifest = Manifest(self.saves, self.saves, ranks.world_size(), {})
        self.saver.save(Content(pieces, {}, lambda folder: None, manifest))
        outcome = None if in_background else self.saver.finish()
        called = time.perf_counter() - began
        stepped = self.step() if step else {"step": 0.0, "waited": 0.0}
        outcome = outcome or self.saver.finish()
        assert outcome is not None and not outcome.failures, outcome
        return {"seconds": called + stepped["waited"], "total": outcome.total, **stepped}

    def save_unsummed(self) -> dict[str, float]:
        summing, shards._SummingFileSystem = shards._SummingFileSystem, UnsummedFileSystem  # type: ignore
        try:
            return self.save_ours(in_background=False)
        finally:
            shards._SummingFileSystem = summing  # type: ignore[misc]

    def save_stock(self, folder: Path, step: bool = True) -> dict[str, float]:
        began = time.perf_counter()
        save_fsdp_model(self.plugin, self.accelerator, self.model, str(folder))
        save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(folder))
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "total": seconds, **(self.step() if step else {})}

    def load_ours(self, folder: Path) -> dict[str, float]:
        began = time.perf_counter()
        why = run_folder._defect(folder, lambda doing: None)
        assert why is None, why
        checked = time.perf_counter() - began
        shards.Reader(folder / shards.MODEL).read(state.model_pieces(self.shard_map))
        self.optimizer = self.new_optimizer()
        state.load_optimizer(self.shard_map, self.optimizer, shards.Reader(folder / shards.OPTIMIZER).read)
        dist.barrier()
        return {"seconds": time.perf_counter() - began, "checked": checked}

    def load_stock(self, folder: Path) -> dict[str, float]:
        began = time.perf_counter()
        load_fsdp_model(self.plugin, self.accelerator, self.model, str(folder))
        load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(folder))
        dist.barrier()
        return {"seconds": time.perf_counter() - began}


def worker(job: dict[str, Any]) -> dict[str, Any]:
    run_dir, stock = Path(job["run_dir"]), Path(job["stock"])
    training = Training(Path(job["folder"]), run_dir)
    found: dict[str, list[dict[str, float]]] = {"plain step": [training.step() for _ in range(4)][1:]}
    saves: dict[str, Callable[[], dict[str, float]]] = {
        "ours": lambda: training.save_ours(in_background=True),
        "stock": lambda: training.save_stock(stock),
        "no sums": training.save_unsummed,
        "synchronous": lambda: training.save_ours(in_background=False),
    }
    for repeat in range(job["repeats"] + 1):
        for name in saves if repeat % 2 == 0 else reversed(saves):
            clear(stock, run_dir)
            found.setdefault(f"save, {name}", []).append(saves[name]())
    clear(stock, run_dir)
    expected = training.fingerprint()
    training.save_ours(in_background=False, step=False)
    training.save_stock(stock, step=False)
    ours = run_dir / f"checkpoint-{training.saves}"
    loads = {"ours": lambda: training.load_ours(ours), "stock": lambda: training.load_stock(stock)}
    for repeat in range(job["repeats"]):
        for name in loads if repeat % 2 == 0 else reversed(loads):
            training.spoil()
            if ranks.is_main():
                common.read_all(ours if name == "ours" else stock)
            dist.barrier()
            found.setdefault(f"load, {name}", []).append(loads[name]())
            assert training.fingerprint() == expected, f"{name} loaded something else than was saved"
    return found


def clear(*folders: Path) -> None:
    """Delete what earlier saves wrote, and let the disk come to rest."""
    dist.barrier()
    if ranks.is_main():
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        os.sync()
    dist.barrier()


# -- outside -----------------------------------------------------------------------------------------------------------


def slowest(everyone: list[dict[str, list[dict[str, float]]]]) -> dict[str, list[dict[str, float]]]:
    """Of each measurement, the rank that took longest."""
    return {
        what: [{key: max(one[key] for one in same) for key in same[0]} for same in zip(*together, strict=True)]
        for what in everyone[0]
        for together in [[rank[what] for rank in everyone]]
    }


def export(model: Path, checkpoint: Path, scratch: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """{contender: measurements} of the commands, in turns."""
    merged, exported = scratch / "merged", scratch / "exported"
    recipe = (sys.executable, "-m", "recipe.cli", "export", str(checkpoint), str(exported), "--model", str(model))
    merge = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights")
    commands = {
        "merge-weights": (*merge, str(checkpoint / shards.MODEL), str(merged)),
        "ours, bfloat16": (*recipe, "--dtype", "bfloat16"),
        "ours, float32": (*recipe, "--dtype", "float32"),
    }
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for name, command in commands.items():
            common.read_all(checkpoint / shards.MODEL)
            found.setdefault(f"export, {name}", []).append(common.run_alone(*command))
            print(f"{name}: {found[f'export, {name}'][-1]['seconds']:.2f} s", flush=True)
    check_equal(merged, exported)
    return found


def compare(size: float, scratch: Path, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    folder, run_dir, stock = (scratch / name for name in ("model", "run", "stock"))
    common.write_model(folder, common.llama_config(size), DTYPE)
    common.word_tokenizer(64).save_pretrained(folder)
    job = {"folder": str(folder), "run_dir": str(run_dir), "stock": str(stock), "repeats": args.repeats}
    found = slowest(common.run_ranks("benchmarks.checkpoint", job, args.spread))
    for what, measurements in found.items():
        seconds = ", ".join(f"{m.get('seconds', m.get('step', 0.0)):.2f}" for m in measurements)
        print(f"{size} B, {what}: {seconds} s", flush=True)
    shutil.rmtree(stock)
    checkpoint = max(run_dir.iterdir(), key=lambda path: path.stat().st_mtime)
    shutil.rmtree(checkpoint / shards.OPTIMIZER)
    (checkpoint / FILE).unlink()  # the benchmark's has no description, and now no optimizer
    checkpoint_manifest(checkpoint)
    return found | export(folder, checkpoint, scratch, args.repeats)


def checkpoint_manifest(checkpoint: Path) -> None:
    """Of the weights alone, so that the export has checksums to read."""
    Manifest(1, 1, common.NUM_RANKS, {}, files=describe_files(checkpoint, list_files(checkpoint))).write(checkpoint)


def median(measurements: list[dict[str, float]], key: str = "seconds") -> float:
    return statistics.median(m[key] for m in measurements)


def goals(size: float, found: dict[str, list[dict[str, float]]]) -> list[common.Goal]:
    names = ("ours", "stock", "synchronous", "no sums")
    ours, stock, synchronous, unsummed = (found[f"save, {name}"] for name in names)
    merge = found["export, merge-weights"]
    pause, total = median(stock[1:]), median(stock[1:], "total")
    return [
        common.Goal(f"{size} B, pause of the first save, ours / stock's save", ours[0]["seconds"] / pause, 0.15),
        common.Goal(f"{size} B, pause of later saves, ours / stock's save", median(ours[1:]) / pause, 0.15),
        common.Goal(f"{size} B, synchronous save, ours / stock", median(synchronous[1:], "total") / total, 1.0),
        common.Goal(
            f"{size} B, synchronous save, summed / not",
            median(synchronous[1:], "total") / median(unsummed[1:], "total"),
            1.05,
        ),
        common.Goal(f"{size} B, load, ours / stock", median(found["load, ours"]) / median(found["load, stock"]), 1.0),
        *(
            common.Goal(f"{size} B, export, {key}, {name} / merge-weights", median(m, key) / median(merge, key), bound)
            for name in ("ours, float32", "ours, bfloat16")
            for m in [found[f"export, {name}"]]
            for key, bound in (("peak", 0.2), ("seconds", 1.0))
        ),
    ]


def main(args: argparse.Namespace) -> None:
    rows, raw, reached = [], {}, []
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            found = raw[f"{size} B"] = compare(size, Path(scratch), args)
        for what, measurements in found.items():
            kind, _, contender = what.partition(", ")
            if kind == "save":
                first = measurements[0]
                rows.append((f"{size} B", "first save", contender, first["seconds"], first["total"], first["step"], ""))
                measurements = measurements[1:]
            keys = ("seconds", "total", "step", "peak")
            cells = [median(measurements, key) if key in measurements[0] else "" for key in keys]
            if cells[3]:
                cells[3] = float(cells[3]) / common.GIB
            rows.append((f"{size} B", kind, contender, *cells))
        reached += goals(size, found)
    print(f"\n{args.spread}, {common.NUM_RANKS} CPU ranks, medians of {args.repeats}")
    common.report(HEADER, rows, reached, raw, args.json)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser)
    parser.set_defaults(sizes=[0.4])
    return parser


if __name__ == "__main__":
    common.main_or_worker(arguments(), main, worker)
