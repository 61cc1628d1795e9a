"""TRL's `SFTTrainer` with the recipe's loading, order of samples, loss, checkpoints and export. Thin: each override
says what the stock method does otherwise, and calls the room that knows better."""

import math
import time
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
from recipe.checkpoint import publish, retire, shards
from recipe.checkpoint.manifest import Manifest
from recipe.errors import UserError
from recipe.export import drain, write_export
from recipe.loading import StreamingLoader, Weights
from recipe.loss import attach_summed_loss
from recipe.model import torch_dtype
from recipe.preflight import Found, versions
from recipe.sharding import claims, gather, state, wrap
from recipe.sharding.quantized import LocalShardOptimizer
from recipe.stopping import Stopped, StopRequest
from recipe.watchdog import Watchdog


class RecipeTrainer(SFTTrainer):
    """Trains a model that comes on meta.

    Args:
        found: the model's parts, as the checks found them.
        plugin: Accelerate's FSDP plugin (`recipe.sharding.plugin.build_plugin`).
        run: fingerprint of the run, written into every checkpoint.
        meter: measures the steps.
        stop: what asks the run to stop.
        watchdog: hears of every piece of work done.
    """

    model: Any

    def __init__(
        self,
        *,
        found: Found,
        plugin: FullyShardedDataParallelPlugin,
        run: dict[str, Any],
        meter: StepMeter,
        stop: StopRequest,
        watchdog: Watchdog,
        **kwargs: Any,
    ):
        self.found, self.plugin, self.run, self.meter = found, plugin, run, meter
        self.stop, self.watchdog = stop, watchdog
        self.sharding: claims.Sharding | None = None
        self.trained = False  # in this start
        optimizer = _optimizer(kwargs["args"], kwargs["model"])
        super().__init__(processing_class=found.tokenizer, optimizer_cls_and_kwargs=optimizer, **kwargs)
        self.remove_callback(PrinterCallback)  # it prints every log line; the progress bar shows what matters
        attach_summed_loss(self.model)

    # -- assembly --------------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Stock: Accelerate builds its plugin from the environment, and raises without a GPU."""
        return {**super()._build_accelerator_args(**kwargs), "fsdp_plugin": self.plugin}

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Stock: the model has its weights by now, on every rank or (FSDP2) whole on rank 0. Here they stream in."""
        if not wrap.is_sharded(self.model):
            self._shard(read_weights=resume_from_checkpoint is None)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _shard(self, read_weights: bool) -> None:
        began = time.perf_counter()
        weights = Weights(self.found.folder) if read_weights and ranks.is_main() else None
        broadcast = wrap.loader_broadcasts(self.accelerator)
        loader = StreamingLoader(
            self.model, weights, self.found.master_dtype, broadcast, self._loading
        )
        layers, parameters = self.model.config.num_hidden_layers, self.model.num_parameters()
        self.model = self.model_wrapped = wrap.shard(self.accelerator, self.model, loader)
        self.sharding = claims.inspect_sharding(self.accelerator, self.model, layers, parameters)
        args, world_size = self.args, self.accelerator.num_processes
        lines = [
            *self.sharding.lines(),
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
        """Stock: a shuffle per epoch, cut into batches per rank, whose tail depends on the number of ranks."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        samples = self.args.max_steps * self.args.global_batch_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return sampling.SampleStream(len(dataset), samples, seed)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        self.meter.begin()
        self.trained = True
        self.watchdog.at(f"reading the batch of step {self.state.global_step + 1}")
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Stock: gathers the labels' count. Here one all-reduce carries it and the tokens', which a resume goes on
        from."""
        self.meter.waited_for_data()
        counts = torch.zeros(2, dtype=torch.int64)
        for batch in batch_samples:
            counts[0] += batch["labels"][..., 1:].ne(-100).sum()
            counts[1] += batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        counts = counts.to(device)
        dist.all_reduce(counts)
        self.meter.counted(int(counts[1]))
        return counts[0]

    # -- numbers ---------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL: also entropy and accuracy of each micro-batch, gathered and synchronised, and a recomputed head."""
        self.watchdog.at(f"training step {self.state.global_step + 1}")
        if return_outputs or self.args.loss_type != "nll" or self.label_smoother is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = model(**inputs, summed_loss=True)
        # FSDP averages gradients over the ranks; the loss is a mean over all tokens of the global batch.
        return loss * self.accelerator.num_processes / num_items_in_batch.clamp(min=1)

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
                totals[1] += inputs["labels"][..., 1:].ne(-100).sum()
                totals[0] += model(**inputs, summed_loss=True)
        model.train()
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Stock: writes in place, so a crash leaves a newest checkpoint that is not one."""
        saving = f"saving checkpoint {self.state.global_step}"
        self.watchdog.at(saving)
        run_dir = Path(self.args.output_dir)
        began = time.perf_counter()
        summing = partial(self.watchdog.at, f"{saving}: checksums")
        with publish.publishing(run_dir, self.state.global_step, self._describe, summing) as folder:
            self.watchdog.at(f"{saving}: model")
            shards.save(folder, shards.MODEL, state.model_state(self.model, self.args.device))
            self.watchdog.at(f"{saving}: optimizer")
            optimizer = state.optimizer_state(self.model, self.optimizer.optimizer, self.args.device)
            shards.save(folder, shards.OPTIMIZER, optimizer)
            self._save_rng_state(str(folder))
            if ranks.is_main():
                torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
                self.state.save_to_json(str(folder / "trainer_state.json"))
                self.found.config.save_pretrained(folder)
                self.found.generation.save_pretrained(folder)
                self.processing_class.save_pretrained(folder)
        with ranks.all_or_none("deleting old checkpoints"):
            if ranks.is_main():
                retire.retire(run_dir, self.args.save_total_limit)
        step, took = self.state.global_step, time.perf_counter() - began
        _say(f"checkpoint-{step} saved in {took:.1f} s")

    def _describe(self) -> Manifest:
        assert self.sharding is not None
        seen = {"tokens_seen": self.state.num_input_tokens_seen, "epoch": self.state.epoch}
        details = {"sharding": vars(self.sharding), "versions": versions(), **seen}
        return Manifest(self.state.global_step, self.accelerator.num_processes, self.run, details)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Stock: Accelerate's loader, of the same files."""
        self.watchdog.at(f"loading the model of {resume_from_checkpoint}")
        folder = Path(resume_from_checkpoint)
        with ranks.all_or_none(f"loading {folder}"):
            loaded = shards.load(folder, shards.MODEL, state.model_state(self.model, self.args.device))
            state.load_model_state(self.model, loaded, self.args.device)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Stock: loads an FSDP1 optimizer's moments into nothing, in silence (see `recipe.sharding.state`)."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self.watchdog.at(f"loading the optimizer of {folder}")
        with ranks.all_or_none(f"loading the optimizer of {folder}"):
            if not (folder / shards.OPTIMIZER / ".metadata").is_file():
                raise UserError(f"{folder} has no optimizer state ({shards.OPTIMIZER}); resume from another checkpoint")
            mine = state.optimizer_state(self.model, self.optimizer.optimizer, self.args.device)
            loaded = shards.load(folder, shards.OPTIMIZER, mine)
            state.load_optimizer_state(self.model, self.optimizer.optimizer, loaded, self.args.device)
            self.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))

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
                    found, shard_size = self.found, self.args.max_shard_size
                    described = (found.config, found.tokenizer, found.generation)
                    write_export(out, tensors, found.fresh, dtype, shard_size, *described)
            finally:
                drain(tensors)  # gathers are collective: every rank goes through all of them, whatever failed here
        _say(f"exported to {out}")

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
