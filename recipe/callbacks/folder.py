"""Make the run folder again if somebody removes it under the run: what the run still writes must find its place."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe import run_folder


class KeepFolder(TrainerCallback):
    """Looks after each step, on rank 0.

    Args:
        run_dir, run, resolved: see `recipe.run_folder`.
    """

    def __init__(self, run_dir: Path, run: dict[str, Any], resolved: dict[str, Any]):
        self.run_dir, self.run, self.resolved = run_dir, run, resolved

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        with suppress(OSError):  # a disk that does not answer, or is full: that is for the next checkpoint to say
            if not (self.run_dir / run_folder.IDENTITY).exists():
                tqdm.write(
                    f"recipe: warning: {self.run_dir} was removed under the run; made again, without its content"
                )
                run_folder.claim(self.run_dir, self.run)
                run_folder.write_config(self.run_dir, self.resolved)
