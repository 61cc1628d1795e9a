"""The planner against benchmarks/published.csv, on which its constants were fitted: that they still fit, that no
prediction sees its measurement, and that rows that cannot be planned say why."""

import csv
import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import plan_accuracy
from benchmarks.plan_accuracy import GOALS, Outcome, compare, predict, summary
from benchmarks.published import COLUMNS, CannotPlan, read, setup_of
from recipe.errors import UserError
from recipe.plan.setup import STRATEGIES
from tests.conftest import ROOT

FITTED, HELD_OUT = plan_accuracy.FITTED[0], plan_accuracy.HELD_OUT
ROWS = read(FITTED) + read(HELD_OUT)


@pytest.fixture(scope="module")
def report():
    """What the script prints, as a user starts it."""
    script = [sys.executable, str(ROOT / "benchmarks/plan_accuracy.py"), "--json", str(FITTED)]
    (part,) = json.loads(subprocess.run(script, capture_output=True, check=True, text=True, cwd="/").stdout)
    return part


@pytest.mark.parametrize("name", GOALS)
def test_the_goals_are_met(report, name):
    median, ninth = GOALS[name]
    found = report["groups"][f"{name} tier 1"]
    assert found["rows"] > 10
    assert found["median"] <= median and found["p90"] <= ninth


def test_every_row_of_what_fits_is_right(report):
    graded = [row for row in report["rows"] if row["tier"] == "1" and row["right"] is not None]
    assert len(graded) == 10 and {row["metric"] for row in graded} == {"fits", "oom", "max_micro_batch"}
    assert [row["id"] for row in graded if not row["right"]] == []


def test_every_row_of_tier_1_is_planned(report):
    tiers = {row["id"]: row["tier"] for row in read(FITTED)}
    assert len(report["rows"]) + len(report["not_planned"]) == len(read(FITTED))
    assert {tiers[row["id"]] for row in report["not_planned"]} == {"2"}
    assert all(row["reason"] for row in report["not_planned"])


@pytest.mark.parametrize("value", ["1", "12345.6"])
def test_predictions_do_not_see_what_was_measured(report, tmp_path, value):
    copy = tmp_path / "other.csv"
    with copy.open("w", newline="") as text:
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(row | {"value": value} for row in read(FITTED))
    other = compare(copy)
    assert [one.predicted for one in other.found] == [row["predicted"] for row in report["rows"]]
    assert [reason for _, reason in other.refused] == [row["reason"] for row in report["not_planned"]]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_row_without_a_value_is_planned_or_says_why(column):
    """Every column emptied in turn, of every row."""
    for row in ROWS:
        assert outcome(row | {column: ""})


@pytest.mark.parametrize("junk", ["?", "-1", "0", "nan", "inf", "1e999", "７", "None", "  "])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_row_with_junk_is_planned_or_says_why(column, junk):
    assert all(outcome(row | {column: junk}) for row in ROWS[::7])


@settings(max_examples=100, deadline=None)  # a time limit would be the machine's
@given(st.fixed_dictionaries({column: st.text(max_size=20) for column in COLUMNS}))
def test_a_row_of_noise_says_why(row):
    assert outcome(row)


def outcome(row: dict[str, str]) -> str:
    """A prediction that is a number, or a reason; anything else raises."""
    try:
        predicted = predict(row).predicted
    except (CannotPlan, UserError) as refused:
        return str(refused)
    assert 0 <= predicted < float("inf")
    return str(predicted)


