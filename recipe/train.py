"""The entry: fine-tune a model under FSDP, resume it, export it.

    accelerate launch --config_file configs/accelerate/fsdp1_cpu_2rank.yaml \
        -m recipe.train --config configs/quickstart.yaml [--key value ...]

`main` assembles, in the order of the data's way: arguments, checks, data, model on meta, trainer, export.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from recipe import noise, preflight, ranks, run_folder
from recipe.arguments import Arguments, TrainArguments, parse_arguments
from recipe.callbacks.meter import MeterCallback, StepMeter
from recipe.callbacks.metrics import MetricsFile
from recipe.callbacks.progress import Progress
from recipe.callbacks.steps import StepRules
from recipe.data import prepare
from recipe.errors import UserError
from recipe.loading import Weights
from recipe.model import meta_model
from recipe.plan import flops
from recipe.sampling import num_steps
from recipe.sharding.plugin import build_plugin, open_cpu_door
from recipe.trainer import RecipeTrainer


def main(arguments: Arguments) -> None:
    data_args, model_args, train_args = arguments
    world_size, on_gpu = world_size_asked(), torch.cuda.is_available()
    found = preflight.check(arguments, world_size, on_gpu=on_gpu)
    prepared = prepare(data_args, train_args, found.tokenizer)
    if prepared.template is not None:
        found.tokenizer.chat_template = prepared.template
    train_args.bf16 = found.compute_dtype != found.master_dtype
    train_args.max_steps = num_steps(
        len(prepared.train), train_args.global_batch_size, train_args.num_train_epochs, train_args.max_steps
    )
    resolved = run_folder.resolved(arguments)
    train_args.activate(world_size, on_gpu)
    open_cpu_door()
    run_dir = Path(train_args.output_dir)
    run = run_folder.fingerprint(arguments, prepared.fingerprint, found.folder, found.tokenizer.backend_tokenizer.to_str())
    resume_from = _open_run_folder(run_dir, train_args.resume_from_checkpoint, run, resolved, prepared.report.lines())
    reduce_dtype = torch.float32 if model_args.reduce_dtype == "float32" else found.compute_dtype
    meter = _meter(found, train_args, world_size)
    trainer = RecipeTrainer(
        model=meta_model(found.config, model_args, found.master_dtype),
        args=train_args,
        train_dataset=prepared.train,
        eval_dataset=prepared.eval,
        processing_class=found.tokenizer,
        weights=Weights(found.folder) if ranks.is_main() else None,
        plugin=build_plugin(found.compute_dtype, reduce_dtype),
        run=run,
        config=found.config,
        generation=found.generation,
        fresh=found.fresh,
        master_dtype=found.master_dtype,
        meter=meter,
        callbacks=[
            MeterCallback(meter),
            StepRules(len(prepared.train), train_args.global_batch_size, train_args.stop_at_step),
            MetricsFile(run_dir, meter),
            Progress(),
        ],
    )
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    if train_args.export and trainer.state.global_step >= train_args.max_steps:
        trainer.save_model(str(run_dir / run_folder.EXPORT))
        trainer.accelerator.print(f"recipe: exported to {run_dir / run_folder.EXPORT}")
    trainer.end()


def world_size_asked() -> int:
    """Ranks of this launch, as the launcher says it to each of them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _open_run_folder(
    run_dir: Path, asked: str | None, run: dict[str, Any], resolved: dict[str, Any], data_lines: list[str]
) -> Path | None:
    """Claim the run folder and find the checkpoint to go on from: rank 0 looks, every rank learns."""
    resume_from = None
    with ranks.all_or_none("opening the run folder"):
        if ranks.is_main():
            run_folder.claim(run_dir, run)
            resume_from, lines = run_folder.resume_point(run_dir, asked, run)
            run_folder.write_config(run_dir, resolved)
            print("\n".join(f"recipe: {line}" for line in [*data_lines, *lines]), flush=True)
    return ranks.from_main(resume_from)


def _meter(found: preflight.Found, train_args: TrainArguments, world_size: int) -> StepMeter:
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
    noise.quiet()
    try:
        main(parse_arguments())
    except UserError as error:
        if not PartialState._shared_state or PartialState().is_main_process:
            print(f"recipe: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(entry())
