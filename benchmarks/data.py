"""Preparing data: `recipe.data.prepare` against TRL's own path; packing; and the start of a run on a warm cache.

    python -m benchmarks.data [--copies 20] [--rows 1000000] [--repeats 3] [--json FILE]

- Preparing: chats of the standard library (docstring, function), each `--copies` times with a number in the question,
  in one JSON lines file; the quickstart's tokenizer; Llama-2's template; answers alone are trained; blocks of 1,024
  tokens; two processes. From the file to packed blocks. TRL: `load_dataset("json", ...)`, then the part of `SFTTrainer`
  that prepares (its constructor, on a model of a few thousand parameters). Both in fresh processes, in turns, without
  the time of imports. Both have to come to the same number of tokens and of trained tokens.
- Packing: the same set, once, at 1,024 tokens: the share of the blocks' positions that hold tokens.
- Warm start: a generated set of `--rows` chats is prepared once; then, in a fresh process, the time from `prepare` to
  the first batch of a run's sampler and collator, and what the memory of that process (anonymous: without what is
  mapped) grows by, there and over a further 1,000 batches from all over the set.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks import common
from recipe.arguments import DataArguments, TrainArguments
from recipe.data import prepare
from recipe.data.template import read_template
from recipe.model import load_tokenizer
from recipe.quickstart import DATA, MODEL
from recipe.quickstart import prepare as prepare_quickstart
from recipe.sampling import SampleStream

MAX_LENGTH, NUM_PROC = 1024, 2
HEADER = ("what", "contender", "seconds", "rows/s", "tokens", "trained tokens")


# -- in a fresh process ------------------------------------------------------------------------------------------------


def arguments(job: dict[str, Any]) -> tuple[DataArguments, TrainArguments]:
    data = DataArguments(dataset_name=job["data"], data_cache_dir=job["cache"])
    train = TrainArguments(
        output_dir="unused",
        max_length=MAX_LENGTH,
        packing=True,
        assistant_only_loss=True,
        chat_template_path="llama2",
        dataset_num_proc=NUM_PROC,
    )
    return data, train


def prepare_ours(job: dict[str, Any]) -> dict[str, float]:
    tokenizer = load_tokenizer(Path(job["model"]))
    began = time.perf_counter()
    prepared = prepare(*arguments(job), tokenizer)
    seconds = time.perf_counter() - began
    report = prepared.report.train
    return {
        "seconds": seconds,
        "tokens": report.tokens,
        "trained": report.trained_tokens,
        "efficiency": report.packing_efficiency or 0.0,
    }


def prepare_trl(job: dict[str, Any]) -> dict[str, float]:
    tokenizer = load_tokenizer(Path(job["model"]))
    template = Path(job["cache"]) / "llama2.jinja"
    template.parent.mkdir(parents=True, exist_ok=True)
    template.write_text(read_template(tokenizer, "llama2"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    config = SFTConfig(
        output_dir=str(Path(job["cache"]) / "out"),
        max_length=MAX_LENGTH,
        packing=True,
        assistant_only_loss=True,
        chat_template_path=str(template),
        dataset_num_proc=NUM_PROC,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    began = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=job["data"], split="train", cache_dir=job["cache"])
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    seconds = time.perf_counter() - began
    labels = trainer.train_dataset.with_format("numpy")["labels"]
    tokens = sum(len(row) for row in labels)
    return {"seconds": seconds, "tokens": tokens, "trained": sum(int((row != -100).sum()) for row in labels)}


def start_warm(job: dict[str, Any]) -> dict[str, float]:
    tokenizer = load_tokenizer(Path(job["model"]))
    before = common.anonymous_bytes()
    began = time.perf_counter()
    prepared = prepare(*arguments(job), tokenizer)
    blocks = prepared.train
    stream = iter(SampleStream(len(blocks), 0, global_batch_size=8, max_steps=10**6))
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    collate([blocks[at] for at in itertools.islice(stream, 8)])
    seconds = time.perf_counter() - began
    after = common.anonymous_bytes()
    for _ in range(1000):
        collate([blocks[at] for at in itertools.islice(stream, 8)])
    return {
        "seconds": seconds,
        "grown": after - before,
        "grown_later": common.anonymous_bytes() - after,
        "rows": prepared.report.train.rows,
        "bytes": sum(path.stat().st_size for path in prepared.folder.rglob("*.arrow")),
    }


WORK = {"ours": prepare_ours, "trl": prepare_trl, "warm": start_warm}


def worker(job: dict[str, Any]) -> dict[str, float]:
    return WORK[job["what"]](job)


def run(what: str, data: Path, model: Path, cache: Path) -> dict[str, float]:
    job = {"what": what, "data": str(data), "model": str(model), "cache": str(cache)}
    return common.run_ranks("benchmarks.data", job, num_ranks=1)[0]


# -- outside -----------------------------------------------------------------------------------------------------------


def write_copies(source: Path, path: Path, copies: int) -> int:
    """The rows of `source`, `copies` times with a number in the question; returns how many."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    with path.open("w") as file:
        for number in range(copies):
            for row in rows:
                question, *others = row["messages"]
                question = {**question, "content": f"{question['content']} ({number})"}
                file.write(json.dumps({"messages": [question, *others]}) + "\n")
    return copies * len(rows)


