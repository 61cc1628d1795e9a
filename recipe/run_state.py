"""What a checkpoint holds of a run that trains, and how a new start takes it up again."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerState

from recipe.checkpoint import shards
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.saver import Content
from recipe.export import describe
from recipe.preflight import Found, code_version, versions
from recipe.sharding import claims, state

SCHEDULE = "scheduler.json"


class RunState:
    """A sharded model, and what trains it.

    Args:
        found: the model's parts, as the checks found them.
        model: sharded.
        sharding: what FSDP made of it.
        run: fingerprint of the run.
        origin: where its data come from.
        on_tensor: called with what is being loaded, tensor by tensor.
    """

    def __init__(
        self,
        found: Found,
        model: nn.Module,
        sharding: claims.Sharding,
        run: dict[str, Any],
        origin: list[dict[str, Any]],
        on_tensor: Callable[[str], object],
    ):
        self.found, self.model, self.sharding, self.run, self.on_tensor = found, model, sharding, run, on_tensor
        self.origin = origin
        self.code = code_version()  # now: somebody may change the checkout under the run

    @cached_property
    def shard_map(self) -> state.ShardMap:
        return state.ShardMap(self.model, {name: p.shape for name, p in self.found.fresh.named_parameters()})

    def content(
        self,
        progress: TrainerState,
        samples_seen: int,
        world_size: int,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
    ) -> Content:
        """Everything, as of now."""
        pieces = {
            shards.MODEL: state.model_pieces(self.shard_map),
            shards.OPTIMIZER: state.optimizer_pieces(self.shard_map, optimizer),
        }
        text = json.dumps(asdict(progress), indent=2, sort_keys=True)  # as `TrainerState.save_to_json` has it
        texts = {"trainer_state.json": text, SCHEDULE: json.dumps(schedule(scheduler))}
        details = {
            "tokens_seen": progress.num_input_tokens_seen,
            "epoch": progress.epoch,
            "data": self.origin,
            "sharding": vars(self.sharding),
            "vocabulary": {"vocab_size": self.found.config.vocab_size, "tokens": len(self.found.tokenizer)},
            "versions": versions(),
            "code": self.code,
        }
        manifest = Manifest(progress.global_step, samples_seen, world_size, self.run, details)
        return Content(pieces, texts, self.describe, manifest)

    def describe(self, folder: Path) -> None:
        """Write the files that a model's folder has beside its weights."""
        describe(folder, self.found.fresh, self.found.config, self.found.tokenizer, self.found.generation)

    def load_model(self, checkpoint: Path) -> None:
        self._read(checkpoint / shards.MODEL, state.model_pieces(self.shard_map))

    def load_optimizer(self, checkpoint: Path, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
        state.load_optimizer(self.shard_map, optimizer, partial(self._read, checkpoint / shards.OPTIMIZER))
        set_schedule(scheduler, json.loads((checkpoint / SCHEDULE).read_text()))

    def _read(self, folder: Path, pieces: list[shards.Piece]) -> None:
        shards.Reader(folder).read(pieces, lambda piece: self.on_tensor(f"loading {piece.index.fqn} of {folder}"))


def schedule(scheduler: LRScheduler) -> dict[str, Any]:
    """Where the learning rate is: what counts, and not what the configuration says."""
    known = scheduler.state_dict()
    return {key: value for key, value in known.items() if key not in ("base_lrs", "lr_lambdas", "_last_lr")}


def set_schedule(scheduler: LRScheduler, place: dict[str, Any]) -> None:
    """Go on at that place of the schedule that the configuration asks for."""
    scheduler.load_state_dict(scheduler.state_dict() | place)
    scheduler._last_lr = scheduler.get_lr()
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate
