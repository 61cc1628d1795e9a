"""The entry: fine-tune a model under FSDP, resume it, export it.

    accelerate launch --config_file configs/accelerate/fsdp1_cpu_2rank.yaml \
        -m recipe.train --config configs/quickstart.yaml [--key value ...]

`main` assembles, in the order of the data's way: arguments, checks, data, model on meta, trainer, export.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from recipe import noise, preflight, ranks, run_folder  # noqa: F401 - noise first, for what importing it does
from recipe.arguments import Arguments, TrainArguments, parse_arguments
from recipe.callbacks.dtypes import DtypeCheck
from recipe.callbacks.meter import MeterCallback, StepMeter
from recipe.callbacks.metrics import MetricsFile
from recipe.callbacks.progress import Progress
from recipe.callbacks.steps import StepRules
from recipe.data import prepare
from recipe.errors import UserError, raise_if
from recipe.model import meta_model, torch_dtype
from recipe.plan import flops
from recipe.sharding.plugin import build_plugin, open_cpu_door
from recipe.trainer import RecipeTrainer


def main(arguments: Arguments) -> None:
    data_args, model_args, train_args = arguments
    world_size, on_gpu = world_size_asked(), torch.cuda.is_available()
    found = preflight.check(arguments, world_size, on_gpu=on_gpu)
    data = prepare(data_args, train_args, found.tokenizer)
    raise_if(preflight.rows(train_args, len(data.train)))
    found.tokenizer.chat_template = data.template or found.tokenizer.chat_template
    train_args.settle(num_rows=len(data.train), bf16=found.compute_dtype != found.master_dtype)
    run = run_folder.fingerprint(arguments, data.fingerprint, found.folder, found.tokenizer)
    resolved = run_folder.resolved(arguments)
    train_args.activate(world_size, on_gpu)
    open_cpu_door()
    lines = [*preflight.costs(model_args), *data.report.lines()]
    resume_from = open_run_folder(train_args, run, resolved, lines)
    meter = make_meter(found, train_args, world_size)
    trainer = RecipeTrainer(
        model=meta_model(found.config, model_args.attn_implementation, found.master_dtype),
        args=train_args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        found=found,
        plugin=build_plugin(found.compute_dtype, torch_dtype(model_args.reduce_dtype)),
        run=run,
        meter=meter,
        callbacks=[
            MeterCallback(meter),
            DtypeCheck(found.master_dtype),
            StepRules(len(data.train), run["global_batch_size"], train_args.stop_at_step),
            MetricsFile(Path(train_args.output_dir), meter),
            Progress(),
        ],
    )
    trainer.train(resume_from_checkpoint=resume_from)
    if train_args.export and trainer.state.global_step >= train_args.max_steps:
        trainer.save_model(str(Path(train_args.output_dir) / run_folder.EXPORT))
    trainer.end()


def world_size_asked() -> int:
    """Ranks of this launch, as the launcher says it to each of them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def open_run_folder(
    args: TrainArguments, run: dict[str, Any], resolved: dict[str, Any], lines: list[str]
) -> str | None:
    """Claim the run folder and find the checkpoint to go on from (rank 0 looks, every rank learns); log `lines`
    before."""
    resume_from = None
    with ranks.all_or_none("opening the run folder"):
        if ranks.is_main():
            run_dir = Path(args.output_dir)
            run_folder.claim(run_dir, run)
            resume_from, found = run_folder.resume_point(run_dir, args.resume_from_checkpoint, run)
            run_folder.write_config(run_dir, resolved)
            print("\n".join(f"recipe: {line}" for line in [*lines, *found]), flush=True)
    resume_from = ranks.from_main(resume_from)
    return None if resume_from is None else str(resume_from)


def make_meter(found: preflight.Found, train_args: TrainArguments, world_size: int) -> StepMeter:
    assert train_args.max_length is not None, "the checks refuse that"
    parameters = flops.matmul_parameters(found.config, found.fresh.num_parameters())
    on_gpu = train_args.device.type == "cuda"
    return StepMeter(
        device=train_args.device,
        world_size=world_size,
        flops_per_token=flops.flops_per_token(found.config, parameters, train_args.max_length),
        peak_flops=flops.peak_flops(torch.cuda.get_device_name()) if on_gpu else None,
    )


def entry() -> int:
    """Run `main`; a user's mistake is printed as such, without a traceback, with exit code 2."""
    try:
        main(parse_arguments())
    except UserError as error:
        if not PartialState._shared_state or PartialState().is_main_process:
            tqdm.write(f"recipe: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def leave(code: int) -> None:
    """End the process without Python's finalization.

    Until Python 3.14 it ends threads that wait for the interpreter by `pthread_exit`, which C++ frames on their stacks
    (torch has such threads) turn into `std::terminate` (python/cpython#87135): about one finished run in thirty died of
    SIGABRT.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(entry())
