"""When to stop and what the epoch is: the run's own step arithmetic."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StepRules(TrainerCallback):
    """Counts epochs by samples, and leaves after `stop_at_step` with a checkpoint.

    Args:
        samples_per_epoch: rows of the training set.
        global_batch_size: samples of a step.
        stop_at_step: leave after this step as if interrupted, the schedule unchanged; None: never.
    """

    def __init__(self, samples_per_epoch: int, global_batch_size: int, stop_at_step: int | None):
        self.samples_per_epoch, self.global_batch_size = samples_per_epoch, global_batch_size
        self.stop_at_step = stop_at_step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # A resumed state carries the old run's intervals; the configuration of today decides.
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # The trainer sees the whole run as one epoch of the sample stream (recipe.sampling).
        state.epoch = state.global_step * self.global_batch_size / self.samples_per_epoch
        if self.stop_at_step is not None and state.global_step >= self.stop_at_step:
            control.should_save = control.should_training_stop = True
