"""One progress bar, on rank 0: loss, tokens/s, time left."""

import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Progress(TrainerCallback):
    """Takes the place of transformers' bar, which prints each log line between its updates."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            # In a log file, a line every ten seconds and not one each step.
            pace = 0.1 if sys.stderr.isatty() else 10.0
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True, mininterval=pace
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if self.bar is not None and "loss" in logs:
            speed = logs.get("tokens_per_second", 0)
            self.bar.set_postfix_str(f"loss {logs['loss']:.4f}, {speed:,.0f} tokens/s", refresh=sys.stderr.isatty())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
