import json
import math
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from recipe.arguments import TrainArguments
from recipe.callbacks import meter as meters
from recipe.callbacks.dtypes import DtypeCheck
from recipe.callbacks.meter import MeterCallback, StepMeter
from recipe.callbacks.metrics import FILE, MetricsFile
from recipe.callbacks.progress import Progress
from recipe.callbacks.steps import StepRules
from recipe.sampling import SampleStream

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, as an only element."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


ARGS, CONTROL = TrainArguments(output_dir="unused", save_steps=100), TrainerControl()


def a_meter(peak_flops: float | None = None, world_size: int = 1) -> StepMeter:
    return StepMeter(torch.device("cpu"), world_size, flops_per_token=1e6, peak_flops=peak_flops)


def step(meter: StepMeter, clock: list[float], wait: float, compute: float, tokens: int) -> int:
    meter.begin()
    clock[0] += wait
    meter.waited_for_data()
    meter.counted(tokens, tokens)
    clock[0] += compute
    return meter.end()


# -- the meter ---------------------------------------------------------------------------------------------------------


def test_a_summary_is_of_all_steps_since_the_last(clock):
    meter = a_meter(peak_flops=1e9)
    assert meter.summary() == {}, "there is nothing to divide by"
    assert step(meter, clock, 0.5, 1.5, 1000) == 1000
    clock[0] += 50  # between two steps: a checkpoint, an evaluation
    step(meter, clock, 1.5, 4.5, 3000)
    found = meter.summary()
    assert found.pop("peak_memory_gib") > 0
    assert found == {
        "tokens_per_second": 500,
        "tokens_per_second_per_gpu": 500,
        "step_seconds": 4,
        "data_wait_seconds": 1,
        "mfu": 0.5,
    }
    step(meter, clock, 0, 2, 100)
    found = meter.summary()
    begun_anew = (found["tokens_per_second"], found["step_seconds"], found["data_wait_seconds"])
    assert begun_anew == (50, 2, 0), "a summary begins a new one"


def test_there_is_no_mfu_where_the_peak_is_not_known(clock):
    meter = a_meter(peak_flops=None)
    step(meter, clock, 0, 1, 10)
    assert "mfu" not in meter.summary()


def test_rates_are_of_one_gpu_too(clock, monkeypatch):
    meter = a_meter(peak_flops=1e9, world_size=4)
    monkeypatch.setattr(meters.dist, "all_reduce", lambda _: None)
    step(meter, clock, 0, 1, 800)
    found = meter.summary()
    assert (found["tokens_per_second"], found["tokens_per_second_per_gpu"], found["mfu"]) == (800, 200, 0.2)


def test_peak_memory_is_known_for_each_rank(clock):
    meter = a_meter()
    step(meter, clock, 0, 1, 10)
    summary = meter.summary()
    (peak,) = meter.peak_memory
    assert 50e6 < peak < 1e12, "in bytes"
    assert summary["peak_memory_gib"] == peak / 2**30


def test_fingerprints_are_of_the_steps_of_the_last_summary(clock):
    """As 16 hex digits, whatever the sign of the sum."""
    meter = a_meter()
    for fingerprint in (1, -1):
        meter.counted(10, fingerprint)
        clock[0] += 1
        meter.end()
    meter.summary()
    assert meter.batch_fingerprints == ["0000000000000001", "ffffffffffffffff"]
    meter.counted(10, 255)
    meter.end()
    meter.summary()
    assert meter.batch_fingerprints == ["00000000000000ff"]


def test_tokens_seen_go_on_from_the_state(clock):
    """Which a checkpoint carries."""
    meter, state = a_meter(), TrainerState(num_input_tokens_seen=5000)
    callback = MeterCallback(meter)
    for tokens in (10, 20):
        meter.begin()
        meter.counted(tokens, tokens)
        callback.on_step_end(ARGS, state, CONTROL)
    assert state.num_input_tokens_seen == 5030


# -- metrics.jsonl -----------------------------------------------------------------------------------------------------


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": 1.0 / step})


def begin(run_dir: Path, text: str, global_step: int, main: bool = True) -> str:
    (run_dir / FILE).write_text(text)
    state = TrainerState(global_step=global_step, is_world_process_zero=main)
    MetricsFile(run_dir, a_meter()).on_train_begin(ARGS, state, CONTROL)
    return (run_dir / FILE).read_text()


def test_a_resume_drops_the_lines_of_steps_that_a_crash_undid(tmp_path):
    written = [line(i) for i in range(1, 8)]
    assert begin(tmp_path, "\n".join(written) + "\n", global_step=4) == "\n".join(written[:4]) + "\n"


@pytest.mark.parametrize("rest", ['{"step": 4, "lo', '{"st', "{", "\x00\x00", '{"loss": 1.0}', "\n"], ids=repr)
def test_a_line_that_a_crash_cut_off_is_dropped(rest, tmp_path):
    whole = f"{line(1)}\n{line(2)}\n"
    assert begin(tmp_path, whole + rest, global_step=9) == whole


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    """The next line does not run into it."""
    assert begin(tmp_path, f"{line(1)}\n{line(2)}", global_step=2) == f"{line(1)}\n{line(2)}\n"


def test_a_fresh_start_begins_a_new_file(tmp_path):
    assert begin(tmp_path, f"{line(1)}\n", global_step=0) == ""
    MetricsFile(tmp_path / "new", a_meter()).on_train_begin(ARGS, TrainerState(), CONTROL)
    assert not (tmp_path / "new").exists()


def test_other_ranks_leave_the_file_alone(tmp_path):
    assert begin(tmp_path, f"{line(1)}\n", global_step=0, main=False) == f"{line(1)}\n"
    state = TrainerState(global_step=2, is_world_process_zero=False)
    MetricsFile(tmp_path, a_meter()).on_log(ARGS, state, CONTROL, {"loss": 1.0})
    assert (tmp_path / FILE).read_text() == f"{line(1)}\n"


def test_training_evaluation_and_saves_are_logged_with_their_step_and_nothing_else_is(tmp_path):
    meter = a_meter()
    meter.peak_memory, meter.batch_fingerprints = [10, 20], ["ab"]
    file = MetricsFile(tmp_path, meter)
    for global_step, logs in (
        (1, {"loss": 2.0, "grad_norm": 0.5}),
        (1, {"eval_loss": 3.0}),
        (2, {"train_runtime": 9.0}),
        (3, {"save_step": 2, "save_pause_seconds": 0.1}),
    ):
        file.on_log(ARGS, TrainerState(global_step=global_step), CONTROL, logs)
    assert [json.loads(text) for text in (tmp_path / FILE).read_text().splitlines()] == [
        {"step": 1, "loss": 2.0, "grad_norm": 0.5, "peak_memory_bytes": [10, 20], "batch_fingerprints": ["ab"]},
        {"step": 1, "eval_loss": 3.0},
        {"step": 3, "save_step": 2, "save_pause_seconds": 0.1},
    ]


def test_what_was_logged_survives_the_next_start(tmp_path):
    """Also where it is no number that JSON knows."""
    file = MetricsFile(tmp_path, a_meter())
    file.on_log(ARGS, TrainerState(global_step=1), CONTROL, {"loss": math.nan})
    before = (tmp_path / FILE).read_text()
    file.on_train_begin(ARGS, TrainerState(global_step=1), CONTROL)
    assert (tmp_path / FILE).read_text() == before


# -- steps -------------------------------------------------------------------------------------------------------------


def rules(stop_at_step: int | None = None, **begin: int) -> StepRules:
    return StepRules(SampleStream(39, 42, global_batch_size=8, max_steps=100, **begin), stop_at_step)


@pytest.mark.parametrize(("stop_at_step", "stops"), [(None, []), (5, [5, 6, 7]), (7, [7]), (9, [])])
def test_it_stops_with_a_checkpoint_at_the_step_asked_for(stop_at_step, stops):
    step_rules, stopped = rules(stop_at_step), []
    for global_step in range(1, 8):
        control = TrainerControl()
        step_rules.on_step_end(ARGS, TrainerState(global_step=global_step), control)
        assert control.should_save is control.should_training_stop
        stopped += [global_step] * control.should_training_stop
    assert stopped == stops


@pytest.mark.parametrize(
    ("begin", "samples"), [({}, 96), ({"step": 4, "samples_seen": 32}, 96), ({"step": 4, "samples_seen": 64}, 128)]
)
def test_an_epoch_is_as_many_samples_as_there_are_rows(begin, samples):
    """Also where the first steps took other batches."""
    state = TrainerState(global_step=12)
    rules(**begin).on_step_end(ARGS, state, TrainerControl())
    assert state.epoch == samples / 39


def test_a_resumed_run_saves_and_logs_when_the_configuration_of_today_says():
    state = TrainerState(global_step=4, max_steps=100, save_steps=2, logging_steps=7, eval_steps=3)
    args = TrainArguments(output_dir="unused", save_steps=50, logging_steps=5, eval_steps=20)
    rules().on_train_begin(args, state, CONTROL)
    assert (state.save_steps, state.logging_steps, state.eval_steps) == (50, 5, 20)


# -- dtypes, progress --------------------------------------------------------------------------------------------------


class Wrapped:
    """As Accelerate hands an optimizer to callbacks."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer


def after_a_step(dtype: torch.dtype) -> tuple[torch.nn.Module, Wrapped]:
    model = torch.nn.Linear(3, 3, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, Wrapped(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_moments_are_what_was_asked_for(dtype, capsys):
    """T2, T3: looked at, not taken from the configuration; once."""
    check = DtypeCheck(dtype)
    model, optimizer = after_a_step(dtype)
    for _ in range(2):
        check.on_step_end(ARGS, TrainerState(), CONTROL, model=model, optimizer=optimizer)
    name = str(dtype).removeprefix("torch.")
    assert capsys.readouterr().out == f"recipe: after step 1: weights in {name}, moments in {name}\n"


def test_weights_or_moments_in_another_dtype_end_the_run():
    model, optimizer = after_a_step(torch.bfloat16)
    with pytest.raises(RuntimeError, match="asks for weights and moments in torch.float32; .* are in bfloat16"):
        DtypeCheck(torch.float32).on_step_end(ARGS, TrainerState(), CONTROL, model=model, optimizer=optimizer)
    model, optimizer = after_a_step(torch.float32)
    for state in optimizer.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(RuntimeError, match="the moments in bfloat16 and float32"):
        DtypeCheck(torch.float32).on_step_end(ARGS, TrainerState(), CONTROL, model=model, optimizer=optimizer)


def test_the_bar_goes_on_where_the_run_does(capsys):
    bar, state = Progress(), TrainerState(global_step=30, max_steps=60)
    bar.on_train_begin(ARGS, state, CONTROL)
    state.global_step = 33
    bar.on_step_end(ARGS, state, CONTROL)
    bar.on_log(ARGS, state, CONTROL, {"loss": 1.23456, "tokens_per_second": 1234.5})
    bar.on_train_end(ARGS, state, CONTROL)
    assert "33/60" in (said := capsys.readouterr().err) and "loss 1.2346, 1,234 tokens/s" in said


def test_there_is_one_bar(capsys):
    bar, state = Progress(), TrainerState(max_steps=60, is_world_process_zero=False)
    for event in (bar.on_train_begin, bar.on_step_end, bar.on_train_end):
        event(ARGS, state, CONTROL)
    assert capsys.readouterr().err == ""
