"""The entry: fine-tune a model under FSDP, resume it, export it.

    accelerate launch --config_file configs/accelerate/fsdp1_cpu_2rank.yaml \
        -m recipe.train --config configs/quickstart.yaml [--key value ...]

`main` assembles, in the order of the data's way: arguments, checks, data, model on meta, trainer, export.
"""

import atexit
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from recipe import noise, preflight, ranks, run_folder  # noqa: F401 - noise first, for what importing it does
from recipe.arguments import Arguments, DataArguments, TrainArguments, parse_arguments
from recipe.callbacks.dtypes import DtypeCheck
from recipe.callbacks.folder import KeepFolder
from recipe.callbacks.forecast import ForecastCheck
from recipe.callbacks.meter import MeterCallback, StepMeter
from recipe.callbacks.metrics import MetricsFile
from recipe.callbacks.progress import Progress
from recipe.callbacks.saving import CopyBeforeStep
from recipe.callbacks.steps import StepRules
from recipe.callbacks.stopping import StopOnRequest
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.saver import Saver
from recipe.data import PreparedData, load, prepare
from recipe.errors import REPORTED, UserError, raise_if, record
from recipe.model import meta_model, torch_dtype
from recipe.plan import flops
from recipe.plan.hardware import of_device
from recipe.planning import forecast
from recipe.preflight import network
from recipe.preflight.settings import rows
from recipe.rendezvous import Rendezvous
from recipe.sampling import SampleStream
from recipe.sharding.plugin import build_plugin, open_cpu_door
from recipe.stopping import Stopped, StopRequest
from recipe.trainer import RecipeTrainer
from recipe.watchdog import Watchdog, end_process


def main(arguments: Arguments, stop: StopRequest) -> None:
    _, model_args, train_args = arguments
    world_size, on_gpu = world_size_asked(), torch.cuda.is_available()
    with stop.interruptible():
        report = preflight.inspect(arguments, world_size, on_gpu=on_gpu)
        if "WORLD_SIZE" not in os.environ:
            raise UserError(*report.problems)  # no launcher is one of them, and there is nobody to agree with
        rendezvous = Rendezvous()
        watchdog = Watchdog(Rendezvous(), train_args.hang_timeout, end_process)
        found, lines = preflight.agree(rendezvous, report, arguments)
        data, run = prepare_data(arguments, found, rendezvous, watchdog)
    found.tokenizer.chat_template = data.template or found.tokenizer.chat_template
    resolved = run_folder.resolved(arguments)
    watchdog.at("joining the process group")
    train_args.activate(world_size, on_gpu)
    open_cpu_door()
    watchdog.at("measuring the network")
    foreseen = forecast(arguments, found.config)
    lines += [*network.measure(train_args.device), *data.lines(), *(foreseen.lines if foreseen else ())]
    resume_from, stream = open_run_folder(train_args, run, resolved, lines, len(data.train), watchdog)
    meter = make_meter(found, train_args, world_size)
    run_dir = Path(train_args.output_dir)
    saver = Saver(
        run_dir,
        Rendezvous(),
        train_args.device,
        in_background=train_args.async_save,
        keep=train_args.save_total_limit,
        keep_every=train_args.keep_every,
    )
    trainer = RecipeTrainer(
        model=meta_model(
            found.config, model_args.attn_implementation, found.master_dtype, train_args.trust_remote_code
        ),
        args=train_args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        found=found,
        plugin=build_plugin(found.compute_dtype, torch_dtype(model_args.reduce_dtype)),
        run=run,
        origin=data.origin(),
        meter=meter,
        stop=stop,
        watchdog=watchdog,
        stream=stream,
        saver=saver,
        callbacks=[
            MeterCallback(meter),
            ForecastCheck(foreseen, meter),
            DtypeCheck(found.master_dtype),
            StepRules(stream, train_args.stop_at_step),
            StopOnRequest(stop),
            CopyBeforeStep(saver),
            KeepFolder(run_dir, run, resolved),
            MetricsFile(run_dir, meter),
            Progress(),
        ],
    )
    trainer.fit(resume_from)
    step = trainer.state.global_step
    asked_to_stop = stop.agreed(train_args.device)
    if train_args.export and step >= train_args.max_steps:
        trainer.save_model(str(run_dir / run_folder.EXPORT))
    trainer.end()
    with suppress(TimeoutError):
        rendezvous.gather("ended", True, patience=60)  # the first to leave with a code takes the others with it
    if asked_to_stop and step < train_args.max_steps:
        raise Stopped(asked_to_stop, f"step {step} is in checkpoint-{step}; the same command goes on from there")


