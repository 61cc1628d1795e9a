"""Training speed: the recipe's trainer against TRL's own `SFTTrainer` and against a bare PyTorch FSDP1 loop.

    python -m benchmarks.step [--dtypes float32 bfloat16] [--repeats 3] [--json FILE]

A random Llama of 42 M parameters with a vocabulary of 16,000, packed blocks of 512 tokens, two CPU ranks (gloo), FSDP1.
All three train on the same prepared blocks in the same order, with the same accumulation, activation checkpointing,
precision, AdamW (fused, no decay), clipping at 1 and constant learning rate; the trainers log every step, TRL with its
default metrics. Processes are fresh, the three take turns, and the first steps do not count. In fp32 the losses of the
three have to agree, or there is no comparison. "CPU seconds" are rank 0's for a step: on a busy machine they say more.

- ours: `recipe.train.main`, with one callback that notes the time;
- trl: `SFTTrainer` with `from_pretrained` on every rank, on the recipe's FSDP plugin and order of samples;
- bare: FSDP around every layer, the model's own loss over the labels, `clip_grad_norm_`. Nothing is logged.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks import common
from recipe import sampling, train
from recipe.arguments import Arguments, parse_arguments
from recipe.data import prepare
from recipe.model import load_tokenizer
from recipe.ranks import rank
from recipe.sharding.plugin import build_plugin, open_cpu_door
from recipe.stopping import StopRequest
from recipe.trainer import RecipeTrainer

VOCAB_SIZE = 16_000
LEARNING_RATE = 3e-4
LOSS_TOLERANCE = 1e-3
# What TRL's run has from the recipe's.
SAME = """output_dir per_device_train_batch_size gradient_accumulation_steps max_steps max_length packing learning_rate
lr_scheduler_type weight_decay max_grad_norm optim bf16 seed use_cpu activation_checkpointing
activation_checkpointing_kwargs accelerator_config dataset_kwargs logging_steps save_strategy report_to
disable_tqdm""".split()
HEADER = ("dtype", "contender", "tokens/s", "step seconds", "CPU seconds", "first loss", "last loss")


# -- in the ranks ------------------------------------------------------------------------------------------------------


class Clock(TrainerCallback):
    """When each optimizer step ended: on the wall, and in this process's CPU time."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def run_ours(arguments: Arguments) -> tuple[Clock, list[float]]:
    clock = Clock()

    def timed(callbacks: list[TrainerCallback], **kwargs: Any) -> RecipeTrainer:
        return RecipeTrainer(callbacks=[*callbacks, clock], **kwargs)

    train.RecipeTrainer = timed  # type: ignore[misc, assignment]
    train.main(arguments, StopRequest())
    metrics = (Path(arguments[2].output_dir) / "metrics.jsonl").read_text().splitlines()
    return clock, [json.loads(line)["loss"] for line in metrics]


class StockTrainer(SFTTrainer):
    """TRL's own, given a plugin that exists without a GPU, and the common order of samples."""

    def __init__(self, plugin: Any, **kwargs: Any):
        self.plugin = plugin
        super().__init__(**kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "fsdp_plugin": self.plugin}

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> sampling.SampleStream:
        args = self.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return sampling.SampleStream(len(self.train_dataset), args.max_steps * per_step, args.seed)


