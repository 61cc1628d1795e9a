"""After the first step: are weights and moments still in the dtypes that were asked for?"""

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.sharding.claims import check_dtypes


class DtypeCheck(TrainerCallback):
    """Checks once, after the first step of this start, and logs what it saw."""

    def __init__(self, master_dtype: torch.dtype):
        self.master_dtype, self.checked = master_dtype, False

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        **_: Any,
    ) -> None:
        if not self.checked:
            self.checked = True
            line = check_dtypes(model, optimizer.optimizer, self.master_dtype)
            if state.is_world_process_zero:
                tqdm.write(f"recipe: {line}")
