"""`metrics.jsonl` in the run folder: one JSON object a logged step. A resumed run goes on where its checkpoint was."""

import json
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.callbacks.meter import StepMeter

FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """Appends what the trainer logs, each rank's peak memory, and what was trained on; on rank 0. A disk that takes no
    more is no reason to stop: that is for the next checkpoint to say."""

    def __init__(self, run_dir: Path, meter: StepMeter):
        self.path, self.meter = run_dir / FILE, meter
        self._waiting: list[str] = []  # lines that could not be written yet

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Drop the lines of steps that a crash undid, and end a last line that lacks its end."""
        if state.is_world_process_zero and self.path.exists():
            was = self.path.read_text()
            kept = "".join(f"{line}\n" for line in was.splitlines() if _step(line) <= state.global_step)
            if kept != was:
                draft = self.path.with_suffix(".tmp")
                draft.write_text(kept)
                draft.replace(self.path)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if state.is_world_process_zero and logs.keys() & {"loss", "eval_loss", "save_step"}:
            extra: dict[str, Any] = {}
            if "loss" in logs:
                extra["peak_memory_bytes"] = self.meter.peak_memory
                extra["batch_fingerprints"] = self.meter.batch_fingerprints  # one for each step since the last line
            self._append(json.dumps({"step": state.global_step, **logs, **extra}) + "\n")

    def _append(self, line: str) -> None:
        self._waiting.append(line)
        try:
            with self.path.open("a") as file:
                file.write("".join(self._waiting))
            self._waiting = []
        except OSError as error:
            if len(self._waiting) == 1:
                tqdm.write(f"recipe: warning: {self.path} cannot be written ({error.strerror}); its lines wait")


def _step(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):  # a line that a crash cut off
        return 1 << 62
