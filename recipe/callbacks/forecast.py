"""What was predicted of this run against what its first steps show: a run that is off is worth knowing of early."""

from dataclasses import dataclass

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.callbacks.meter import StepMeter, peak_memory_bytes

STEPS = 4  # of a start; the first is slower (allocations, kernels that are chosen) and lacks the optimizer's moments
MEMORY_APART, TIME_APART = 0.15, 0.30  # shares that are worth a warning: some three times the planner's usual error
GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """Of one rank.

    Args:
        memory: bytes, as `peak_memory_bytes` counts them.
        step_seconds: None where nobody knows how fast the device is.
        assumed: what the time rests on and may be wrong.
        lines: for the log, before the run starts.
    """

    memory: float
    step_seconds: float | None
    assumed: str
    lines: tuple[str, ...] = ()


class ForecastCheck(TrainerCallback):
    """Compares once, after the first steps of this start, on rank 0.

    Args:
        forecast: None: nothing was predicted.
    """

    def __init__(self, forecast: Forecast | None, meter: StepMeter):
        self.forecast, self.meter = forecast, meter
        self._seconds: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.forecast is None or not state.is_world_process_zero or len(self._seconds) == STEPS:
            return
        self._seconds.append(self.meter.last_seconds)
        if len(self._seconds) == STEPS:
            seconds = sum(self._seconds[1:]) / (STEPS - 1)
            for line in compare(self.forecast, peak_memory_bytes(self.meter.device), seconds):
                tqdm.write(f"recipe: {line}")


def compare(forecast: Forecast, memory: float, seconds: float) -> list[str]:
    """Lines for the log: predicted and measured, and a warning where they are apart."""
    apart = memory / forecast.memory - 1
    said = f"memory predicted {forecast.memory / GIB:.2f} GiB, measured {memory / GIB:.2f} ({apart:+.0%})"
    warnings = []
    if abs(apart) > MEMORY_APART:
        warnings.append(
            f"warning: memory is {apart:+.0%} from what `recipe plan` predicts; a longer batch or an evaluation may "
            "need as much more"
        )
    if forecast.step_seconds is not None:
        slower = seconds / forecast.step_seconds - 1
        said += f"; a step predicted {forecast.step_seconds:.2f} s, measured {seconds:.2f} ({slower:+.0%})"
        if slower > TIME_APART:
            warnings.append(
                f"warning: a step takes {slower:.0%} longer than `recipe plan` predicts ({forecast.assumed}); look at "
                "the network, at data_wait_seconds in metrics.jsonl, and for other users of these GPUs"
            )
    return [said, *warnings]
