"""What the benchmarks share: random models on disk, ranks in fresh processes, memory, a table and its goals."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from recipe import (
    noise,  # noqa: F401 - for what importing it does
    ranks,
)
from recipe.checkpoint import shards
from recipe.export import SafetensorsWriter
from recipe.model import load_config, meta_model
from recipe.sharding import state
from recipe.sharding.plugin import open_cpu_door

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
GIB = 2**30
SAMPLE_SECONDS = 0.002  # between two looks at the memory

# Billions of parameters, about: hidden size, MLP size, layers, heads; Llama's vocabulary of 32,000.
SIZES = {
    0.06: (512, 1376, 8, 8),
    0.4: (1024, 2752, 24, 16),
    1.3: (2048, 5504, 24, 16),
}


# -- models ------------------------------------------------------------------------------------------------------------


def llama_config(size: float, depth: int = 1, vocab_size: int = 32_000) -> LlamaConfig:
    """A Llama of `size` billion parameters (a key of `SIZES`), with `depth` times its layers."""
    hidden, mlp, layers, heads = SIZES[size]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers * depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def write_model(folder: Path, config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write random weights tensor by tensor, in files of 1 GB with an index; returns the number of parameters."""
    folder.mkdir(parents=True)
    model = meta_model(config, None, dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with SafetensorsWriter(folder, shapes, dtype, "1GB") as writer:
        for name, shape in shapes.items():
            is_norm = len(shape) == 1
            value = torch.ones(shape) if is_norm else torch.empty(shape).normal_(0, 0.02, generator=generator)
            writer.write(name, value)
    config.save_pretrained(folder)
    return model.num_parameters()


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token a word: "w3" to "w<vocab_size - 1>", and Llama's special tokens."""
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(3, vocab_size))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def read_all(folder: Path) -> None:
    """Bring every file of `folder` into the page cache, so that no contender pays for the disk."""
    buffer = bytearray(1 << 24)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


# -- memory ------------------------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """This process's resident anonymous memory: what it allocated, without mapped files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def available_bytes() -> int:
    with open("/proc/meminfo") as meminfo:
        return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))


class AnonymousMemory:
    """Watches this process's anonymous memory from a thread while its body runs.

    Attributes:
        before, peak, after: bytes.
    """

    def __enter__(self) -> "AnonymousMemory":
        self.before = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.after = anonymous_bytes()
        self.peak = max(self.peak, self.after)


def shard_bytes(model: nn.Module) -> int:
    """Memory of this rank's part of a wrapped model, in bytes."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.numel() * p.element_size() for p in local)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def shard_map(folder: Path, model: nn.Module) -> state.ShardMap:
    """Which part of each parameter this rank holds of the sharded model of `folder`."""
    fresh = meta_model(load_config(folder), None, torch.float32)
    return state.ShardMap(model, {name: parameter.shape for name, parameter in fresh.named_parameters()})


def write_pieces(folder: Path, pieces: list[shards.Piece]) -> None:
    """Write sharded files of what all ranks hold. Collective."""
    layout = shards.agree(pieces)
    written = shards.write(folder, layout, {piece.index: piece.data for piece in pieces})
    everyone = ranks.gather(written.items)
    if ranks.is_main():
        shards.finish(folder, layout, everyone)
    dist.barrier()


# -- processes ---------------------------------------------------------------------------------------------------------


def run_alone(*command: str) -> dict[str, float]:
    """Run a command as a user does: its seconds, with its start, and the memory of its largest process, in bytes.

    The kernel counts in what a process was forked from, so a small one starts it."""
    start = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)"
    say = "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    began = time.perf_counter()
    wrapped = [sys.executable, "-c", f"{start}; {say}", *command]
    done = subprocess.run(wrapped, cwd=ROOT, text=True, capture_output=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{done.stderr}\nfailed: {' '.join(command)}")
    return {"seconds": seconds, "peak": int(done.stdout) * 1024}


def run_ranks(module: str, job: dict[str, Any], spread: str = "fsdp1", num_ranks: int = NUM_RANKS) -> list[dict]:
    """Run `module`'s worker in fresh processes and return what each rank's worker returned, rank 0 first.

    Args:
        module: such as "benchmarks.loading"; its `worker` is reached by `main_or_worker`.
        job: what to do, as JSON values.
        spread: "fsdp1" or "fsdp2", the two-rank CPU files of configs/accelerate.
        num_ranks: 1 starts a plain process without a launcher.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "job.json"
        path.write_text(json.dumps(job))
        launcher = [sys.executable]
        if num_ranks > 1:
            config = ROOT / f"configs/accelerate/{spread}_cpu_2rank.yaml"
            launcher += ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
        # As launch/train.sh does: the ranks share the cores.
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        command = [*launcher, "-m", module, "--job", str(path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
        if done.returncode:
            said = done.stderr.partition("torch/distributed/elastic")[0]  # without the launcher's own traceback
            sys.exit(f"{said}\nfailed: {' '.join(command)}")
        return [json.loads((Path(scratch) / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def main_or_worker(
    parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace], None], worker: Callable[[dict], dict]
) -> None:
    """Run `main` with the parsed arguments; in a process that `run_ranks` started, run `worker` instead."""
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is None:
        main(args)
        return
    result = worker(json.loads(args.job.read_text()))
    (args.job.parent / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


def start_ranks() -> None:
    """Join the process group (gloo) and let Accelerate run real FSDP on it."""
    PartialState(cpu=True)
    open_cpu_door()


def add_options(parser: argparse.ArgumentParser, sizes: bool = True) -> None:
    """The options that the benchmarks share."""
    if sizes:
        parser.add_argument(
            "--sizes", type=float, nargs="+", default=[0.4, 1.3], choices=[*SIZES], help="billions of parameters"
        )
        parser.add_argument("--spread", choices=["fsdp1", "fsdp2"], default="fsdp1")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each contender")
    parser.add_argument("--scratch", type=Path, help="folder for models (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table and all measurements there")


# -- report ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A ratio of ours to the named peer's, and the bound it has to keep."""

    what: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"{self.what}: {self.value:.3g} (goal {'<=' if self.at_most else '>='} {self.bound}) {verdict}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as their widest cell; floats with three decimals."""
    lines = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def report(
    header: Sequence[str], rows: Sequence[Sequence[Any]], goals: Sequence[Goal], raw: Any, json_path: Path | None
) -> None:
    """Print the table and the goals; write them, with the `raw` measurements, to `json_path`."""
    print()
    print_table(header, rows)
    for goal in goals:
        print(goal)
    if json_path is not None:
        result = {
            "rows": [dict(zip(header, row, strict=True)) for row in rows],
            "goals": [vars(goal) | {"met": goal.met} for goal in goals],
            "measurements": raw,
            "torch": torch.__version__,
            "cores": os.cpu_count(),
        }
        json_path.write_text(json.dumps(result, indent=1) + "\n")