def run_trl(arguments: Arguments) -> tuple[Clock, list[float]]:
    data_args, model_args, train_args = arguments
    tokenizer = load_tokenizer(Path(model_args.model_name_or_path))
    rows = prepare(data_args, train_args, tokenizer).train
    train_args.activate(common.NUM_RANKS, on_gpu=False)
    args = SFTConfig(**{key: getattr(train_args, key) for key in SAME})
    open_cpu_door()  # after the arguments, which take the device anew
    clock = Clock()
    trainer = StockTrainer(
        build_plugin(torch.bfloat16 if train_args.bf16 else torch.float32, torch.float32),
        model=AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, FullyShardedDataParallel)
    return clock, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run_bare(arguments: Arguments) -> tuple[Clock, list[float]]:
    data_args, model_args, train_args = arguments
    tokenizer = load_tokenizer(Path(model_args.model_name_or_path))
    rows = prepare(data_args, train_args, tokenizer).train
    common.start_ranks()
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
    if train_args.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.float32) if train_args.bf16 else None
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id, padding_free=True)
    world_size, batch_size = dist.get_world_size(), int(train_args.global_batch_size or 0)
    stream = iter(sampling.SampleStream(len(rows), train_args.max_steps * batch_size, train_args.seed))
    clock, losses = Clock(), []
    for _ in range(train_args.max_steps):
        global_batch = [collate([rows[index]]) for index in itertools.islice(stream, batch_size)]
        num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in global_batch)
        total = torch.zeros(())
        for batch in global_batch[rank() :: world_size]:
            loss = model(**batch, num_items_in_batch=num_labels, use_cache=False).loss
            (loss * world_size).backward()  # FSDP averages over the ranks; the loss is a mean over the global batch
            total += loss.detach()
        model.clip_grad_norm_(train_args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
        losses.append(total)
    together = torch.stack(losses)
    dist.all_reduce(together)
    return clock, together.tolist()


CONTENDERS = {"ours": run_ours, "trl": run_trl, "bare": run_bare}


def worker(job: dict[str, Any]) -> dict[str, Any]:
    clock, losses = CONTENDERS[job["contender"]](parse_arguments(job["argv"]))
    steps = {"seconds": clock.wall, "cpu_seconds": clock.cpu}
    return {key: [end - begin for begin, end in itertools.pairwise(times)] for key, times in steps.items()} | {
        "losses": losses
    }


# -- outside -----------------------------------------------------------------------------------------------------------


def write_inputs(folder: Path, args: argparse.Namespace) -> list[str]:
    """Model, tokenizer and rows; returns the recipe's command line that trains on them."""
    config = common.llama_config(min(common.SIZES), vocab_size=VOCAB_SIZE)
    parameters = common.write_model(folder / "model", config, torch.float32)
    common.word_tokenizer(VOCAB_SIZE).save_pretrained(folder / "model")
    print(f"{parameters / 1e6:.1f} M parameters, vocabulary {VOCAB_SIZE:,}")
    draw = random.Random(0)
    per_step = common.NUM_RANKS * args.accumulation
    words = 2 * args.steps * per_step * args.block  # more blocks than the run takes
    with (folder / "rows.jsonl").open("w") as file:
        while words > 0:
            length = draw.randint(args.block // 20, args.block // 2)
            text = " ".join(f"w{draw.randrange(3, VOCAB_SIZE)}" for _ in range(length))
            file.write(json.dumps({"text": text}) + "\n")
            words -= length
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "rows.jsonl",
        "data_cache_dir": folder / "prepared",
        "max_length": args.block,
        "packing": True,
        "global_batch_size": per_step,
        "max_steps": args.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": 0,
        "activation_checkpointing": args.activation_checkpointing,
        "save_strategy": "no",
        "export": False,
        "report_to": "none",
    }
    return [part for key, value in options.items() for part in (f"--{key}", str(value))]


def compare(dtype: str, argv: list[str], args: argparse.Namespace, scratch: Path) -> dict[str, list[dict[str, Any]]]:
    """{contender: runs}, each a run of `args.steps` steps, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
    for repeat in range(args.repeats):
        for contender in CONTENDERS if repeat % 2 == 0 else reversed(CONTENDERS):
            out = scratch / f"{dtype}-{contender}-{repeat}"
            job_argv = [*argv, "--output_dir", str(out), "--bf16", str(dtype == "bfloat16")]
            run = common.run_ranks("benchmarks.step", {"contender": contender, "argv": job_argv})[0]
            for key in ("seconds", "cpu_seconds"):
                run[key] = run[key][args.warm_up - 1 :]  # the first step has no beginning on the clock
            runs[contender].append(run)
            print(f"{dtype} {contender}: {statistics.median(run['seconds']):.3f} s a step", flush=True)
    return runs


def median(runs: list[dict[str, Any]], key: str = "seconds") -> float:
    """Of all counted steps of all runs."""
    return statistics.median(second for run in runs for second in run[key])


def check_losses(runs: dict[str, list[dict[str, Any]]]) -> float:
    """The largest difference of the three's losses, over all steps."""
    curves = [run["losses"] for contender in runs.values() for run in contender]
    return max(max(step) - min(step) for step in zip(*curves, strict=True))


def main(args: argparse.Namespace) -> None:
    rows, raw, goals = [], {}, []
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        argv = write_inputs(Path(scratch), args)
        for dtype in args.dtypes:
            runs = raw[dtype] = compare(dtype, argv, args, Path(scratch))
            tokens = args.block * common.NUM_RANKS * args.accumulation
            ours = median(runs["ours"])
            for contender, found in runs.items():
                seconds, losses = median(found), found[0]["losses"]
                cpu = median(found, "cpu_seconds")
                rows.append((dtype, contender, tokens / seconds, seconds, cpu, losses[0], losses[-1]))
            if dtype == "float32":
                goals.append(common.Goal("float32, largest difference of losses", check_losses(runs), LOSS_TOLERANCE))
            for peer, bound in (("trl", 1.15), ("bare", 0.97)):
                ratio = median(runs[peer]) / ours
                goals.append(common.Goal(f"{dtype}, tokens/s, ours / {peer}", ratio, bound, at_most=False))
    setting = f"{args.accumulation} micro-batches of {args.block} tokens a rank and step"
    checkpointing = "with" if args.activation_checkpointing else "without"
    print(f"\nFSDP1, {common.NUM_RANKS} CPU ranks, {setting}, {checkpointing} activation checkpointing")
    common.report(HEADER, rows, goals, raw, args.json)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--block", type=int, default=512, help="tokens of a packed block")
    parser.add_argument("--accumulation", type=int, default=2, help="blocks a rank takes in one step")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a run")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps of a run that do not count, at least 1")
    parser.add_argument("--activation-checkpointing", action="store_true", help="for all three")
    common.add_options(parser, sizes=False)
    return parser


if __name__ == "__main__":
    common.main_or_worker(arguments(), main, worker)
