"""Measure the steps between two log lines: time, tokens, waiting for data, memory of every rank."""

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def peak_memory_bytes(device: torch.device) -> int:
    """This rank's peak since it started: allocated GPU memory, or resident host memory on a CPU rank."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS says bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class StepMeter:
    """Sums over the steps since the last `summary`.

    Attributes:
        flops_per_token: see `recipe.plan.flops.flops_per_token`.
        peak_flops: of one GPU, None where not known; then there is no MFU.
        peak_memory: bytes of each rank, as of the last `summary`.
        batch_fingerprints: of each step's global batch, of the steps that the last `summary` was of.
        last_seconds: of the last step.
    """

    device: torch.device
    world_size: int
    flops_per_token: float
    peak_flops: float | None
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data_wait: float = 0.0
    peak_memory: list[int] = field(default_factory=list)
    batch_fingerprints: list[str] = field(default_factory=list)
    last_seconds: float = 0.0
    _began: float = 0.0
    _step_tokens: int = 0
    _step_fingerprint: int = 0
    _fingerprints: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self._began = time.perf_counter()

    def waited_for_data(self) -> None:
        self.data_wait += time.perf_counter() - self._began

    def counted(self, tokens: int, fingerprint: int) -> None:
        """The global batch of the step that runs has `tokens` tokens, without padding, and this fingerprint
        (`recipe.sampling.FingerprintedBatches`, summed over the ranks)."""
        self._step_tokens, self._step_fingerprint = tokens, fingerprint

    def end(self) -> int:
        """The step has ended; returns its tokens."""
        self.last_seconds = time.perf_counter() - self._began
        self.seconds += self.last_seconds
        self.steps += 1
        self.tokens += self._step_tokens
        self._fingerprints.append(f"{self._step_fingerprint % (1 << 64):016x}")
        return self._step_tokens

    def summary(self) -> dict[str, float]:
        """The metrics of the steps since the last call, and a new start. Collective."""
        if not self.steps:
            return {}
        speed = self.tokens / self.seconds
        self.peak_memory = self._memory_by_rank()
        self.batch_fingerprints, self._fingerprints = self._fingerprints, []
        metrics = {
            "tokens_per_second": speed,
            "tokens_per_second_per_gpu": speed / self.world_size,
            "step_seconds": self.seconds / self.steps,
            "data_wait_seconds": self.data_wait / self.steps,
            "peak_memory_gib": max(self.peak_memory) / 2**30,
        }
        if self.peak_flops is not None:
            metrics["mfu"] = speed * self.flops_per_token / (self.peak_flops * self.world_size)
        self.steps, self.tokens, self.seconds, self.data_wait = 0, 0, 0.0, 0.0
        return metrics

    def _memory_by_rank(self) -> list[int]:
        peaks = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        peaks[dist.get_rank()] = peak_memory_bytes(self.device)
        dist.all_reduce(peaks)
        return peaks.tolist()


class MeterCallback(TrainerCallback):
    """Ends the meter's step, and counts the tokens seen into the trainer's state, which checkpoints carry."""

    def __init__(self, meter: StepMeter):
        self.meter = meter

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.num_input_tokens_seen += self.meter.end()
