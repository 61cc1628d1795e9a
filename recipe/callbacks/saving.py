"""Let the optimizer step only when the save in flight has copied what the step changes."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.checkpoint.saver import Saver


class CopyBeforeStep(TrainerCallback):
    """Forward and backward change neither weights nor moments, so the copy is made beside them."""

    def __init__(self, saver: Saver):
        self.saver = saver

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.saver.wait_staged()