def row_of(identity: str, **changes: str) -> dict[str, str]:
    (row,) = (row for row in ROWS if row["id"] == identity)
    return row | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": ""}, "seq_len is not stated"),
        ({"num_gpus": "many"}, "num_gpus is 'many'"),
        ({"num_gpus": "12"}, "12 GPUs are no multiple of 8 a node"),
        ({"value": "?"}, "value is '?'"),
        ({"gpu": ""}, "gpu is not stated"),
        ({"gpu": "TPU v4", "gpu_mem_gb": ""}, "gpu 'TPU v4' is not known"),
        ({"strategy": ""}, "strategy is not stated"),
        ({"strategy": "Megatron"}, "strategy 'Megatron' is not known"),
        ({"strategy": "FSDP8 + TP2"}, "tensor, context or pipeline parallelism is not modelled"),
        ({"param_dtype": "nf4"}, "4-bit weights without adapters are not planned"),
        ({"param_dtype": "fp8"}, "fp8 is not modelled"),
        ({"notes": "with torch.compile"}, "torch.compile is not modelled"),
        ({"cpu_offload": "activations"}, "offloaded activations are not modelled"),
        ({"activation_checkpointing": ""}, "activation checkpointing is not stated"),
        ({"activation_checkpointing": "some"}, "activation checkpointing is 'some'"),
        ({"hidden": "", "model": "Unheard-of-7B"}, "Unheard-of-7B: no dimensions"),
        ({"metric": "watts"}, "metric 'watts' is not planned"),
    ],
)
def test_why_a_row_is_not_planned(changes, reason):
    with pytest.raises(CannotPlan) as caught:
        predict(row_of("titan-128", **changes))
    assert str(caught.value) == reason


@pytest.mark.parametrize("notes", ["no compile", "without compile", "torch.compile no", "not compiled; eager", "eager"])
def test_a_run_without_compile_is_planned(notes):
    assert setup_of(row_of("titan-128", notes=notes))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("FSDP2 full shard", "FULL_SHARD"),
        ("ZeRO-3 (DeepSpeed)", "FULL_SHARD"),
        ("FSDP2 reshard never (ZeRO-2)", "SHARD_GRAD_OP"),
        ("ZeRO-1 over all ranks", "ZERO1"),
        ("HSDP", "HYBRID_SHARD"),
        ("DDP", "DDP"),
        ("DDP baseline", "DDP"),
        ("single device full", "NO_SHARD"),
    ],
)
def test_strategies_by_the_names_that_people_give_them(text, name):
    assert setup_of(row_of("titan-128", strategy=text)).strategy == STRATEGIES[name]


@pytest.mark.parametrize(
    ("notes", "gigabits"),
    [("8x200 Gb/s HDR", 1600), ("2 Tb/s RoCE", 2000), ("1600 Gbps nodes", 1600), ("0 Gbps", 400), ("", 400)],
)
def test_the_network_by_its_notes(notes, gigabits):
    assert setup_of(row_of("titan-128", notes=notes)).network.gigabits == gigabits


def test_a_file_without_a_column_is_refused(tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("id,value\na,1\n")
    with pytest.raises(UserError, match="short.csv lacks the columns set, tier, source, model"):
        read(path)
    path.write_text("")
    with pytest.raises(UserError, match="lacks the columns"):
        read(path)


def test_empty_and_short_lines_are_rows_that_say_why(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(",".join(COLUMNS) + "\n" + "," * (len(COLUMNS) - 1) + "\n\na_memory,1,short\n")
    part = compare(path)
    assert not part.found and [reason for _, reason in part.refused] == ["value is not stated"] * 2


def test_the_summary_is_of_absolute_errors():
    def of(error: float, right: bool | None = None) -> Outcome:
        return Outcome({}, 1 + error, 1.0, error, right)

    said = summary([of(-0.10), of(0.02), of(-0.03), of(0.9, right=True), of(0.0, right=False)])
    assert said["rows"] == 3 and said["right"] == "1 of 2"
    assert said["median"] == pytest.approx(0.03) and said["p90"] == pytest.approx(0.10)
    assert said["bias"] == pytest.approx((-0.10 + 0.02 - 0.03) / 3)
    assert summary([]) == {"rows": 0, "right": "0 of 0"}


def test_the_printed_report_names_every_row(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan_accuracy.py", str(FITTED)])
    assert plan_accuracy.main() == 0
    text = capsys.readouterr().out
    assert all(f" {row['id']} " in text for row in read(FITTED))
    assert Counter(line.split(":")[0] for line in text.splitlines())["not planned"] == len(compare(FITTED).refused)


def test_a_file_that_is_not_there_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan_accuracy.py", "nowhere.csv"])
    assert plan_accuracy.main() == 2
    assert "nowhere.csv" in capsys.readouterr().err


def test_adapters_as_others_measured_them():
    """LoRA and QLoRA on two RTX 3090, of which no constant was fitted on any."""
    found = [one for one in plan_accuracy.compare(FITTED).found if one.row["id"].startswith("answer-")]
    assert len(found) == 11
    assert max(abs(one.error) for one in found) < 0.1
