"""Stop all ranks at the same step when any of them was asked to: with a checkpoint, or with the one just written."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.stopping import Stopped, StopRequest


class StopOnRequest(TrainerCallback):
    """Asks all ranks at each step boundary, and after what takes long at one: loading, and a save."""

    def __init__(self, stop: StopRequest):
        self.stop = stop

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        kind = self.stop.agreed(args.device)
        if kind:
            raise Stopped(kind)  # nothing was trained yet: the checkpoint, if there was one, is what it was

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stop.agreed(args.device):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stop.agreed(args.device):
            control.should_training_stop = True
