"""When to stop and what the epoch is: the run's own step arithmetic."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.sampling import SampleStream


class StepRules(TrainerCallback):
    """Counts epochs by samples, and leaves after `stop_at_step` with a checkpoint.

    Args:
        stream: the run's samples.
        stop_at_step: leave after this step as if interrupted, the schedule unchanged; None: never.
    """

    def __init__(self, stream: SampleStream, stop_at_step: int | None):
        self.stream, self.stop_at_step = stream, stop_at_step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # A resumed state carries the old run's intervals; the configuration of today decides.
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # The trainer sees the whole run as one epoch of the sample stream (recipe.sampling).
        state.epoch = self.stream.samples_at(state.global_step) / self.stream.num_rows
        if self.stop_at_step is not None and state.global_step >= self.stop_at_step:
            control.should_save = control.should_training_stop = True