def world_size_asked() -> int:
    """Ranks of this launch, as the launcher says it to each of them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def prepare_data(
    arguments: Arguments, found: preflight.Found, rendezvous: Rendezvous, watchdog: Watchdog
) -> tuple[PreparedData, dict[str, Any]]:
    """The data set, and the fingerprint of the run, which is the same on every rank. It may take hours, in which ranks
    wait for the one that builds; no process group is there yet to time out."""
    data_args, _, train_args = arguments
    watchdog.at("preparing the data", patient=True)
    data = data_on_every_rank(data_args, train_args, found.tokenizer, rendezvous)
    train_args.settle(num_rows=len(data.train), bf16=found.compute_dtype != found.master_dtype)
    run = run_folder.fingerprint(arguments, data.fingerprint, found.folder, found.tokenizer)
    preflight.same_run(rendezvous, run)
    return data, run


def data_on_every_rank(
    data_args: DataArguments, train_args: TrainArguments, tokenizer: PreTrainedTokenizerBase, rendezvous: Rendezvous
) -> PreparedData:
    """Rank 0 prepares the data, or finds them prepared; then the first rank of each node that does not see its folder;
    the others map what is there by then. What is wrong with the data is found once, and said by every rank."""
    data, problems = None, []
    if rendezvous.rank == 0:
        try:
            data = prepare(data_args, train_args, tokenizer)
            raise_if(rows(train_args, len(data.train)))
        except UserError as error:
            problems = error.problems
    problems, name = rendezvous.from_main("data", [problems, data.fingerprint if data else None])
    raise_if(problems)
    with rendezvous.all_or_none("data on every node"):
        if data is None and os.environ.get("LOCAL_RANK", "0") == "0":
            data = load(data_args, name) or prepare(data_args, train_args, tokenizer)
            if data.fingerprint != name:
                raise UserError(
                    "the data or the tokenizer differ from those of rank 0; give all nodes the same files, or a "
                    f"data_cache_dir that all see (it is '{data_args.data_cache_dir}')"
                )
    with rendezvous.all_or_none("data on every rank"):
        data = data or load(data_args, name)
        if data is None:
            raise UserError(
                f"data_cache_dir '{data_args.data_cache_dir}' is not the same folder for all ranks of a node"
            )
    return data


def open_run_folder(
    args: TrainArguments,
    run: dict[str, Any],
    resolved: dict[str, Any],
    lines: list[str],
    num_rows: int,
    watchdog: Watchdog,
) -> tuple[str | None, SampleStream]:
    """Claim the run folder and find the checkpoint to go on from, and the samples that come next; log `lines`
    before. Collective."""
    watchdog.at("opening the run folder")
    run_dir, accepted = Path(args.output_dir), args.accepted_changes()
    with ranks.all_or_none("opening the run folder"):
        if ranks.is_main():
            run_folder.claim(run_dir, run, accepted)
            run_folder.write_config(run_dir, resolved)
            print("\n".join(f"recipe: {line}" for line in lines), flush=True)
    folder, found = run_folder.resume_point(run_dir, args.resume_from_checkpoint, run, accepted, watchdog.at)
    if ranks.is_main():
        print("\n".join(f"recipe: {line}" for line in found), flush=True)
    reached = None if folder is None else Manifest.read(folder)
    done = (reached.step, reached.samples_seen) if reached else (0, 0)
    seed = args.seed if args.data_seed is None else args.data_seed
    assert args.global_batch_size is not None, "the checks refuse that"
    stream = SampleStream(num_rows, seed, args.global_batch_size, args.max_steps, *done)
    return None if folder is None else str(folder), stream


def make_meter(found: preflight.Found, train_args: TrainArguments, world_size: int) -> StepMeter:
    assert train_args.max_length is not None, "the checks refuse that"
    config = found.config
    embedding = config.vocab_size * config.hidden_size
    parameters = flops.matmul_parameters(found.fresh.num_parameters(), embedding, config.tie_word_embeddings)
    on_gpu = train_args.device.type == "cuda"
    card = of_device(torch.cuda.get_device_name()) if on_gpu else None
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    width = heads * (config.to_dict().get("head_dim") or config.hidden_size // heads)
    return StepMeter(
        device=train_args.device,
        world_size=world_size,
        flops_per_token=flops.flops_per_token(parameters, layers, width, train_args.max_length),
        peak_flops=card.tflops * 1e12 if card else None,
    )


def entry() -> int:
    """Run `main`; returns the exit code. A user's mistake is printed as such, once, without a traceback."""
    stop = StopRequest()
    stop.listen()
    try:
        main(parse_arguments(), stop)
    except (UserError, Stopped) as error:
        record(str(error), error.exit_code)
        if REPORTED not in os.environ and os.environ.get("RANK", "0") == "0":
            tqdm.write(f"recipe: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - whatever it was, the launcher is told
        record(traceback.format_exc(), exit_code=1)
        traceback.print_exc()
        return 1
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