def write_generated(path: Path, num_rows: int) -> None:
    """Chats of 10 to 60 words."""
    draw = random.Random(0)
    words = [
        f"{a}{b}" for a in ("get", "set", "open", "read", "write") for b in ("_file", "_name", "_list", " the", " of")
    ]
    with path.open("w") as file:
        for number in range(num_rows):
            texts = [" ".join(draw.choices(words, k=draw.randint(5, 30))) for _ in range(2)]
            roles = zip(("user", "assistant"), (f"{number} {texts[0]}", texts[1]), strict=True)
            messages = [{"role": role, "content": text} for role, text in roles]
            file.write(json.dumps({"messages": messages}) + "\n")


def main(args: argparse.Namespace) -> None:
    rows: list[tuple] = []
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        prepare_quickstart(folder / "quickstart")
        model, once = folder / "quickstart" / MODEL, folder / "quickstart" / DATA
        num_rows = write_copies(once, folder / "copies.jsonl", args.copies)
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
        for repeat in range(args.repeats):
            for what in ("ours", "trl") if repeat % 2 == 0 else ("trl", "ours"):
                runs[what].append(run(what, folder / "copies.jsonl", model, folder / f"{what}-{repeat}"))
                print(f"preparing, {what}: {runs[what][-1]['seconds']:.2f} s", flush=True)
        seconds = {what: statistics.median(one["seconds"] for one in found) for what, found in runs.items()}
        ours, trl = runs["ours"][0], runs["trl"][0]
        for what, found in runs.items():
            counts = int(found[0]["tokens"]), int(found[0]["trained"])
            rows.append((f"prepare {num_rows:,} rows", what, seconds[what], round(num_rows / seconds[what]), *counts))
        goals = [
            common.Goal("tokens, difference from trl's", abs(ours["tokens"] - trl["tokens"]), 0),
            common.Goal("trained tokens, difference from trl's", abs(ours["trained"] - trl["trained"]), 0),
            common.Goal("rows/s, ours / trl", seconds["trl"] / seconds["ours"], 1.2, at_most=False),
        ]
        packed = run("ours", once, model, folder / "once")
        goals.append(common.Goal("positions filled at 1,024 tokens", packed["efficiency"], 0.98, at_most=False))
        write_generated(folder / "generated.jsonl", args.rows)
        cold = run("ours", folder / "generated.jsonl", model, folder / "generated")
        rate = round(args.rows / cold["seconds"])
        counts = int(cold["tokens"]), int(cold["trained"])
        rows.append((f"prepare {args.rows:,} rows", "ours", cold["seconds"], rate, *counts))
        warm = [run("warm", folder / "generated.jsonl", model, folder / "generated") for _ in range(args.repeats)]
        start = statistics.median(one["seconds"] for one in warm)
        rows.append((f"start on {int(warm[0]['bytes'] / 1e6):,} MB prepared", "ours", start, "", "", ""))
        share = max(one["grown"] + one["grown_later"] for one in warm) / warm[0]["bytes"]
        goals.append(common.Goal(f"seconds to the first batch of {args.rows:,} rows, warm", start, 2.0))
        goals.append(common.Goal("memory grown / size of the prepared data", share, 0.1))
        for key in ("grown", "grown_later"):
            print(f"warm start, {key}: {np.median([one[key] for one in warm]) / 1e6:.1f} MB")
        raw = {"prepare": runs, "once": packed, "cold": cold, "warm": warm}
    print(f"\n{NUM_PROC} processes, blocks of {MAX_LENGTH:,} tokens, medians of {args.repeats}")
    common.report(HEADER, rows, goals, raw, args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=20, help="of the standard library's rows")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the generated set")
    common.add_options(parser, sizes=False)
    common.main_or_worker(parser, main, worker)
