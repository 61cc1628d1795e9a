"""TRL's `SFTTrainer` with the recipe's loading, order of samples, loss, checkpoints and export. Thin: each override
says what the stock method does otherwise, and calls the room that knows better."""

import math
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from datasets import Dataset
from torch import nn
from torch.utils.data import Sampler
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PrinterCallback
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from recipe import ranks, sampling
from recipe.arguments import TrainArguments
from recipe.callbacks.meter import StepMeter
from recipe.checkpoint.saver import Outcome, Saver
from recipe.export import drain, write_export
from recipe.isolation import check_isolation
from recipe.loading import StreamingLoader, Weights
from recipe.loss import attach_summed_loss
from recipe.model import torch_dtype
from recipe.preflight import Found
from recipe.run_state import RunState
from recipe.sampling import FINGERPRINT, FingerprintedBatches
from recipe.sharding import claims, gather, wrap
from recipe.sharding.quantized import LocalShardOptimizer
from recipe.stopping import Stopped, StopRequest
from recipe.watchdog import Watchdog

SETTLE_SECONDS = 600.0  # until a rank whose training failed no longer waits for its save


class RecipeTrainer(SFTTrainer):
    """Trains a model that comes on meta.

    Args:
        found: the model's parts, as the checks found them.
        plugin: Accelerate's FSDP plugin (`recipe.sharding.plugin.build_plugin`).
        run: fingerprint of the run, written into every checkpoint.
        origin: where its data come from, likewise.
        meter: measures the steps.
        stop: what asks the run to stop.
        watchdog: hears of every piece of work done.
        stream: which samples come, from where this start begins.
        saver: writes the checkpoints.
    """

    model: Any

    def __init__(
        self,
        *,
        found: Found,
        plugin: FullyShardedDataParallelPlugin,
        run: dict[str, Any],
        origin: list[dict[str, Any]],
        meter: StepMeter,
        stop: StopRequest,
        watchdog: Watchdog,
        stream: sampling.SampleStream,
        saver: Saver,
        **kwargs: Any,
    ):
        self.found, self.plugin, self.run, self.origin, self.meter = found, plugin, run, origin, meter
        self.stop, self.watchdog, self.stream, self.saver = stop, watchdog, stream, saver
        self._micro_batch = 0  # of the step that runs, on this rank
        self.save_failed = False  # the last save
        self.run_state: RunState  # once the model is sharded
        self.trained = False  # in this start
        optimizer = _optimizer(kwargs["args"], kwargs["model"])
        super().__init__(processing_class=found.tokenizer, optimizer_cls_and_kwargs=optimizer, **kwargs)
        self.remove_callback(PrinterCallback)  # it prints every log line; the progress bar shows what matters
        attach_summed_loss(self.model)
        self.isolation = self._check_isolation()
        self.data_collator: Any = FingerprintedBatches(self.data_collator)

    # -- assembly --------------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Stock: Accelerate builds its plugin from the environment, and raises without a GPU."""
        return {**super()._build_accelerator_args(**kwargs), "fsdp_plugin": self.plugin}

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Stock: the model has its weights by now, on every rank or (FSDP2) whole on rank 0. Here they stream in."""
        if not wrap.is_sharded(self.model):
            self._shard(read_weights=resume_from_checkpoint is None)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _check_isolation(self) -> list[str]:
        """That packed rows cannot see each other here, before it costs anything; lines for the log."""
        packed = [
            rows for rows in (self.train_dataset, self.eval_dataset) if rows and "seq_lengths" in rows.column_names
        ]
        if not packed:
            return []
        config, attention = self.found.config, self.model.config._attn_implementation
        trust = self.args.trust_remote_code
        with ranks.all_or_none("checking that packed rows are apart"):
            return [check_isolation(config, attention, self.args.device, self.data_collator, packed[0], trust)]

    def _shard(self, read_weights: bool) -> None:
        began = time.perf_counter()
        weights = Weights(self.found.folder) if read_weights and ranks.is_main() else None
        broadcast = wrap.loader_broadcasts(self.accelerator)
        loader = StreamingLoader(self.model, weights, self.found.master_dtype, broadcast, self._loading)
        layers, parameters = self.model.config.num_hidden_layers, self.model.num_parameters()
        self.model = self.model_wrapped = wrap.shard(self.accelerator, self.model, loader)
        sharding = claims.inspect_sharding(self.accelerator, self.model, layers, parameters)
        self.run_state = RunState(self.found, self.model, sharding, self.run, self.origin, self.watchdog.at)
        args, world_size = self.args, self.accelerator.num_processes
        lines = [
            *self.isolation,
            *sharding.lines(),
            f"global batch {args.global_batch_size} = {args.per_device_train_batch_size} samples x "
            f"{args.gradient_accumulation_steps} accumulated x {world_size} ranks; {args.max_steps} steps",
        ]
        if read_weights:
            names = claims.verify_weights(self.model, weights, self.found.master_dtype)
            took = time.perf_counter() - began
            lines.append(f"weights streamed in {took:.1f} s; {', '.join(names)} equal the file on every rank")
        _say(*lines)

    def _loading(self, name: str) -> None:
        self.watchdog.at(f"loading {name}")
        kind = self.stop.agreed(self.args.device)
        if kind:
            raise Stopped(kind)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Stock: bitsandbytes keeps embeddings in 32 bits by looking for its own class."""
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, LocalShardOptimizer):
            embeddings = [m for m in (model or self.model).modules() if isinstance(m, nn.Embedding)]
            optimizer.in_32_bits = [p for m in embeddings for p in m.parameters()]
        return optimizer

    # -- data ------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        """Stock: a shuffle per epoch, cut into batches per rank, whose tail depends on the number of ranks; and a
        resume reads what came before once more."""
        return self.stream

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        self._note(self.saver.poll())
        self.meter.begin()
        self.trained = True
        self._micro_batch = 0
        self.watchdog.at(f"reading the batch of step {self.state.global_step + 1}")
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Stock: gathers the labels' count. Here one all-reduce carries it, the tokens', which a resume goes on from,
        and the fingerprint of the global batch."""
        self.meter.waited_for_data()
        counts = torch.zeros(3, dtype=torch.int64)
        for batch in batch_samples:
            counts[2] += batch.pop(FINGERPRINT).cpu()
            counts[0] += batch["labels"][..., 1:].ne(-100).sum()
            counts[1] += batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        counts = counts.to(device)
        dist.all_reduce(counts)
        tokens, fingerprint = counts[1:].tolist()
        self.meter.counted(tokens, fingerprint)
        return counts[0]

    # -- numbers ---------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL: also entropy and accuracy of each micro-batch, gathered and synchronised, and a recomputed head."""
        self.watchdog.at(f"training step {self.state.global_step + 1}")
        self._seed_micro_batch()
        if return_outputs or self.args.loss_type != "nll" or self.label_smoother is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = model(**inputs, summed_loss=True)
        # FSDP averages gradients over the ranks; the loss is a mean over all tokens of the global batch.
        return loss * self.accelerator.num_processes / num_items_in_batch.clamp(min=1)

    def _seed_micro_batch(self) -> None:
        """So that dropout and the like depend on neither the number of ranks nor on where a run was resumed."""
        number = self._micro_batch * ranks.world_size() + ranks.rank()
        self._micro_batch += 1
        first = self.stream.samples_at(self.state.global_step) + number * self.args.per_device_train_batch_size
        torch.manual_seed(sampling.seed_of(self.args.seed, first))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """Stock: goes on. A norm that is not finite would put NaN into every parameter and moment at the next line."""
        norm = super()._get_grad_norm(model, grad_norm)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"gradient norm is {norm} in step {self.state.global_step + 1}, before the optimizer stepped; the last "
                "checkpoint is unharmed. Lower learning_rate, or look at the rows of this step"
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Stock: TRL's averages. Here the meter's, and TRL's token count from the state, so that it survives a
        resume."""
        if "loss" in logs:
            logs |= self.meter.summary()
            logs["num_tokens"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Stock: a mean of batch means, gathered logits. Here the mean over all labelled tokens of all ranks.

        A request to stop ends it without a result: nobody knows how long the rest would take."""
        model = self.model_wrapped
        model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        stopped = False
        with torch.no_grad():
            for number, inputs in enumerate(dataloader):
                self.watchdog.at(f"evaluating batch {number + 1} after step {self.state.global_step}")
                if self.stop.agreed(self.args.device):
                    stopped = self.control.should_save = self.control.should_training_stop = True
                    break
                inputs = self._prepare_inputs(inputs)
                del inputs[FINGERPRINT]
                totals[1] += inputs["labels"][..., 1:].ne(-100).sum()
                totals[0] += model(**inputs, summed_loss=True)
        model.train()
        wrap.reshard(model)
        if stopped:
            return EvalLoopOutput(None, None, {}, num_samples=len(dataloader.dataset))
        dist.all_reduce(totals)
        loss = (totals[0] / totals[1].clamp(min=1)).item()
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_perplexity": math.exp(min(loss, 700.0))}
        return EvalLoopOutput(None, None, metrics, num_samples=len(dataloader.dataset))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Stock: repeats rows so that every rank has as many batches. Here the fillers have no labels and count
        nothing."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        together = self.accelerator.num_processes * self.args.per_device_eval_batch_size
        return super().get_eval_dataloader(sampling.padded_with_unlabelled(rows, together))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def fit(self, resume_from: str | None) -> None:
        """Train to the end, or to a request to stop; then wait for the save in flight. If training fails on this rank,
        the save may still end well on all of them: their threads need no rank that trains."""
        try:
            self.train(resume_from_checkpoint=resume_from)
        except Exception:
            if self.saver.in_flight:
                tqdm.write(
                    f"recipe: training failed, and a save is in flight: waiting for it\n{traceback.format_exc()}"
                )
                outcome = self.saver.finish(self._saving, SETTLE_SECONDS)
                if outcome is not None and outcome.published:
                    tqdm.write(f"recipe: checkpoint-{outcome.step}, which was being saved, is whole")
            raise
        self._note(self.saver.finish(self._saving), last=True)

    def _saving(self, phase: str) -> None:
        self.watchdog.at(f"waiting for the save: {phase}")

    def _note(self, outcome: Outcome | None, last: bool = False) -> None:
        """Log how a save ended. Raises if it failed because the disk will not take it, if the one before failed too, or
        if it was the `last`."""
        if outcome is None:
            return
        failed_before, self.save_failed = self.save_failed, not outcome.published
        if outcome.disk or failed_before or last:
            outcome.raise_if_failed()
        if not outcome.published:
            _say(
                f"warning: checkpoint-{outcome.step} could not be written: {outcome.failures[-1]}; going on to the next"
            )
            return
        self.log({"save_step": outcome.step, "save_pause_seconds": outcome.pause, "save_total_seconds": outcome.total})
        retired = f"; deleted {', '.join(outcome.retired)}" if outcome.retired else ""
        _say(f"checkpoint-{outcome.step} saved in {outcome.total:.1f} s, pause {outcome.pause:.2f} s{retired}")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Stock: writes in place, so a crash leaves a newest checkpoint that is not one; and training waits."""
        self._note(self.saver.finish(self._saving))
        step, began = self.state.global_step, time.perf_counter()
        self.watchdog.at(f"saving checkpoint {step}")
        samples, optimizer = self.stream.samples_at(step), self.optimizer.optimizer
        content = self.run_state.content(self.state, samples, ranks.world_size(), optimizer, self.lr_scheduler)
        self.saver.save(content, began)
        if not self.args.async_save:
            self._note(self.saver.finish(self._saving))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Stock: Accelerate's loader, of the same files."""
        with ranks.all_or_none(f"loading {resume_from_checkpoint}"):
            self.run_state.load_model(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Stock: loads an FSDP1 optimizer's moments into nothing, in silence (see `recipe.sharding.state`)."""
        if checkpoint is not None:
            with ranks.all_or_none(f"loading the optimizer of {checkpoint}"):
                self.run_state.load_optimizer(Path(checkpoint), self.optimizer.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Stock: each rank's generators, from a pickle. Here a micro-batch's random numbers follow from its place in
        the run (`sampling.seed_of`), so there is nothing to load, and other numbers of ranks draw the same."""

    # -- export ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Stock: writes nothing under SHARDED_STATE_DICT (transformers#30491), or gathers the model on rank 0."""
        out = Path(output_dir or self.args.output_dir)
        self.plugin.set_state_dict_type("FULL_STATE_DICT")
        tensors = self._unless_stopped(gather.full_parameters(self.model))
        with ranks.all_or_none(f"exporting to {out}"):
            try:
                if ranks.is_main():
                    dtype = torch_dtype(self.args.export_dtype)
                    shapes = {name: p.shape for name, p in self.found.fresh.named_parameters()}
                    write_export(out, lambda _: tensors, shapes, dtype, self.args.max_shard_size, self._describe_export)
            finally:
                drain(tensors)  # gathers are collective: every rank goes through all of them, whatever failed here
        _say(f"exported to {out}")

    def _describe_export(self, folder: Path) -> None:
        self.run_state.describe(folder)
        found = Weights(folder).problems(self.found.fresh)
        if found:
            raise RuntimeError("the export does not match the model: " + "; ".join(found))

    def _unless_stopped(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors`, until a request to stop; all ranks take part. With the last step in a checkpoint, another start
        exports it; without one, this export is all there is, and goes on."""
        for name, tensor in tensors:
            self.watchdog.at(f"exporting {name}")
            kind = self.stop.agreed(self.args.device)
            if kind and self.args.save_strategy != "no":
                once_more = "the export was left unfinished; the next start makes it"
                raise Stopped(kind, once_more) if self.trained else Stopped(kind)
            yield name, tensor


def _say(*lines: str) -> None:
    """To the log, on rank 0 (Accelerate's print speaks on every node), past the progress bar."""
    if ranks.is_main():
        tqdm.write("\n".join(f"recipe: {line}" for line in lines))


def _optimizer(
    args: TrainArguments, model: PreTrainedModel
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """bitsandbytes' optimizers behind the one that lets them step on shards; None for torch's own."""
    chosen, kwargs = SFTTrainer.get_optimizer_cls_and_kwargs(args, model)
    if not chosen.__module__.startswith("bitsandbytes"):
        return None
    return LocalShardOptimizer, {"inner": partial(chosen, **kwargs), "lr": args.learning_rate}
